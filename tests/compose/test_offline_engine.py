"""The Python API over a tiny random model: batches, streams, cancellation, failures, threads."""

from __future__ import annotations

import asyncio
import re
import signal
import threading

import attrs
import numpy as np
import pytest
import torch

from tokenspeed import Engine
from tokenspeed.compose.offline import SamplingOptions
from tokenspeed.compose.parts import PARTS, check_parts
from tokenspeed.device.sampling.base import SampledTokens
from tokenspeed.errors import EngineDead, RequestError, SettingsError
from tokenspeed.plane.plan import Seat
from tokenspeed.settings.model import DeviceSettings, ModelSettings, SchedulerSettings, Settings
from tokenspeed.telemetry.meters import NullMeter

TINY = Settings(
    model=ModelSettings(source="random:tiny-llama"),
    device=DeviceSettings(kv_pool_tokens=4096),
    scheduler=SchedulerSettings(max_num_seqs=8, max_batched_tokens=128, chunk_tokens=64),
)
GREEDY = SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True)


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("ts-")}


@pytest.mark.contract("PT-2", "SS-12", "PT-5")
def test_the_engine_runs_on_its_own_named_threads_and_leaves_none() -> None:
    before = ours()
    with Engine(TINY) as engine:
        engine.generate("hello", GREEDY)
        assert {"ts-control", "ts-forward", "ts-exec", "ts-frontend"} <= ours()
        assert sum(thread.name == "ts-forward" for thread in threading.enumerate()) == 1
    assert ours() == before


def test_a_batch_comes_back_in_order_and_equal_to_each_prompt_alone() -> None:
    prompts = ["a", "two words", "x" * 90, [5, 6, 7], "the end"]
    with Engine(TINY) as engine:
        together = engine.generate(prompts, GREEDY)
        alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert together[3].prompt_token_ids == (5, 6, 7)
    assert all(done.finish_reason == "length" and len(done.token_ids) == 12 for done in together)


def test_a_stream_adds_up_to_the_plain_result_and_closing_it_cancels_the_request() -> None:
    with Engine(TINY) as engine:
        plain = engine.generate("stream me", GREEDY)[0]
        deltas = list(engine.stream("stream me", GREEDY))
        assert "".join(delta.text for delta in deltas) == plain.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == plain.token_ids
        long = engine.stream("stream me", SamplingOptions(max_tokens=1000, temperature=0.0, ignore_eos=True))
        next(long)
        long.close()
        assert engine.generate("after", GREEDY)[0].finish_reason == "length"


def test_an_interrupt_while_waiting_for_a_stream_ends_its_request_and_the_engine_goes_on() -> None:
    main = threading.current_thread().ident
    assert main is not None
    long = SamplingOptions(max_tokens=2000, temperature=0.0, ignore_eos=True)
    with Engine(TINY) as engine:
        for _ in range(3):
            begun = threading.Event()
            press = threading.Thread(
                target=lambda begun=begun: (begun.wait(10), signal.pthread_kill(main, signal.SIGINT))  # type: ignore[misc]
            )
            press.start()
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come anywhere in the loop
                for _delta in engine.stream("stream me", long):
                    begun.set()
            press.join(10)
        assert engine.generate("hello", GREEDY)[0].finish_reason == "length"
        assert engine._service.in_flight == 0  # what nobody waits for does not go on


@attrs.define(eq=False)
class Interrupts:
    """A sampler that presses Ctrl-C when it has drawn `at` times; `rows` are those of the latest draw."""

    main: int
    at: int
    vocab_size: int
    drawn: int = 0
    rows: int = 0

    def seat(self, seat: Seat) -> None: ...
    def release(self, slot: int) -> None: ...

    def sample(self, logits: torch.Tensor, **_: object) -> SampledTokens:
        self.drawn, self.rows = self.drawn + 1, len(logits)
        if self.drawn == self.at:
            signal.pthread_kill(self.main, signal.SIGINT)
        known = logits[:, : self.vocab_size]
        return SampledTokens(tokens=known.argmax(dim=1), nan=known.isnan().any(dim=1))


def test_an_interrupt_while_a_batch_is_waited_for_ends_all_of_it_in_the_engine() -> None:
    main = threading.current_thread().ident
    assert main is not None
    made: list[Interrupts] = []

    def sampler(*, slots: int, vocab_size: int) -> Interrupts:
        made.append(Interrupts(main=main, at=20, vocab_size=vocab_size))
        return made[-1]

    long = SamplingOptions(max_tokens=2000, temperature=0.0, ignore_eos=True)
    with Engine(TINY, sampler=sampler) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["one", "two", "three"], long)
        assert engine._service.in_flight == 0
        assert engine.generate("hello", GREEDY)[0].finish_reason == "length"
        assert made[-1].drawn < 200  # of 2000
        assert made[-1].rows == 1  # the others did not go on beside it


def test_a_batch_whose_waiter_is_cancelled_ends_in_the_engine() -> None:
    long = SamplingOptions(max_tokens=2000, temperature=0.0, ignore_eos=True)

    async def give_up(engine: Engine) -> None:
        stream = engine.stream_async("begin", long)
        await anext(stream)
        waiting = asyncio.ensure_future(engine.generate_async(["one", "two"], long))
        for _ in range(3):
            await anext(stream)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        late = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait((late,))
        await stream.aclose()

    with Engine(TINY) as engine:
        asyncio.run(give_up(engine))
        assert engine.generate("hello", GREEDY)[0].finish_reason == "length"
        assert engine._service.in_flight == 0


def test_a_stream_that_outlives_its_engine_or_is_collected_on_the_engines_own_loop_ends_in_silence() -> None:
    long = SamplingOptions(max_tokens=2000, temperature=0.0, ignore_eos=True)
    with Engine(TINY) as engine:
        late, dropped = engine.stream("one", long), [engine.stream("two", long)]
        next(late)
        next(dropped[0])

        async def collect() -> None:
            dropped.clear()

        engine._on_loop(collect())
        assert engine.generate("hello", GREEDY)[0].finish_reason == "length"
        assert engine._service.in_flight == 1
    late.close()


def test_the_async_twins_give_the_same_and_run_side_by_side() -> None:
    async def work(engine: Engine) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        batch = engine.generate_async(["one", "two"], GREEDY)

        async def streamed() -> tuple[int, ...]:
            return tuple([token async for delta in engine.stream_async("one", GREEDY) for token in delta.token_ids])

        done, tokens = await asyncio.gather(batch, streamed())
        return [completion.token_ids for completion in done], tokens

    with Engine(TINY) as engine:
        together, tokens = asyncio.run(work(engine))
        assert together[0] == tokens == engine.generate("one", GREEDY)[0].token_ids


def test_more_prompts_than_the_queue_holds_all_finish() -> None:
    settings = attrs.evolve(TINY, scheduler=attrs.evolve(TINY.scheduler, max_waiting=4))
    with Engine(settings) as engine:
        done = engine.generate([f"prompt {i}" for i in range(40)], SamplingOptions(max_tokens=2, temperature=0.0))
    assert len(done) == 40


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ([[]], SamplingOptions(), "prompts[0]"),
        ([[1, 2], [10**9]], SamplingOptions(), "prompts[1]"),
        ([[1, 2**40]], SamplingOptions(), "prompts[0][1]"),
        ([[1.5]], SamplingOptions(), "prompts[0]: [1.5] is not allowed"),
        (["a", None], SamplingOptions(), "prompts[1]: None is not allowed"),
        (None, SamplingOptions(), "prompts: None is not allowed"),
        ("x", {"max_tokens": 3}, "sampling: SamplingOptions are needed"),
        ("x", SamplingOptions(temperature=float("nan")), "temperature"),
        ("x", SamplingOptions(max_tokens=0), "max_tokens"),
        ("x", SamplingOptions(n=10_000), "n"),
        ("x", SamplingOptions(stop_token_ids=(-1,)), "stop_token_ids"),
    ],
)
def test_invalid_input_is_refused_by_name_and_the_engine_goes_on(
    prompts: object, options: SamplingOptions, field: str
) -> None:
    with Engine(TINY) as engine:
        with pytest.raises(RequestError, match=re.escape(field)):
            engine.generate(prompts, options)  # type: ignore[arg-type]
        assert engine.generate("still here", GREEDY)


@attrs.frozen(eq=False)
class FailsAt:
    """A sampler that raises on its n-th call."""

    slots: int
    vocab_size: int
    calls: list[int] = attrs.field(factory=list)

    def seat(self, seat: Seat) -> None:
        return None

    def release(self, slot: int) -> None:
        return None

    def sample(self, logits: torch.Tensor, *, slots: object, positions: object, masks: object = None) -> SampledTokens:
        self.calls.append(len(logits))
        if len(self.calls) > 4:
            raise ZeroDivisionError("planted")
        return SampledTokens(tokens=logits.argmax(-1), nan=logits.isnan().any(-1))


@pytest.mark.contract("SS-13")
def test_a_failing_device_ends_every_request_with_engine_dead_and_the_engine_still_closes() -> None:
    engine = Engine(TINY, sampler=FailsAt)
    try:
        with pytest.raises(EngineDead):
            engine.generate(["a", "b"], SamplingOptions(max_tokens=50, ignore_eos=True))
        with pytest.raises(EngineDead):
            engine.generate("c")
    finally:
        with pytest.raises(ZeroDivisionError):
            engine.close()
    assert not {"ts-control", "ts-forward", "ts-exec"} & ours()


class FailingMeter(NullMeter):
    def round(self, **record: object) -> None:
        raise ZeroDivisionError("planted in a meter")


def test_what_ended_the_engine_is_the_cause_of_every_engine_dead() -> None:
    async def both(engine: Engine) -> None:
        with pytest.raises(EngineDead) as awaited:
            await engine.generate_async("b")
        with pytest.raises(EngineDead) as streamed:
            _ = [delta async for delta in engine.stream_async("c")]
        assert isinstance(awaited.value.__cause__, ZeroDivisionError)
        assert isinstance(streamed.value.__cause__, ZeroDivisionError)

    with Engine(TINY, meter=FailingMeter()) as engine:
        with pytest.raises(EngineDead) as plain:
            engine.generate("a")
        assert isinstance(plain.value.__cause__, ZeroDivisionError)
        asyncio.run(both(engine))


def test_an_array_of_numpy_integers_is_one_prompt_and_messages_are_objects() -> None:
    with Engine(TINY) as engine:
        (done,) = engine.generate(np.array([5, 6, 7]), GREEDY)  # type: ignore[arg-type]
        assert done.prompt_token_ids == (5, 6, 7)
        with pytest.raises(RequestError, match="messages: a list of objects"):
            engine.chat("hello")  # type: ignore[arg-type]


def test_a_closed_engine_says_so() -> None:
    engine = Engine(TINY)
    engine.close()
    engine.close()
    with pytest.raises(EngineDead):
        engine.generate("x")
    with pytest.raises(EngineDead):
        engine.control("flush_cache")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"polcy": object()}, "did you mean policy"),
        ({"connect": object()}, "no part is called 'connect'"),
        ({"policy": object()}, "part 'policy' does not fit SchedulingPolicy: object has no key"),
        ({"clock": attrs.make_class("Clock", [])()}, "has no now_s"),
    ],
)
def test_a_part_with_a_wrong_name_or_shape_fails_when_the_engine_is_built(parts: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        Engine(TINY, **parts)


def test_a_part_whose_method_takes_other_arguments_is_refused_by_name() -> None:
    class Wrong:
        def key(self, order: int) -> tuple[float, ...]:
            return (order,)

    with pytest.raises(SettingsError, match=r"policy.*key.*cannot be called"):
        check_parts({"policy": Wrong()})


def test_every_listed_part_has_a_purpose_and_a_unique_name() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(part.what for part in PARTS)
