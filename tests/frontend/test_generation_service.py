"""Generation over a scripted engine: fan-out, text, stop strings, limits, cleaning up."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import attrs
import pytest
from frontend_rig import FrontendRig, frontend
from piece_tokenizer import EOS, EOS_TOO, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info, logprob_of, says

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.frontend.generation import LOGPROB_FLOOR, ChoiceDelta, ChoiceResult, GenerationInput, joined
from tokenspeed.plane.messages import OutputBatch, SamplingParams, frozen_tokens
from tokenspeed.settings.model import ServerSettings
from tokenspeed.testing import HandClock

pytestmark = pytest.mark.anyio

TOKENIZER = piece_tokenizer()


@pytest.fixture
async def rig() -> AsyncIterator[FrontendRig]:
    async with frontend() as made:
        yield made


def inp(text: str = "hi", *, max_new: int | None = 16, **fields: object) -> GenerationInput:
    sampling = fields.pop("sampling", SamplingParams())
    assert isinstance(sampling, SamplingParams)
    return GenerationInput(
        prompt_ids=frozen_tokens(TOKENIZER.encode(text)),
        sampling=attrs.evolve(sampling, max_new_tokens=max_new),
        **fields,  # type: ignore[arg-type]
    )


async def collect(rig: FrontendRig, *inputs: GenerationInput, steps_at_once: int = 1) -> list[ChoiceDelta]:
    """All deltas; the engine makes so many steps between two looks."""
    found: list[ChoiceDelta] = []

    async def read() -> None:
        async with aclosing(rig.service.stream_batch(inputs)) as deltas:
            async for delta in deltas:
                found.append(delta)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    while not task.done():
        for _ in range(steps_at_once):
            rig.engine.step()
        for _ in range(3):
            await asyncio.sleep(0)
    await task
    return found


async def run(rig: FrontendRig, given: GenerationInput, *, steps_at_once: int = 1) -> ChoiceResult:
    return joined(await collect(rig, given, steps_at_once=steps_at_once))


def nothing_left(rig: FrontendRig) -> bool:
    return rig.client.in_flight == 0 and rig.service.gate.live == 0 and rig.metric("frontend_live_sequences") == 0


async def test_text_comes_piece_by_piece_and_the_pieces_are_the_whole(rig: FrontendRig) -> None:
    ids = TOKENIZER.encode("hello world, 日本é")
    rig.engine.script = says(ids)
    deltas = await collect(rig, inp(max_new=len(ids)))
    assert "".join(d.text for d in deltas) == "hello world, 日本é"
    assert [d.finish_reason for d in deltas] == [None] * (len(ids) - 1) + ["length"]
    assert [d.completion_tokens for d in deltas] == list(range(1, len(ids) + 1))
    assert deltas[-1].prompt_tokens == 2
    assert nothing_left(rig)


async def test_a_character_of_several_tokens_is_never_split(rig: FrontendRig) -> None:
    raw = list("a日é!".encode())
    rig.engine.script = says(raw)
    deltas = await collect(rig, inp(max_new=len(raw)))
    assert [d.text for d in deltas] == ["a", "", "", "日", "", "é", "!"]


async def test_bytes_that_never_become_a_character_are_replaced_at_the_end(rig: FrontendRig) -> None:
    rig.engine.script = says([*b"ok", *"日".encode()[:2]])
    assert (await run(rig, inp(max_new=4))).text == "ok�"


# ---- stop strings ----

TEXT = "hello world 日本é stop the end, hello again; naïve façade … done"


def stops_of(text: str) -> list[str]:
    source = random.Random(7)
    starts = [source.randrange(len(text) - 6) for _ in range(25)]
    return sorted({text[start : start + size] for start in starts for size in (1, 2, 3, 6)})


@pytest.mark.parametrize("steps_at_once", [1, 5, 100])
@pytest.mark.parametrize("as_bytes", [False, True], ids=["pieces", "bytes"])
async def test_output_ends_right_before_the_first_occurrence_of_any_stop_string(
    rig: FrontendRig, *, as_bytes: bool, steps_at_once: int
) -> None:
    ids = list(TEXT.encode()) if as_bytes else TOKENIZER.encode(TEXT)
    rig.engine.script = says(ids)
    for stop in stops_of(TEXT):
        result = await run(rig, inp(max_new=len(ids), stop=(stop,)), steps_at_once=steps_at_once)
        end = TEXT.index(stop)
        assert result.text == TEXT[:end]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        # The last token kept is the one that completed the stop string.
        kept = TOKENIZER.decode(result.token_ids)
        assert stop in kept
        assert stop not in TOKENIZER.decode(result.token_ids[:-1])
        assert result.completion_tokens == len(result.token_ids)
    assert nothing_left(rig)


async def test_no_delta_shows_what_a_stop_string_takes_back(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"abcdefg"))
    deltas = await collect(rig, inp(max_new=7, stop=("cde",)))
    assert [d.text for d in deltas] == ["a", "b", "", "", ""]
    deltas = await collect(rig, inp(max_new=7, stop=("cdX",)))
    assert [d.text for d in deltas] == ["a", "b", "", "", "cde", "f", "g"]


async def test_what_was_held_back_is_sent_when_the_output_ends_without_a_match(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"abc"))
    result = await run(rig, inp(max_new=3, stop=("cX",)))
    assert (result.text, result.finish_reason, result.stop_reason) == ("abc", "length", None)


async def test_of_two_stop_strings_where_one_begins_the_other_the_shorter_wins(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"xabcd"))
    result = await run(rig, inp(max_new=5, stop=("abc", "ab")))
    assert (result.text, result.stop_reason) == ("x", "ab")
    assert result.token_ids == tuple(b"xab")


async def test_a_stop_string_can_be_kept(rig: FrontendRig) -> None:
    rig.engine.script = says(TOKENIZER.encode("say hello world"))
    result = await run(rig, inp(stop=("o w",), include_stop=True))
    assert result.text == "say hello w"


async def test_a_stop_string_stops_the_engine_and_trims_what_came_after(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"abcdefghijkl"))
    result = await run(rig, inp(max_new=12, stop=("c",), logprobs=0), steps_at_once=8)
    assert result.text == "ab"
    assert result.token_ids == tuple(b"abc")
    assert [entry.token_id for entry in result.logprobs] == list(b"abc")
    assert result.completion_tokens == 3
    assert rig.engine.aborted == [rig.engine.requests[0].rid]
    assert rig.metric("generation_tokens_total") == 3
    assert rig.metric("request_success_total", finished_reason="stop") == 1


async def test_a_later_match_is_trimmed_to_the_token_that_completed_it(rig: FrontendRig) -> None:
    # "bc" is complete at c, but "abcX" began before it and has to fail first.
    rig.engine.script = says(list(b"zabcdef"))
    result = await run(rig, inp(max_new=7, stop=("abcX", "bc")), steps_at_once=7)
    assert (result.text, result.stop_reason) == ("za", "bc")
    assert result.token_ids == tuple(b"zabc")


async def test_no_stop_string_counts_before_min_tokens(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"xxaxxxxaxx"))
    sampling = SamplingParams(min_new_tokens=8)
    result = await run(rig, inp(max_new=10, sampling=sampling, stop=("a",)))
    assert result.text == "xxaxxxx"
    assert result.completion_tokens == 8
    sampling = SamplingParams(min_new_tokens=9)
    result = await run(rig, inp(max_new=10, sampling=sampling, stop=("a", "xa")))
    assert (result.text, result.finish_reason) == ("xxaxxxxaxx", "length")


# ---- stop tokens ----


async def test_the_eos_token_is_counted_but_not_shown_and_is_no_stop_reason(rig: FrontendRig) -> None:
    rig.engine.script = says([*b"ab", EOS_TOO])
    for skip in (True, False):
        result = await run(rig, inp(skip_special_tokens=skip))
        assert (result.text, result.finish_reason, result.stop_reason) == ("ab", "stop", None)
        assert result.token_ids == (*b"ab", EOS_TOO)
        assert result.completion_tokens == 3
    assert rig.engine.aborted == []


async def test_a_stop_token_of_the_clients_is_the_stop_reason(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"abc"))
    sampling = SamplingParams(stop_token_ids=(ord("b"),))
    result = await run(rig, inp(sampling=sampling))
    assert (result.text, result.stop_reason) == ("a", ord("b"))
    kept = await run(rig, inp(sampling=sampling, include_stop=True))
    assert kept.text == "ab"


async def test_ignore_eos_spares_eos_ids_but_not_the_clients_stop_tokens(rig: FrontendRig) -> None:
    rig.engine.script = says([ord("a"), EOS, ord("b"), EOS_TOO, ord("c")])
    result = await run(rig, inp(sampling=SamplingParams(ignore_eos=True), max_new=5))
    assert (result.text, result.finish_reason, result.completion_tokens) == ("abc", "length", 5)
    both = SamplingParams(ignore_eos=True, stop_token_ids=(EOS_TOO,))
    result = await run(rig, inp(sampling=both, max_new=5))
    assert (result.text, result.finish_reason, result.stop_reason) == ("ab", "stop", EOS_TOO)


# ---- log-probabilities ----


@pytest.mark.parametrize("steps_at_once", [1, 3])
async def test_there_is_one_logprob_for_each_token_in_order_with_the_token_among_its_alternatives(
    rig: FrontendRig, steps_at_once: int
) -> None:
    ids = TOKENIZER.encode("hello world, 日本")
    rig.engine.script = says(ids)
    result = await run(rig, inp(max_new=len(ids), logprobs=3), steps_at_once=steps_at_once)
    assert [entry.token_id for entry in result.logprobs] == ids
    assert [entry.logprob for entry in result.logprobs] == [logprob_of(token) for token in ids]
    for entry in result.logprobs:
        assert (entry.token_id, entry.logprob) in entry.top
        assert len(entry.top) in (3, 4)
    assert [entry.offset for entry in result.logprobs] == [len(TOKENIZER.decode(ids[:at])) for at in range(len(ids))]


async def test_logprobs_of_zero_means_the_token_itself_and_none_means_none(rig: FrontendRig) -> None:
    rig.engine.script = says(list(b"ab"))
    zero = await run(rig, inp(max_new=2, logprobs=0))
    assert [(entry.token_id, entry.top) for entry in zero.logprobs] == [(97, ()), (98, ())]
    none = await run(rig, inp(max_new=2))
    assert none.logprobs == ()
    assert [request.return_logprob for request in rig.engine.requests] == [True, False]


async def test_logprobs_are_finite_whatever_the_engine_says(rig: FrontendRig) -> None:
    task = asyncio.create_task(rig.service.run(inp(max_new=2, logprobs=1)))
    await asyncio.sleep(0)
    for value in (-math.inf, math.nan):
        batch = rig.engine.step  # the engine's own rows, with other numbers
        rig.engine.listener, listener = (lambda _: None), rig.engine.listener
        rows: OutputBatch = batch()
        rig.engine.listener = listener
        rig.engine.emit(rows._replace(logprobs=[[value]]))
        await asyncio.sleep(0)
    (result,) = await task
    assert [entry.logprob for entry in result.logprobs] == [LOGPROB_FLOOR] * 2


async def test_prompt_logprobs_are_one_for_each_prompt_token_the_first_unknown(rig: FrontendRig) -> None:
    ids = TOKENIZER.encode("hello world")
    result = await run(rig, inp("hello world", max_new=2, logprobs=1, prompt_logprobs=2))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [entry.token_id for entry in result.prompt_logprobs[1:] if entry is not None] == ids[1:]
    assert [entry.offset for entry in result.prompt_logprobs[1:] if entry is not None] == [5, 9]
    assert rig.engine.requests[0].prompt_logprobs == 0
    assert rig.engine.requests[0].top_logprobs == 2


# ---- several choices ----


async def test_choices_are_requests_of_their_own_with_seeds_of_their_own(rig: FrontendRig) -> None:
    deltas = await collect(rig, inp(n=3, sampling=SamplingParams(seed=2**64 - 1), max_new=4))
    requests = rig.engine.requests
    assert len({request.rid for request in requests}) == 3
    assert [request.sampling.seed for request in requests] == [2**64 - 1, 2**64 % 2**63, (2**64 + 1) % 2**63]
    finishes = [(d.index, d.finish_reason) for d in deltas if d.finish_reason]
    assert sorted(finishes) == [(0, "length"), (1, "length"), (2, "length")]
    texts = {i: "".join(d.text for d in deltas if d.index == i) for i in range(3)}
    assert len(set(texts.values())) == 3


async def test_several_prompts_come_back_in_order_with_all_their_choices(rig: FrontendRig) -> None:
    task = asyncio.create_task(rig.service.run_batch([inp("a", n=2, max_new=3), inp("b", max_new=1)]))
    await asyncio.sleep(0)
    while not task.done():
        rig.engine.step()
        await asyncio.sleep(0)
    first, second = task.result()
    assert [(r.prompt_index, r.index) for r in (*first, *second)] == [(0, 0), (0, 1), (1, 0)]
    assert [r.completion_tokens for r in (*first, *second)] == [3, 3, 1]
    assert rig.metric("prompt_tokens_total") == 2
    assert rig.metric("e2e_request_latency_seconds_count") == 2
    assert rig.metric("generation_tokens_total") == 7


async def test_choices_may_stop_at_different_lengths_each_ends_exactly_once(rig: FrontendRig) -> None:
    lengths = {0: 1, 1: 5, 2: 3}
    rig.engine.script = lambda request: [*b"x" * lengths[(request.sampling.seed or 0) - 100], EOS]
    deltas = await collect(rig, inp(n=3, sampling=SamplingParams(seed=100)))
    assert {d.index: d.completion_tokens for d in deltas if d.finish_reason == "stop"} == {0: 2, 1: 6, 2: 4}
    assert len([d for d in deltas if d.finish_reason]) == 3
    assert nothing_left(rig)


async def test_if_one_choice_is_refused_none_runs() -> None:
    engine = ScriptedEngine(info=engine_info(max_waiting=4, max_num_seqs=1))
    async with frontend(engine) as rig:
        first = asyncio.create_task(rig.service.run(inp(n=3, max_new=2)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="already waiting") as refused:
            await collect(rig, inp(n=2))  # one of the two would still fit
        assert refused.value.status == 429
        while not first.done():
            engine.step()
            await asyncio.sleep(0)
        assert [result.completion_tokens for result in first.result()] == [2, 2, 2]
        assert engine.quiet
        assert nothing_left(rig)
        assert rig.metric("request_success_total", finished_reason="error") == 2
        assert (await run(rig, inp())).finish_reason == "length"


async def test_more_choices_than_an_engine_can_queue_are_refused_before_it_sees_one() -> None:
    engine = ScriptedEngine(info=engine_info(max_waiting=3))
    async with frontend(engine) as rig:
        with pytest.raises(RequestError, match="at most 3") as refused:
            await collect(rig, inp(n=4))
        assert refused.value.status == 400
        assert rig.engine.requests == []


# ---- ends ----


async def test_closing_the_generator_aborts_what_still_runs(rig: FrontendRig) -> None:
    deltas = rig.service.stream(inp(n=2, max_new=100))
    task = asyncio.create_task(anext(deltas))
    await asyncio.sleep(0)
    rig.engine.step()
    await task
    await deltas.aclose()
    assert sorted(rig.engine.aborted) == sorted(request.rid for request in rig.engine.requests)
    rig.engine.step()
    assert rig.engine.quiet
    assert nothing_left(rig)
    assert rig.metric("request_success_total", finished_reason="abort") == 2


async def test_cancelling_a_waiting_run_aborts_it(rig: FrontendRig) -> None:
    task = asyncio.create_task(rig.service.run(inp()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(rig.engine.aborted) == 1
    assert nothing_left(rig)


async def test_a_request_over_its_time_limit_ends_with_a_clear_error() -> None:
    async with frontend(settings=ServerSettings(request_timeout_s=0.05)) as rig:
        with pytest.raises(RequestError, match=r"longer than its limit of 0.05 s") as over:
            await asyncio.wait_for(rig.service.run(inp()), 10)
        assert over.value.status == 408
        assert len(rig.engine.aborted) == 1
        assert nothing_left(rig)
        assert rig.metric("request_success_total", finished_reason="error") == 1


async def test_a_request_may_shorten_its_limit_but_not_lengthen_it() -> None:
    async with frontend(settings=ServerSettings(request_timeout_s=0.05)) as rig:
        with pytest.raises(RequestError, match=r"0.05 s"):
            await rig.service.run(inp(timeout_s=100.0))
        with pytest.raises(RequestError, match=r"0.01 s"):
            await rig.service.run(inp(timeout_s=0.01))


async def test_the_engines_death_fails_running_requests_at_once(rig: FrontendRig) -> None:
    tasks = [asyncio.create_task(rig.service.run(inp())) for _ in range(3)]
    await asyncio.sleep(0)
    rig.engine.step()
    rig.engine.die()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
    assert nothing_left(rig)
    with pytest.raises(EngineDead):
        await rig.service.run(inp())
    assert nothing_left(rig)


async def test_an_error_of_the_engines_ends_the_request_with_its_words(rig: FrontendRig) -> None:
    rig.engine.refuse = lambda _: (500, "the numbers were not numbers")
    with pytest.raises(RequestError, match="not numbers") as failed:
        await collect(rig, inp())
    assert failed.value.status == 500
    assert nothing_left(rig)


async def test_ending_everything_gives_each_choice_one_abort(rig: FrontendRig) -> None:
    task = asyncio.create_task(rig.service.run(inp(n=2, max_new=100)))
    await asyncio.sleep(0)
    rig.engine.step()
    rig.service.end_all()
    results = await asyncio.wait_for(task, 5)
    assert [result.finish_reason for result in results] == ["abort", "abort"]
    assert [result.completion_tokens for result in results] == [1, 1]
    assert nothing_left(rig)


async def test_max_tokens_beyond_the_context_is_cut_to_what_fits(rig: FrontendRig) -> None:
    result = await run(rig, inp("x" * 250, max_new=100_000), steps_at_once=10)
    assert rig.engine.requests[0].sampling.max_new_tokens == 6
    assert (result.completion_tokens, result.finish_reason) == (6, "length")


async def test_latencies_come_from_the_clock() -> None:
    clock = HandClock()
    async with frontend(clock=clock) as rig:
        task = asyncio.create_task(rig.service.run(inp(max_new=3)))
        await asyncio.sleep(0)
        for seconds in (2.0, 0.5, 0.25):
            clock.advance(seconds)
            rig.engine.step()
            for _ in range(3):
                await asyncio.sleep(0)
        await task
        assert rig.metric("time_to_first_token_seconds_sum") == 2.0
        assert rig.metric("inter_token_latency_seconds_sum") == 0.75
        assert rig.metric("inter_token_latency_seconds_count") == 2
        assert rig.metric("e2e_request_latency_seconds_sum") == 2.75


async def test_cached_tokens_are_reported_and_never_more_than_the_prompt(rig: FrontendRig) -> None:
    rig.engine.cached = 16
    result = await run(rig, inp("x" * 20))
    assert result.cached_tokens == 16
    assert rig.metric("prefix_cache_hits_total") == 16
    assert rig.metric("prefix_cache_queries_total") == 20


async def test_thousands_of_requests_leave_nothing_behind(rig: FrontendRig) -> None:
    for _ in range(20):
        await asyncio.gather(collect(rig, *[inp(max_new=1) for _ in range(20)]))
    assert nothing_left(rig)
    assert rig.client.state.routes == {}
    assert not rig.client.state.incoming
