"""Control routes and /generate over HTTP, on one real server."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ops_rig import blob, oracle, random_tensors, weights_folder
from ops_server import OpsServer, ops_server

BASE = "random:tiny-llama"
IDS = list(range(1, 40))
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG = {**SAMPLING, "max_new_tokens": 80}


@pytest.fixture(scope="module")
def server() -> Iterator[OpsServer]:
    with ops_server() as opened:
        yield opened


@pytest.fixture
def at_rest(server: OpsServer) -> Iterator[None]:
    """Each test leaves the server serving, awake, with nothing running and nothing held."""
    yield
    for name in ("continue_generation", "resume_memory_occupation", "continue_generation"):
        server.call(name)
    assert server.generate(input_ids=[5, 6], sampling_params=SAMPLING)["meta_info"]["completion_tokens"] == 6
    report = server.user.get("/get_load").json()["loads"][0]
    assert (report["num_running_reqs"], report["num_waiting_reqs"]) == (0, 0)


def events(response: httpx.Response) -> Iterator[dict]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", ["/sleep", "/pause_generation", "/flush_cache", "/abort_request", "/start_profile"])
def test_control_routes_take_the_admin_key_and_no_other(server: OpsServer, path: str) -> None:
    assert server.user.post(path).status_code == 401
    wrong = httpx.post(server.url + path, headers={"Authorization": "Bearer other"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "forbidden")
    assert server.admin.get("/v1/models").status_code == 200


def test_trainers_and_load_clients_are_told_what_to_load_the_model_and_its_tokenizer_by(server: OpsServer) -> None:
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        told = server.user.get(path).json()
        assert (told["model_path"], told["tokenizer_path"]) == (BASE, BASE)
        assert told["served_model_name"] == BASE.removeprefix("random:")
    told = server.user.get("/model_info").json()
    assert (told["is_generation"], told["weight_version"]) == (
        True,
        server.user.get("/weight_info").json()["weight_version"],
    )
    (listed,) = server.user.get("/v1/models").json()["data"]
    assert (listed["id"], listed["root"]) == (BASE.removeprefix("random:"), BASE)


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
def test_an_echoed_prompt_of_one_token_is_scored_like_a_longer_one(server: OpsServer, prompt: list[int]) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    for stream in (False, True):
        answer = server.user.post("/v1/completions", json={**body, "stream": stream})
        texts = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
        found = [json.loads(text)["choices"][0]["logprobs"]["token_logprobs"] for text in texts]
        values = [value for part in found for value in part]
        assert len(values) == len(prompt) + 2
        assert [value is None for value in values] == [True] + [False] * (len(prompt) + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_a_token_behind_it(server: OpsServer, stream: bool) -> None:
    body = {"input_ids": [[5, 6, 7], [8]], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    said = [{"max_new_tokens": 0}, {"max_new_tokens": 2, "ignore_eos": True}]
    whole = server.generate(**body, sampling_params={**SAMPLING, "max_new_tokens": 1})
    if stream:
        told = server.user.post("/generate", json={**body, "sampling_params": said, "stream": True})
        found = {
            part["index"]: part for line in told.text.splitlines() if "{" in line for part in [json.loads(line[6:])]
        }
    else:
        found = dict(enumerate(server.generate(**body, sampling_params=said)))
    assert (found[0]["text"], found[0]["output_ids"]) == ("", [])
    meta = found[0]["meta_info"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
    assert (meta["output_token_logprobs"], meta["output_top_logprobs"]) == ([], [])
    assert meta["input_token_logprobs"] == whole[0]["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7]
    assert len(found[1]["output_ids"]) == 2


def test_an_operation_has_a_line_and_a_question_has_none(
    server: OpsServer, at_rest: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tokenspeed.admin")
    server.call("pause_generation")
    server.call("is_paused")
    refused = server.admin.post("/update_weights_from_disk", json={"model_path": "/no\nsuch"})
    assert refused.status_code == 400
    server.call("continue_generation")
    told = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.admin"]
    assert [line.split(",")[0].split(": ")[:2] for line in told] == [
        ["pause_generation", "done"],
        ["update_weights_from_disk", "refused"],
        ["continue_generation", "done"],
    ]
    assert "\n" not in told[1]


def test_generate_tells_tokens_logprobs_and_where_they_came_from(server: OpsServer) -> None:
    asked = {"input_ids": IDS, "sampling_params": SAMPLING, "return_logprob": True, "top_logprobs_num": 2}
    plain = server.generate(**asked, logprob_start_len=30, rid="mine")
    meta = plain["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 39, 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == plain["output_ids"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS[30:]
    assert all(value <= 0 for value, _, _ in meta["output_token_logprobs"])
    assert len(meta["output_top_logprobs"]) == 6
    assert meta["e2e_latency"] > 0
    with server.user.stream("POST", "/generate", json={**asked, "stream": True}) as response:
        last = list(events(response))[-1]
    assert last["output_ids"] == plain["output_ids"]
    assert last["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    warm = server.generate(input_ids=IDS, sampling_params=SAMPLING)["meta_info"]
    assert 0 < warm["cached_tokens"] < 39


def test_generate_takes_batches_and_choices(server: OpsServer) -> None:
    both = server.user.post(
        "/generate",
        json={"input_ids": [IDS, [5, 6]], "sampling_params": [SAMPLING, {**SAMPLING, "n": 2}], "rid": ["a", "b"]},
    ).json()
    assert [one["meta_info"]["id"] for one in both] == ["a", "b", "b"]
    alone = server.generate(input_ids=[5, 6], sampling_params=SAMPLING)
    assert both[1]["output_ids"] == alone["output_ids"]
    text = server.user.post("/generate", json={"text": ["ab", "cd"], "sampling_params": SAMPLING}).json()
    assert len(text) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [999999]}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"input_ids": [1], "rid": "x" * 1000}, "rid"),
    ],
)
def test_a_faulty_generate_is_a_400_that_names_the_field(
    server: OpsServer, body: dict, field: str, stream: bool
) -> None:
    answer = server.user.post("/generate", json={**body, "stream": stream})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.usefixtures("at_rest")
@pytest.mark.parametrize("how", ["rid", "abort_all"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_ends_requests_with_what_they_have(server: OpsServer, how: str, stream: bool) -> None:
    body = {"input_ids": IDS, "sampling_params": LONG, "rid": "victim-7", "stream": stream}
    server.call("pause", mode="keep")  # so that it is there to be aborted
    answers: list[dict] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            if stream:
                with client.stream("POST", "/generate", json=body) as response:
                    answers.extend(events(response))
            else:
                answers.append(client.post("/generate", json=body).json())

    asking = threading.Thread(target=ask)
    asking.start()
    told = {"aborted": 0}
    while not told["aborted"]:
        told = server.call("abort_request", **({"rid": "victim"} if how == "rid" else {"abort_all": True}))
    asking.join(30)
    assert answers[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.call("abort_request", rid="victim")["aborted"] == 0


@pytest.mark.usefixtures("at_rest")
def test_two_requests_of_one_name_do_not_meet(server: OpsServer) -> None:
    alone = server.generate(input_ids=IDS, sampling_params=SAMPLING)["output_ids"]
    found: list[dict] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                httpx.post(
                    server.url + "/generate",
                    json={"input_ids": IDS, "sampling_params": SAMPLING, "rid": "same"},
                    timeout=30,
                ).json()
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [one["output_ids"] for one in found] == [alone] * 2
    assert [one["meta_info"]["id"] for one in found] == ["same"] * 2


@pytest.mark.usefixtures("at_rest")
def test_questions_are_answered_and_health_goes_on_in_every_state(server: OpsServer) -> None:
    for begin, end, question, key in (
        ("pause_generation", "continue_generation", "is_paused", "is_paused"),
        ("sleep", "wake_up", "is_sleeping", "is_sleeping"),
    ):
        assert server.call(question)[key] is False
        server.call(begin)
        assert server.call(question)[key] is True
        assert server.user.get("/health").status_code == 200
        assert server.user.get("/v1/models").status_code == 200
        server.call(end)
        assert server.call(question)[key] is False


def test_arguments_come_in_the_query_too_and_faults_are_named(server: OpsServer) -> None:
    assert server.admin.post("/sleep?level=1&tags=kv_cache").status_code == 200
    assert server.call("is_sleeping")["released"] == ["kv_cache"]
    assert server.admin.post("/wake_up?tags=kv_cache").status_code == 200
    for path, body, field in (
        ("/pause", {"mode": "retract"}, "mode"),
        ("/sleep", {"level": 9}, "level"),
        ("/update_weights_from_disk", {}, "path"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, "load_format"),
        ("/flush_cache", {"timeout_s": -1}, "timeout_s"),
    ):
        answer = server.admin.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.usefixtures("at_rest")
def test_sleep_and_wake_give_the_same_text_with_nothing_cached(server: OpsServer) -> None:
    before = server.generate(input_ids=IDS, sampling_params=SAMPLING)
    server.call("sleep", level=1)
    server.call("sleep", level=1)
    server.call("wake_up")
    after = server.generate(input_ids=IDS, sampling_params=SAMPLING)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0


@pytest.mark.usefixtures("at_rest")
def test_level_two_is_503_until_weights_come_and_versions_are_stamped(server: OpsServer) -> None:
    before = server.generate(input_ids=IDS, sampling_params=SAMPLING)
    server.call("sleep", level=2)
    server.call("wake_up")
    for stream in (False, True):
        refused = server.user.post("/generate", json={"input_ids": IDS, "stream": stream})
        assert refused.status_code == 503
    body = base64.b64encode(blob(random_tensors(7))).decode()
    server.call(
        "update_weights_from_tensor", serialized_named_tensors=[body], load_format="safetensors", weight_version="t7"
    )
    changed = server.generate(input_ids=IDS, sampling_params=SAMPLING)
    assert changed["output_ids"] != before["output_ids"]
    assert changed["meta_info"]["weight_version"] == "t7"
    refused = server.admin.post("/update_weights_from_disk", json={"model_path": "random:tiny-qwen2"})
    assert refused.status_code == 400
    assert "vocab_size" in refused.json()["message"]
    server.call("update_weights_from_disk", model_path="random:tiny-llama", weight_version="back")
    back = server.generate(input_ids=IDS, sampling_params=SAMPLING)
    assert (back["output_ids"], back["meta_info"]["weight_version"]) == (before["output_ids"], "back")
    server.call("update_weight_version", new_version="renamed")
    assert server.generate(input_ids=IDS, sampling_params=SAMPLING)["meta_info"]["weight_version"] == "renamed"
    assert server.user.get("/get_weight_version").json() == {"weight_version": "renamed"}


@pytest.mark.usefixtures("at_rest")
def test_files_that_a_trainer_wrote_are_served_under_a_pause_and_beside_it(server: OpsServer, tmp_path: Path) -> None:
    folder = weights_folder(tmp_path / "trained", random_tensors(7))
    expected = {folder: oracle("random:tiny-llama@7", [IDS], 6)[0], BASE: oracle(BASE, [IDS], 6)[0]}
    for source, pause in ((folder, True), (BASE, True), (folder, False), (BASE, False)):
        if pause:
            server.call("pause_generation", mode="wait")
        server.call("update_weights_from_disk", model_path=source, weight_version=source)
        if pause:
            server.call("continue_generation")
        answer = server.generate(input_ids=IDS, sampling_params=SAMPLING)
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (expected[source], source)


@pytest.mark.usefixtures("at_rest")
def test_a_flush_right_after_the_last_token_succeeds_every_time(server: OpsServer) -> None:
    for _ in range(30):
        server.generate(input_ids=IDS, sampling_params=SAMPLING)
        server.call("flush_cache", timeout=5)
        assert server.generate(input_ids=IDS, sampling_params=SAMPLING)["meta_info"]["cached_tokens"] == 0


@pytest.mark.usefixtures("at_rest")
@pytest.mark.contract("KM-42", "KM-43", "KM-46")
def test_a_recording_of_three_forwards_has_the_forward_thread_in_it(server: OpsServer, tmp_path: Path) -> None:
    refused = server.admin.post("/start_profile", json={"activities": ["CPU", "GPU"]})
    assert refused.status_code == 400
    assert "GPU cannot be recorded" in refused.json()["message"]
    started = server.call("start_profile", output_dir=str(tmp_path), num_steps=3)
    again = server.admin.post("/start_profile", json={"output_dir": str(tmp_path)})
    assert again.status_code == 400
    server.generate(input_ids=IDS, sampling_params=SAMPLING)
    stopped = server.call("stop_profile")
    assert stopped["output"] == started["output"]
    trace = json.loads(Path(stopped["output"][0]).read_text())
    plans = [event for event in trace["traceEvents"] if "rows=" in str(event.get("name"))]
    work = {event.get("tid") for event in trace["traceEvents"] if str(event.get("name")).startswith("aten::")}
    assert len(plans) == 3
    assert work - {plan["tid"] for plan in plans}  # submitted by one thread, computed by another
    assert server.admin.post("/stop_profile").status_code == 400
