"""What trainers and operators do to an engine, through the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ops_rig import oracle, random_tensors, weights_folder
from smg_rig import MODEL, Lane, until

ALL = "engine=tokenspeed"
BODY = {"model": MODEL, "prompt": "a prompt of more than one block", "max_tokens": 6, "temperature": 0}


def text(lane: Lane) -> str:
    answer = lane.gateway.http.post("/v1/completions", json={**BODY, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def operate(lane: Lane, operation: str, **body: object) -> Any:
    answer = lane.gateway.operate(operation, **body)
    assert answer.status_code == 200, (operation, answer.text)
    said = answer.json()["body"]
    assert said["success"], said
    return said["message"]


@pytest.mark.contract("FW-16", "FW-18")
def test_a_pause_keeps_requests_and_a_resume_gives_the_same_answer(lane: Lane) -> None:
    before = text(lane)
    for mode in ("wait", "keep", "abort"):
        operate(lane, "pause_generation", mode=mode)
        operate(lane, "continue_generation")
        assert text(lane) == before


def test_memory_is_given_back_and_taken_again_with_the_same_answers(lane: Lane) -> None:
    before = text(lane)
    for sleep, wake in (("release_memory_occupation", "resume_memory_occupation"), ("sleep", "wake_up")):
        operate(lane, sleep)
        operate(lane, wake)
        assert text(lane) == before


def test_an_engine_is_asked_for_its_health_and_its_facts(lane: Lane) -> None:
    operate(lane, "health")
    assert isinstance(json.loads(operate(lane, "server_info")), dict)


def test_a_version_of_weights_is_named(lane: Lane) -> None:
    operate(lane, "update_weight_version", new_version="step-17")
    assert "step-17" in str(operate(lane, "server_info"))


@pytest.mark.contract("FW-16", "FW-18", "CP-2", "CP-4")
def test_weights_that_a_trainer_wrote_are_taken_under_a_pause_and_computed_with_from_then_on(
    lane: Lane, tmp_path: Path
) -> None:
    from smg.rl import RL, paused  # the gateway's own client, which trainers import

    ids = list(range(1, 40))
    trained = weights_folder(tmp_path / "step-18", random_tensors(18))
    rl = RL(lane.gateway.url, timeout=60.0)

    def roll_out() -> dict[str, Any]:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = lane.gateway.http.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def update(path: str, version: str) -> None:
        with paused(rl, ALL, mode="wait"):
            told = rl.fanout("update_weights_from_disk", {"model_path": path, "weight_version": version}, selector=ALL)
            assert [one.body["success"] for one in told.results.values()] == [True]
            rl.fanout("flush_cache", {}, selector=ALL)

    before = roll_out()["output_ids"]
    assert roll_out()["meta_info"]["cached_tokens"] > 0
    update(trained, "step-18")
    after = roll_out()
    assert [before, after["output_ids"]] == [
        oracle(source, [ids])[0] for source in (f"random:{MODEL}", f"random:{MODEL}@18")
    ]
    assert before != after["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert "step-18" in str(operate(lane, "get_weight_version"))
    update(f"random:{MODEL}", "step-0")
    assert roll_out()["output_ids"] == before


def test_a_wrong_operation_is_answered_with_what_is_wrong(lane: Lane) -> None:
    for operation, body, word in (
        ("nonsense", {}, "nonsense"),
        ("pause_generation", {"mode": "sideways"}, "mode"),
        ("update_weights_from_disk", {"model_path": "/nowhere/at/all"}, "/nowhere/at/all"),
    ):
        answer = lane.gateway.operate(operation, **body)
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["body"]["message"]
    text(lane)


def test_a_recording_is_started_and_ended_and_leaves_a_file(lane: Lane, tmp_path: Path) -> None:
    started = lane.gateway.http.post("/start_profile", json={"output_dir": str(tmp_path), "activities": ["CPU"]})
    assert started.json()["status"] == "success", started.text
    text(lane)
    stopped = lane.gateway.http.post("/stop_profile")
    assert stopped.json()["status"] == "success", stopped.text
    until(lambda: [path for path in tmp_path.rglob("*") if path.is_file()], "the recording")


def test_json_schemas_are_kept_to(lane: Lane) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a number"}], "max_tokens": 200, "temperature": 0}
    answer = lane.gateway.http.post("/v1/chat/completions", json={**body, "response_format": asked})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"])["n"], int)
    else:  # noise of a model without training may go on within the number
        assert choice["message"]["content"].lstrip().startswith("{")
