"""Pauses, memory and weights on a real rank: what each client sees, and under which weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from ops_rig import HandRank, blob, greedy, hand_rank, oracle, random_tensors, tiny_settings, weights_folder

from tokenspeed.plane.messages import AbortRequest, Finish, FlushCacheOp, PauseMode, PauseOp, ResumeOp
from tokenspeed.plane.operations import (
    AskOp,
    DiskWeights,
    Question,
    ReleaseMemoryOp,
    ResumeMemoryOp,
    TensorWeights,
    UpdateWeightsOp,
    WeightVersionOp,
)
from tokenspeed.settings.model import Forward

PROMPT = list(range(1, 40))
OTHER = list(range(60, 90))
BASE = "random:tiny-llama"


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with other weights of the same model."""
    return weights_folder(tmp_path_factory.mktemp("second"), random_tensors(7))


@pytest.fixture(scope="module")
def by_weights(second: str) -> dict[str, list[int]]:
    """Greedy tokens after PROMPT, by source of the weights."""
    return {
        BASE: oracle(BASE, [PROMPT])[0],
        second: oracle(f"{BASE}@7", [PROMPT])[0],
    }


@pytest.fixture(params=[False, True], ids=["depth0", "depth1"])
def rank(request: pytest.FixtureRequest) -> Iterator[HandRank]:
    with hand_rank(tiny_settings(overlap=request.param)) as opened:
        yield opened


def ask(rank: HandRank, question: Question) -> dict[str, object]:
    reply = rank.call(AskOp, question=question)
    assert reply.success
    told: dict[str, object] = json.loads(reply.message)
    return told


@pytest.mark.contract("CP-32", "CP-33", "CP-34", "CP-36")
def test_an_update_from_disk_changes_every_later_token_and_nothing_cached_survives_it(
    rank: HandRank, second: str, by_weights: dict[str, list[int]]
) -> None:
    assert rank.run(greedy("a", PROMPT)) == [by_weights[BASE]]
    assert rank.run(greedy("warm", PROMPT)) == [by_weights[BASE]]
    assert rank.cached("warm") > 0
    assert rank.call(UpdateWeightsOp, source=DiskWeights(path=second), version="v2").success
    assert rank.run(greedy("b", PROMPT)) == [by_weights[second]]
    assert rank.cached("b") == 0
    assert ask(rank, Question.WEIGHT_VERSION) == {"weight_version": "v2"}
    assert (rank.versions("a"), rank.versions("b")) == ({"default"}, {"v2"})


def test_an_update_waits_for_running_requests_and_holds_new_ones_back(
    rank: HandRank, second: str, by_weights: dict[str, list[int]]
) -> None:
    rank.put(greedy("old", PROMPT))
    rank.rounds(3)
    call = rank.start(UpdateWeightsOp, source=DiskWeights(path=second))
    rank.put(greedy("new", PROMPT))
    rank.rounds(1)
    assert rank.replied(call) is None
    assert rank.answer(call).success
    rank.settle()
    assert rank.link.tokens("old") == by_weights[BASE]
    assert rank.link.tokens("new") == by_weights[second]
    assert (rank.versions("old"), rank.versions("new")) == ({"default"}, {"1"})


def test_an_update_that_aborts_ends_running_requests_with_what_they_have(rank: HandRank, second: str) -> None:
    rank.put(greedy("old", PROMPT, 60))
    rank.rounds(5)
    assert rank.call(UpdateWeightsOp, source=DiskWeights(path=second), abort=True).success
    finish, status, message = rank.link.finish("old") or (0, 0, "")
    assert (finish, status, message) == (Finish.ABORT, 0, "the weights are being updated")
    assert len(rank.link.tokens("old")) < 60


@pytest.mark.parametrize("forward", [Forward.NATIVE, Forward.TORCH])
def test_tensors_replace_some_weights_and_later_ones_add_to_them(forward: Forward, by_weights: object) -> None:
    settings = tiny_settings()
    settings = attrs.evolve(settings, device=attrs.evolve(settings.device, forward=forward))
    tensors = random_tensors(7)
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in names[at::2]} for at in range(2)]
    with hand_rank(settings) as rank:
        for half in halves:
            assert rank.call(UpdateWeightsOp, source=TensorWeights(blobs=(blob(half),))).success
        parts = rank.run(greedy("a", PROMPT))
        assert rank.call(ReleaseMemoryOp).success
        assert rank.call(ResumeMemoryOp).success
        assert rank.run(greedy("b", PROMPT)) == parts  # a release does not lose what came without a file
    with hand_rank(settings) as rank:
        assert rank.call(UpdateWeightsOp, source=TensorWeights(blobs=(blob(tensors),))).success
        assert rank.run(greedy("a", PROMPT)) == parts


@pytest.mark.contract("CP-31", "CP-36")
@pytest.mark.parametrize("fault", ["shape", "missing", "stranger", "truncated", "nowhere", "model", "bytes"])
def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving(
    fault: str, tmp_path: Path, by_weights: dict[str, list[int]]
) -> None:
    tensors = random_tensors(7)
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "shape":
        tensors[name] = tensors[name][:, :-1]
    elif fault == "missing":
        del tensors[name]
    elif fault == "stranger":
        tensors["model.layers.1.mlp.up_proj.bias"] = tensors[name][0].clone()
    folder = weights_folder(tmp_path / "bad", tensors)
    source: object = DiskWeights(path=folder)
    if fault == "truncated":
        file = tmp_path / "bad" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    told = {
        "shape": ("down_proj.weight", "(64, 127)", "(64, 128)"),
        "missing": ("down_proj.weight", "missing"),
        "stranger": ("up_proj.bias", "not in this architecture"),
        "truncated": ("model.safetensors", "truncated"),
        "nowhere": ("/no/such/place",),
        "model": ("another model", "vocab_size is 288, here 264"),
        "bytes": ("tensors[0]", "safetensors"),
    }[fault]
    if fault == "nowhere":
        source = DiskWeights(path="/no/such/place")
    elif fault == "model":
        source = DiskWeights(path="random:tiny-qwen2")
    elif fault == "bytes":
        source = TensorWeights(blobs=(b"not a file",))
    with hand_rank() as rank:
        reply = rank.call(UpdateWeightsOp, source=source, version="bad")
        assert not reply.success
        assert all(part in reply.message for part in told), reply.message
        assert rank.run(greedy("a", PROMPT)) == [by_weights[BASE]]
        assert rank.versions("a") == {"default"}


@pytest.mark.contract("CP-7", "CP-8", "CP-20", "CP-4")
def test_memory_is_released_by_tag_and_the_engine_serves_when_all_is_back(
    rank: HandRank, by_weights: dict[str, list[int]]
) -> None:
    assert rank.run(greedy("a", PROMPT)) == [by_weights[BASE]]
    assert rank.call(ReleaseMemoryOp, tags=("weights",)).success
    assert rank.call(ReleaseMemoryOp, tags=("kv_cache",)).success
    assert ask(rank, Question.SLEEPING)["released"] == ["kv_cache", "weights"]
    rank.put(greedy("b", PROMPT))
    rank.settle()
    assert rank.link.tokens("b") == []
    assert rank.call(ResumeMemoryOp, tags=("weights",)).success
    rank.settle()
    assert rank.link.tokens("b") == []
    assert rank.call(ResumeMemoryOp, tags=("kv_cache",)).success
    rank.settle()
    assert rank.link.tokens("b") == by_weights[BASE]
    assert rank.cached("b") == 0
    assert ask(rank, Question.SLEEPING) == {"is_sleeping": False, "released": [], "weights": True}


@pytest.mark.contract("CP-7")
def test_a_release_waits_for_a_running_request(rank: HandRank, by_weights: dict[str, list[int]]) -> None:
    rank.put(greedy("a", PROMPT))
    rank.rounds(3)
    assert rank.call(ReleaseMemoryOp).success
    assert rank.link.tokens("a") == by_weights[BASE]


def test_releases_and_resumes_may_be_repeated(rank: HandRank, by_weights: dict[str, list[int]]) -> None:
    assert rank.call(ResumeMemoryOp).success
    for _ in range(2):
        assert rank.call(ReleaseMemoryOp).success
    for _ in range(2):
        assert rank.call(ResumeMemoryOp).success
    assert rank.run(greedy("a", PROMPT)) == [by_weights[BASE]]


def test_forgotten_weights_are_missed_in_words_until_others_come(
    rank: HandRank, second: str, by_weights: dict[str, list[int]]
) -> None:
    assert rank.call(ReleaseMemoryOp, restore=False).success
    rank.put(greedy("held", PROMPT))
    assert not rank.call(UpdateWeightsOp, source=DiskWeights(path=second)).success
    assert rank.call(ResumeMemoryOp).success
    rank.settle()
    assert (rank.link.finish("held") or (0, 0))[1] == 503
    rank.put(greedy("late", PROMPT))
    rank.settle()
    assert (rank.link.finish("late") or (0, 0))[1] == 503
    assert ask(rank, Question.SLEEPING)["is_sleeping"] is True
    assert rank.call(UpdateWeightsOp, source=DiskWeights(path=second)).success
    assert rank.run(greedy("a", PROMPT)) == [by_weights[second]]


@pytest.mark.contract("CP-11", "CP-31")
def test_a_keep_pause_refuses_what_would_have_to_drain_and_its_streams_go_on(
    rank: HandRank, second: str, by_weights: dict[str, list[int]]
) -> None:
    rank.put(greedy("a", PROMPT))
    rank.rounds(3)
    assert rank.call(PauseOp, mode=PauseMode.KEEP).success
    for op, fields in (
        (ReleaseMemoryOp, {}),
        (UpdateWeightsOp, {"source": DiskWeights(path=second)}),
        (WeightVersionOp, {"version": "x"}),
    ):
        assert not rank.call(op, **fields).success
    assert not rank.call(FlushCacheOp).success
    assert rank.call(ResumeOp).success
    rank.settle()
    assert rank.link.tokens("a") == by_weights[BASE]
    assert rank.versions("a") == {"default"}


@pytest.mark.contract("CP-12", "CP-10")
def test_a_pause_is_refused_while_memory_is_released(rank: HandRank) -> None:
    assert rank.call(ReleaseMemoryOp, tags=("weights",)).success
    for mode in PauseMode:
        assert not rank.call(PauseOp, mode=mode).success
    assert rank.call(ReleaseMemoryOp, tags=("kv_cache",)).success
    assert rank.call(ResumeMemoryOp).success
    assert ask(rank, Question.PAUSED)["is_paused"] is False


@pytest.mark.contract("CP-20")
def test_an_empty_resume_during_a_drain_has_no_effect(rank: HandRank) -> None:
    rank.put(greedy("a", PROMPT, 20))
    rank.rounds(3)
    pause = rank.start(PauseOp, mode=PauseMode.WAIT)
    assert rank.call(ResumeMemoryOp).success
    rank.put(greedy("b", OTHER))
    assert rank.answer(pause).success
    rank.settle()
    assert rank.link.tokens("b") == []


def test_an_update_under_a_pause_leaves_the_pause_in_force(
    rank: HandRank, second: str, by_weights: dict[str, list[int]]
) -> None:
    assert rank.call(PauseOp, mode=PauseMode.ABORT).success
    rank.put(greedy("a", PROMPT))
    assert rank.call(UpdateWeightsOp, source=DiskWeights(path=second)).success
    rank.settle()
    assert rank.link.tokens("a") == []
    assert rank.call(ResumeOp).success
    rank.settle()
    assert rank.link.tokens("a") == by_weights[second]


def test_aborts_reach_requests_by_id_by_prefix_and_all_at_once_held_back_or_running(rank: HandRank) -> None:
    rank.put(*(greedy(rid, PROMPT, 60) for rid in ("x-1", "x-2", "y-1", "z")))
    rank.rounds(4)
    rank.put(AbortRequest(prefixes=("x-",)))
    rank.rounds(2)
    assert [rid for rid in ("x-1", "x-2", "y-1", "z") if rank.link.finish(rid)] == ["x-1", "x-2"]
    rank.call(PauseOp, mode=PauseMode.KEEP)
    rank.put(greedy("held", PROMPT))
    rank.rounds(1)
    rank.put(AbortRequest(every=True), greedy("after", PROMPT))
    rank.settle()
    assert [(rank.link.finish(rid) or (0,))[0] for rid in ("y-1", "z", "held")] == [Finish.ABORT] * 3
    assert rank.call(ResumeOp).success
    rank.settle()
    assert len(rank.link.tokens("after")) == 8


@pytest.mark.parametrize("host_gib", [0.01])
def test_the_host_tier_forgets_with_the_device(host_gib: float, second: str, by_weights: dict[str, list[int]]) -> None:
    settings = tiny_settings(pool_tokens=128)
    settings = attrs.evolve(settings, cache=attrs.evolve(settings.cache, host_gib=host_gib))
    with hand_rank(settings) as rank:
        first = rank.run(greedy("a", PROMPT))
        for at in range(4):  # push the prompt out of the device's pool
            rank.run(greedy(f"f{at}", [100 + at] * 100))
        assert rank.run(greedy("warm", PROMPT)) == first
        assert rank.cached("warm") > 0
        assert rank.call(UpdateWeightsOp, source=DiskWeights(path=second)).success
        assert rank.run(greedy("b", PROMPT)) == [by_weights[second]]
        assert rank.cached("b") == 0
        assert rank.call(ReleaseMemoryOp, tags=("kv_cache",)).success
        assert rank.call(ResumeMemoryOp).success
        assert rank.run(greedy("c", PROMPT)) == [by_weights[second]]


@pytest.mark.contract("CP-35")
def test_loaded_weights_serve_only_once_they_are_committed(
    rank: HandRank, second: str, by_weights: dict[str, list[int]]
) -> None:
    loop = rank.engine.loop
    for accept, wanted in ((False, by_weights[BASE]), (True, by_weights[second])):
        assert loop.plane.load_weights(DiskWeights(path=second)) == ""
        assert rank.run(greedy(f"before-{accept}", PROMPT)) == [by_weights[BASE]]
        assert loop.plane.commit_weights(accept) == ""
        assert loop.scheduler.clear_cache()
        assert rank.run(greedy(f"after-{accept}", PROMPT)) == [wanted]
