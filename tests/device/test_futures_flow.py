"""The asynchronous flow, step by step, on a simulated device that resolves nothing until the test says so."""

from __future__ import annotations

import threading

import attrs
import pytest
import torch
from device_doubles import TIMEOUT_S, background, batch, granted, seat
from futures_rig import (
    PROMPTS,
    Driver,
    FuturesRig,
    Moved,
    Stage,
    Touch,
    cpu_futures,
    drive,
    sim_futures,
)
from toy_rig import VOCAB

from tokenspeed.device.executors.futures.batch_state import SchedulerOutput
from tokenspeed.device.executors.futures.buffer import LastStep
from tokenspeed.device.executors.futures.model_input import HostInputs, ModelInput
from tokenspeed.device.executors.futures.output import OUTPUT_THREAD, AsyncModelRunnerOutput
from tokenspeed.device.executors.futures.runner import Fallback
from tokenspeed.device.executors.futures.runtime import DeviceFuture
from tokenspeed.device.step import AllReady
from tokenspeed.plane.plan import Dispatch
from tokenspeed.testing import hash_continuation

POWERS = (1, 2, 4, 8)


def steady(rig: FuturesRig, *slots: int, steps: int = 3) -> Driver:
    """A flow in which `slots` decode and nothing but the last step is unresolved."""
    driver = drive(rig)
    landings = [driver.prefill(*slots)] + [driver.submit(*slots) for _ in range(steps)]
    for landing in landings[:-1]:
        driver.finish(landing)
    driver.finish(landings[-1])
    return driver


# ---- steady state -----------------------------------------------------------------------------


@pytest.mark.contract("AF-5", "AF-30", "AF-33", "AF-19", "AF-10")
def test_with_the_device_held_a_step_returns_and_its_input_is_the_very_future_the_step_before_put_out() -> None:
    with sim_futures() as rig:
        driver = drive(rig)
        driver.finish(driver.prefill(0, 1))
        rig.hold()
        rig.log.clear()
        landings = [driver.submit(0, 1) for _ in range(5)]
        samples = [launch.output for launch in rig.log.launches("sample")]
        forwards = [launch.inputs for launch in rig.log.launches("forward")]
        assert [future.resolved() for future in samples] == [False] * 5
        assert forwards[1:] == [(future,) for future in samples[:-1]]
        assert rig.log.waits_here() == []
        assert [landing.landed() for landing in landings] == [False] * 5
        rig.release()
        tokens = [driver.finish(landing) for landing in landings]
        assert tokens == [list(column) for column in zip(*continuations(0, 1, first=1, count=5), strict=True)]


def continuations(*slots: int, first: int, count: int) -> list[list[int]]:
    return [hash_continuation(PROMPTS[slot], first + count, vocab_size=VOCAB)[first:] for slot in slots]


@pytest.mark.contract("AF-18", "AF-52")
def test_the_first_step_finds_no_future_and_takes_ids_of_the_host() -> None:
    with sim_futures() as rig:
        driver = drive(rig)
        assert rig.buffer.futures_sampled_token_ids is None
        landing = driver.prefill(0)
        assert rig.log.launches("forward")[0].inputs == ()
        assert rig.step.ids == [PROMPTS[0]]
        assert rig.state.fallbacks == {Fallback.FIRST: 1}
        driver.finish(landing)


@pytest.mark.contract("AF-29", "AF-30", "AF-31", "AF-19", "AF-59")
def test_in_a_steady_step_the_hosts_ids_are_stale_and_never_moved_while_the_bookkeeping_goes_on() -> None:
    built: list[ModelInput] = []

    @attrs.frozen(eq=False)
    class Watching:
        inner: HostInputs

        def prepare_model_input(self, output: SchedulerOutput) -> ModelInput:
            built.append(self.inner.prepare_model_input(output))
            return built[-1]

    with sim_futures() as rig:
        runner = attrs.evolve(rig.executor.runner, builder=Watching(rig.executor.runner.builder))
        handle = attrs.evolve(rig.handle, executor=attrs.evolve(rig.executor, runner=runner))
        driver = drive(attrs.evolve(rig, handle=handle))
        first = driver.prefill(0, 1)
        rig.log.clear()
        second = driver.submit(0, 1)
        assert built[-1].stale
        assert built[-1].input_ids.tolist() != driver.truth(0, 1)
        assert [moved.what for moved in rig.log.of(Moved)] == ["metadata"]
        assert not any(moved.blocking for moved in rig.log.of(Moved))
        assert rig.step.ids[-1] == driver.truth(0, 1)
        assert runner.batch.state.computed[:2].tolist() == [4, 5]
        assert not first.landed()  # all this was done beside the forward of the step before
        assert [driver.finish(landing) for landing in (first, second)]


@pytest.mark.contract("AF-20", "AF-21", "AF-35")
def test_a_step_keeps_its_mapping_when_the_batch_is_reordered_right_after() -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1, 2)
        rig.hold()
        one = driver.submit(0, 1, 2)
        expected = driver.sequence(0, 99), driver.sequence(1, 99), driver.sequence(2, 99)
        kept = rig.buffer.prev_req_ids_ordered
        assert kept == ("r0", "r1", "r2")
        rig.release()
        at = dict(driver.at)
        two = driver.submit(2, 0, 1)
        assert kept == ("r0", "r1", "r2")
        assert rig.buffer.prev_req_ids_ordered == ("r2", "r0", "r1")
        assert driver.finish(one) == [expected[slot][at[slot]] for slot in (0, 1, 2)]
        assert driver.finish(two) == [expected[slot][at[slot] + 1] for slot in (2, 0, 1)]


@pytest.mark.contract("AF-20", "AF-21", "AF-14", "AF-15", "AF-45")
def test_the_stages_of_a_step_follow_each_other_and_never_interleave_with_the_next_steps() -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        rig.log.clear()
        for _ in range(20):
            driver.submit(0, 1)
        mine = [stage.name for stage in rig.log.of(Stage) if stage.thread != OUTPUT_THREAD]
        assert (
            mine
            == [
                "update_states",
                "prepare_model_input",
                "forward",
                "bookkeeping_sync",
                "sample",
                "generate_model_runner_output",
            ]
            * 20
        )


@pytest.mark.contract("AF-14", "AF-15")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_two_halves_of_a_step_hand_over_through_the_runners_state(asynchronous: bool) -> None:
    with sim_futures(asynchronous=asynchronous) as rig:
        runner = rig.executor.runner
        work = batch(*((slot, 0, PROMPTS[slot]) for slot in range(3)))
        seats = tuple(seat(slot, prompt_len=len(PROMPTS[slot])) for slot in range(3))
        output = runner.batch.view(work, granted((0, 0, 1), (1, 0, 2), (2, 0, 3)), Dispatch(seats=seats), ())
        assert runner.execute_model(output, AllReady()) is None
        assert runner.state.execute_model_state is not None
        assert rig.log.launches("sample") == []
        wrapped = runner.sample_tokens()
        assert runner.state.execute_model_state is None
        assert len(rig.log.launches("sample")) == 1
        rig.device.advance_to_end()
        wrapped.get_output()
        assert [rig.output_ids(slot) for slot in range(3)] == continuations(0, 1, 2, first=0, count=1)


@pytest.mark.contract("AF-22", "AF-34", "AF-60", "AF-61")
def test_every_step_leaves_its_own_unresolved_future_and_its_wrapper_behind() -> None:
    with sim_futures(buckets=POWERS) as rig:
        driver = drive(rig)
        seen = []
        landing = driver.prefill(0, 1, 2)
        seen.append((landing, rig.buffer.futures_sampled_token_ids, rig.buffer.async_output))
        assert seen[-1][1].shape == (3,)
        for slots, joining in (((0, 1, 2), ()), ((0, 1, 2), ()), ((0, 1, 2, 3), (3,)), ((0, 1, 2, 3), ())):
            landing = driver.submit(*slots, joining=joining)
            seen.append((landing, rig.buffer.futures_sampled_token_ids, rig.buffer.async_output))
            assert seen[-1][1].shape == (4,)
            assert not seen[-1][1].resolved()
        assert [launch.output for launch in rig.log.launches("sample")] == [future for _, future, _ in seen]
        assert all(landing is output for landing, _, output in seen)
        assert all(isinstance(output, AsyncModelRunnerOutput) for _, _, output in seen)


@pytest.mark.contract("AF-36")
def test_a_steady_step_does_not_read_the_pending_output_and_a_break_reads_it_once() -> None:
    reads: list[str] = []

    class Watched(LastStep):
        def __getattribute__(self, name: str) -> object:
            if name in ("futures_sampled_token_ids", "async_output"):
                reads.append(name)
            return super().__getattribute__(name)

    with sim_futures(buffer=Watched()) as rig:
        driver = steady(rig, 0, 1)
        reads.clear()
        driver.submit(0, 1)
        assert "futures_sampled_token_ids" in reads
        assert "async_output" not in reads
        reads.clear()
        driver.submit(0)
        assert reads.count("async_output") == 1


@pytest.mark.contract("AF-32", "AF-23")
def test_device_and_output_thread_and_nobody_else_wait_for_the_steps_future() -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        rig.log.clear()
        reached = threading.Event()
        rig.log.at_touch = lambda future: reached.set() if future is rig.log.launches("sample")[0].output else None
        landing = driver.submit(0, 1)
        pending = rig.buffer.futures_sampled_token_ids
        driver.submit(0, 1)
        assert reached.wait(TIMEOUT_S)
        jobs = [launch.label for launch in rig.log.launches("forward") if pending in launch.inputs]
        threads = [touch.thread for touch in rig.log.of(Touch) if touch.future is pending]
        assert (jobs, threads) == (["forward"], [OUTPUT_THREAD])
        driver.finish(landing)


@pytest.mark.contract("AF-33")
def test_a_long_run_of_one_batch_is_asynchronous_but_for_its_first_steps() -> None:
    with sim_futures(buckets=POWERS) as rig:
        driver = drive(rig)
        landings = [driver.prefill(0, 1, 2)] + [driver.submit(0, 1, 2) for _ in range(50)]
        for landing in landings:
            driver.finish(landing)
        assert rig.counters == (49, 2)  # the prompt, and the first padded step
        forwards, samples = rig.log.launches("forward"), rig.log.launches("sample")
        assert [f.inputs for f in forwards[2:]] == [(s.output,) for s in samples[1:-1]]


@pytest.mark.contract("AF-24")
def test_materialised_tokens_reach_both_copies_of_the_worker() -> None:
    with sim_futures() as rig:
        driver = drive(rig)
        landing = driver.prefill(0, 1, 2)
        for slot in range(3):
            length = len(PROMPTS[slot])
            assert rig.tokens_of(slot, length + 1) == [*PROMPTS[slot], -1]
            assert rig.output_ids(slot) == []
        driver.finish(landing)
        for slot in range(3):
            length = len(PROMPTS[slot])
            assert rig.tokens_of(slot, length + 1) == driver.sequence(slot, length + 1)
            assert rig.output_ids(slot) == driver.sequence(slot, length + 1)[length:]


@pytest.mark.contract("AF-16", "AF-19", "AF-42", "AF-3")
def test_in_the_synchronous_flow_every_transfer_blocks_and_no_future_is_kept() -> None:
    with sim_futures(asynchronous=False) as rig:
        driver = drive(rig)
        tokens = [driver.prefill(0)] + [driver.submit(0) for _ in range(9)]
        assert all(landing.landed() for landing in tokens)
        assert [landing.result().tokens[0] for landing in tokens] == continuations(0, first=0, count=10)[0]
        assert len(rig.log.of(Moved)) == 20
        assert all(moved.blocking for moved in rig.log.of(Moved))
        assert {touch.why for touch in rig.log.waits_here()} == {"model output", "get_output"}
        assert rig.buffer.futures_sampled_token_ids is None
        assert rig.counters == (0, 0)
        assert rig.state.batch_composition_changed is None


# ---- what breaks it ---------------------------------------------------------------------------


@pytest.mark.contract("AF-17", "AF-43", "AF-62")
@pytest.mark.parametrize(
    ("then", "asynchronous"),
    [
        (lambda d: d.submit(0, 1), True),
        (lambda d: d.submit(0), False),
        (lambda d: d.submit(0, 1, 2, joining=(2,)), False),
        (lambda d: d.submit(1, 0), False),
    ],
    ids=["the same", "one leaves", "one joins", "another order"],
)
def test_only_decodes_of_one_unchanged_batch_are_steady(then: object, asynchronous: bool) -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        before = rig.counters
        driver.finish(then(driver))
        assert rig.counters == (before[0] + asynchronous, before[1] + (not asynchronous))


@pytest.mark.contract("AF-39", "AF-37", "AF-45", "AF-48", "AF-53", "AF-69")
def test_a_joining_request_makes_the_main_thread_materialise_and_the_ids_are_the_true_ones() -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        driver.submit(0, 1)
        rig.log.clear()
        driver.submit(0, 1, 2, joining=(2,))
        assert rig.step.ids[-1] == [*driver.truth(0, 1), *PROMPTS[2]]
        assert rig.log.launches("forward")[-1].inputs == ()
        assert rig.state.batch_composition_changed is True
        assert rig.syncs == ["batch composition changed"]
        mine = [name for name in rig.log.stages() if name != "output"]
        assert mine[:3] == ["materialize", "update_states", "prepare_model_input"]
        assert mine.count("prepare_model_input") == 1
        driver.submit(0, 1, 2)
        assert rig.state.batch_composition_changed is False
        assert rig.state.fallbacks == {Fallback.FIRST: 1, Fallback.COMPOSITION: 1}


@pytest.mark.contract("AF-42")
def test_the_guard_does_nothing_with_an_empty_buffer() -> None:
    with sim_futures() as rig:
        driver = drive(rig)
        assert rig.state.batch_composition_changed is None
        driver.prefill(0)
        assert rig.state.batch_composition_changed is False
        assert rig.syncs == []


@pytest.mark.contract("AF-43", "AF-44")
@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        (("r0", "r1"), (0, 1), False),
        (("r0", "r1", "r2"), (0, 1), True),
        (("r0",), (0, 1), True),
        (("r0", "r3"), (0, 1), True),
        (None, (0, 1), True),
    ],
    ids=["equal", "finished or unscheduled", "joined", "exchanged", "no list"],
)
def test_one_comparison_of_sets_finds_every_change(
    before: tuple[str, ...] | None, now: tuple[int, ...], changed: bool
) -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        rig.buffer.prev_req_ids_ordered = before
        runner = rig.executor.runner
        work = batch(*((slot, driver.at[slot], [0]) for slot in now))
        output = runner.batch.view(work, (), Dispatch(), finished=())  # nobody has been told of an end
        runner._break_on_composition_change(output)
        assert rig.state.batch_composition_changed is changed


@pytest.mark.contract("AF-40", "AF-51", "AF-54", "AF-55", "AF-62")
def test_the_first_decode_behind_a_prompt_has_another_shape_and_is_rebuilt_once() -> None:
    with sim_futures(buckets=(4, 8)) as rig:
        driver = drive(rig)
        driver.prefill(0)
        rig.log.clear()
        outcomes = []
        for _ in range(3):
            before = rig.counters
            driver.submit(0)
            outcomes.append("async" if rig.counters[0] > before[0] else "fallback")
            assert rig.step.ids[-1] == [*driver.truth(0), 0, 0, 0]
        assert outcomes == ["fallback", "async", "async"]
        assert rig.syncs == ["async future shape/dtype mismatch"]
        assert rig.log.stages("prepare_model_input").count("prepare_model_input") == 4


@attrs.define(eq=False)
class OnlyOnce:
    """An `InputBuilder` that answers a second question about one step with its first answer."""

    inner: HostInputs
    answers: dict[int, ModelInput] = attrs.field(factory=dict)

    def prepare_model_input(self, output: SchedulerOutput) -> ModelInput:
        if id(output) not in self.answers:
            self.answers[id(output)] = attrs.evolve(self.inner.prepare_model_input(output), stale=False)
        return self.answers[id(output)]


@pytest.mark.contract("AF-55")
def test_without_the_rebuild_the_model_would_be_given_stale_ids() -> None:
    with sim_futures(buckets=(4, 8)) as rig:
        runner = attrs.evolve(rig.executor.runner, builder=OnlyOnce(rig.executor.runner.builder))
        handle = attrs.evolve(rig.handle, executor=attrs.evolve(rig.executor, runner=runner))
        driver = drive(attrs.evolve(rig, handle=handle))
        landings = [driver.prefill(0), driver.submit(0)]
        assert rig.step.ids[-1][0] != driver.truth(0)[0]
        assert [driver.finish(landing)[0] for landing in landings] != continuations(0, first=0, count=2)[0]


@pytest.mark.contract("AF-51")
@pytest.mark.parametrize("pending", [True, False])
def test_a_mismatch_rebuilds_only_if_there_was_something_to_materialise(pending: bool) -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        buffer = rig.buffer
        buffer.futures_sampled_token_ids = attrs.evolve(buffer.futures_sampled_token_ids, dtype=torch.int32)
        buffer.async_output = buffer.async_output if pending else None
        rig.log.clear()
        before = rig.state.fallbacks[Fallback.SHAPE]
        # The control plane names the tokens here, so that the host's ids are true either way.
        rig.submit(batch(*((slot, driver.at[slot], [driver.sequence(slot, 99)[driver.at[slot]]]) for slot in (0, 1))))
        assert rig.log.stages().count("prepare_model_input") == 1 + pending
        assert rig.state.fallbacks[Fallback.SHAPE] == before + 1


@pytest.mark.contract("AF-49")
@pytest.mark.parametrize("number", range(16))
def test_the_future_is_used_only_if_all_four_conditions_hold(number: int) -> None:
    there, decode, same, fits = (bool(number & bit) for bit in (1, 2, 4, 8))
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        runner = rig.executor.runner
        output = runner.batch.view(batch((0, driver.at[0], [1]), (1, driver.at[1], [1])), (), Dispatch(), ())
        inputs = attrs.evolve(runner.builder.prepare_model_input(output), is_decode=decode)
        runner.state.batch_composition_changed = not same
        future = attrs.evolve(rig.buffer.futures_sampled_token_ids, shape=(2,) if fits else (3,))
        fallback = runner._why_not(future if there else None, inputs)
        assert (fallback is None) == (number == 15)


@pytest.mark.contract("AF-41", "AF-50", "AF-56", "AF-58")
def test_another_order_is_remapped_on_the_main_thread_and_padding_stays() -> None:
    with sim_futures(buckets=POWERS) as rig:
        driver = steady(rig, 0, 1, 2)
        driver.submit(0, 1, 2)
        before = rig.counters
        rig.log.clear()
        driver.submit(2, 0, 1)
        assert rig.step.ids[-1] == [*driver.truth(2, 0, 1), 0]
        assert rig.counters == (before[0], before[1] + 1)
        assert rig.syncs == ["async future shape/dtype mismatch", "order of the batch changed"]
        assert [touch.why for touch in rig.log.waits_here()] == ["order of the batch changed"]
        assert rig.log.stages().count("prepare_model_input") == 1
        driver.submit(2, 0, 1)
        assert rig.counters == (before[0] + 1, before[1] + 1)


@pytest.mark.contract("AF-52", "AF-53")
def test_a_decode_beside_a_prompts_chunk_gets_its_token_although_the_company_is_the_same() -> None:
    """Both steps have the same two requests; the second is no decode, and one of its ids is on the device."""
    with sim_futures() as rig:
        driver = drive(rig)
        driver.finish(driver.prefill(0))
        blocks = granted((3, 0, 20))
        chunks = PROMPTS[3]
        rig.submit(
            batch((0, driver.at[0], [-1]), (3, 0, chunks[:2]), samples=[True, False]),
            seats=(seat(3, prompt_len=len(chunks)),),
            grants=blocks,
        )
        driver.at[0] += 1
        before = rig.state.fallbacks[Fallback.NOT_DECODE]
        rig.submit(batch((0, driver.at[0], [-1]), (3, 2, chunks[2:])))
        driver.at[0] += 1
        assert rig.step.ids[-1] == [*driver.truth(0), *chunks[2:]]
        assert rig.state.fallbacks[Fallback.NOT_DECODE] == before + 1


@pytest.mark.contract("AF-59", "AF-62")
def test_a_broken_step_skips_the_transfer_of_its_own_output_and_the_next_is_asynchronous_again() -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1)
        outcomes = []
        for slots, joining in (((0, 1), ()), ((0, 1, 2), (2,)), ((0, 1, 2), ()), ((0, 1, 2), ())):
            before, since = rig.counters, len(rig.log.events)
            driver.submit(*slots, joining=joining)
            own = rig.buffer.futures_sampled_token_ids
            touched = [event for event in rig.log.events[since:] if isinstance(event, Touch) and event.future is own]
            assert [touch for touch in touched if touch.thread != OUTPUT_THREAD] == []
            outcomes.append("async" if rig.counters[0] > before[0] else "fallback")
        assert outcomes == ["async", "fallback", "async", "async"]


# ---- held for real, on the CPU's device thread ------------------------------------------------


@pytest.mark.contract("AF-46", "AF-37", "AF-47")
def test_a_break_blocks_until_the_device_is_there_and_both_copies_are_filled_before_the_state_moves() -> None:
    seen: list[tuple[list[int], list[int]]] = []
    with cpu_futures() as rig:
        driver = drive(rig)
        driver.finish(driver.prefill(0, 1))
        rig.hold()
        driver.submit(0, 1)
        entered = threading.Event()

        def at_stage(name: str) -> None:
            if name == "materialize":
                entered.set()
            if name == "update_states":
                seen.append((rig.tokens_of(0, 5), rig.output_ids(0)))

        rig.log.at_stage = at_stage
        with background(lambda: driver.submit(0, 1, 2, joining=(2,))):
            assert entered.wait(TIMEOUT_S)
            assert seen == []
            assert rig.output_ids(0) == driver.sequence(0, 4)[3:]
            rig.release()
        assert seen == [(driver.sequence(0, 5), driver.sequence(0, 5)[3:])]


@pytest.mark.contract("AF-47", "AF-70")
def test_a_resumed_request_finds_its_newest_token_in_its_row() -> None:
    with sim_futures() as rig:
        driver = steady(rig, 0, 1, steps=2)
        newest = driver.sequence(0, len(PROMPTS[0]) + 3)
        driver.submit(1)  # request 0 was taken off
        rig.submit(
            batch((3, 0, newest[:-1]), (1, driver.at[1], [-1]), samples=[False, True], table_rows=[0, 1]),
            seats=(attrs.evolve(seat(3, row=0, prompt_len=len(PROMPTS[0])), rid="r0"),),
            grants=granted((3, 0, 20)),
        )
        assert rig.tokens_of(3, len(newest)) == newest
        assert rig.buffer.prev_req_ids_ordered == ("r0~2", "r1")


@pytest.mark.contract("AF-70")
def test_a_plan_that_names_another_token_than_the_worker_knows_is_a_broken_invariant() -> None:
    from tokenspeed.errors import InvariantBroken

    with sim_futures() as rig:
        driver = steady(rig, 0)
        at = driver.at[0]
        wrong = (driver.sequence(0, at + 1)[-1] + 1) % VOCAB
        with pytest.raises(InvariantBroken, match="contradicts the tokens of the worker"):
            rig.submit(batch((0, at, [wrong])))


@pytest.mark.contract("AF-12")
def test_a_buffer_that_lets_futures_go_stops_the_run() -> None:
    from tokenspeed.errors import InvariantBroken

    class Leaking(LastStep):
        def store(self, future: DeviceFuture, req_ids: tuple[str, ...], output: AsyncModelRunnerOutput) -> None:
            return None

    with sim_futures(buffer=Leaking()) as rig:
        driver = drive(rig)
        driver.prefill(0)
        with pytest.raises(InvariantBroken, match="neither host nor device has"):
            driver.submit(0)
