"""Faults planted into the capture contract, one after another: each is found where it happens.

A read of a frozen buffer after its reuse, a late token for a reused slot, an argument that is edited
while it is queued, and a device call from the control thread. The hidden `.item()` is planted in
test_sync_serving.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import pytest
import torch
from device_doubles import CountingWakeup, FakeHandle, background, batch, cpu_backend, granted, plan, seat
from futures_rig import FlowLog
from toy_rig import MAX_LEN, PAGE_TOKENS, PAGES, SLOTS, VOCAB, LoggedBackend, StreamLog, toy_logprobs

from tokenspeed.device.backends.base import DeviceEvent, Job
from tokenspeed.device.backends.cpu import CpuBackend
from tokenspeed.device.capture import Strict, Trusting
from tokenspeed.device.control_guard import control_plane_guard
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.executors.futures.executor import futures_executor
from tokenspeed.device.executors.streams import StreamExecutor, stream_executor
from tokenspeed.device.executors.tables import BlockTable
from tokenspeed.device.launch_check import POISON, CheckedLaunches, LaunchCheck, Unchecked, launch_check
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.step import AllReady, ForwardStep, LayersReady, RaggedRows
from tokenspeed.device.toy import ToyModel, ToySampler, hash_context
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, BlockGrants, Dispatch, ForwardBatch
from tokenspeed.plane.ports import Landing
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array

GROUPS = (CacheGroupSpec(block_tokens=PAGE_TOKENS),)


@attrs.define(eq=False)
class HeldBack:
    """A stream that can keep one batch back and submit it later, behind what came after it."""

    inner: object
    hold_next: bool = False
    kept: list[tuple[Job, str]] = attrs.field(factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    def submit(self, job: Job, label: str) -> DeviceEvent:
        if self.hold_next and label == "batch":
            self.hold_next = False
            self.kept.append((job, label))
            return self.inner.submit(lambda: None, "nothing")
        return self.inner.submit(job, label)

    def wait(self, event: DeviceEvent) -> None:
        self.inner.wait(event)

    def let_go(self) -> DeviceEvent:
        return self.inner.submit(*self.kept.pop())


@attrs.define(eq=False)
class KeepsRows:
    """A step that looks into the inputs of the forward before, too."""

    inner: ForwardStep
    before: RaggedRows | None = None
    seen: list[list[int]] = attrs.field(factory=list)

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.before is not None:
            self.seen.append([*self.before.positions.tolist(), *self.before.block_tables.flatten().tolist()])
        self.before = rows
        return self.inner.run(rows, layers=layers, ready=ready, hidden=hidden)


@attrs.frozen(eq=False)
class LiveTable:
    """A block table that hands out its own memory in place of a copy."""

    inner: BlockTable

    @property
    def entries(self) -> Int32Array:
        return self.inner.entries

    def grant(self, grants: BlockGrants) -> None:
        self.inner.grant(grants)

    def gather(self, slots: Int64Array, starts: Int64Array, contexts: Int64Array) -> Int32Array:
        width = self.inner.gather(slots, starts, contexts).shape[1]
        return self.entries[slots[0] : slots[0] + len(slots), :width]


@attrs.frozen(kw_only=True, eq=False)
class Rig:
    inner: CpuBackend
    stream: HeldBack
    step: KeepsRows
    executor: StreamExecutor

    def forward(self, work: ForwardBatch, *, seats: tuple = (), grants: tuple = ()) -> Landing:
        return self.executor.forward(work, grants, Dispatch(seats=seats), AllReady())


@contextmanager
def rig(check: LaunchCheck) -> Iterator[Rig]:
    with cpu_backend() as inner:
        stream, log = HeldBack(inner.exec_stream), []
        others = {f"{name}_stream": StreamLog(getattr(inner, f"{name}_stream"), log) for name in ("write", "load")}
        backend = LoggedBackend(inner=inner, log=log, exec_stream=stream, **others)
        bound = ToyModel(vocab_size=VOCAB).bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
        step = KeepsRows(bound.step)

        def make() -> StreamExecutor:
            return stream_executor(
                backend=backend,
                step=step,
                pool=bound.pool,
                sampler=ToySampler(),
                logprobs=toy_logprobs,
                request_slots=SLOTS,
                max_model_len=MAX_LEN,
                num_pages=PAGES,
                groups=GROUPS,
            )

        executor = attrs.evolve(on_stream(inner.exec_stream, make, "make"), check=check)
        yield Rig(inner=inner, stream=stream, step=step, executor=executor)


def with_live_tables(made: Rig) -> Rig:
    slots = made.executor.slots
    slots.tables = tuple(LiveTable(table) for table in slots.tables)
    return made


# ---- a read of a frozen buffer after its reuse ----------------------------------------------------


def read_after_reuse(made: Rig) -> Landing:
    """The landing of a forward whose slot gets another owner, and other blocks, before it begins."""
    made.forward(batch((0, 0, [5, 6])), seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))).result()
    made.inner.exec_stream.hold()
    landing = made.forward(batch((0, 2, [FROM_DEVICE])))
    made.executor.release((0,), (0,))
    made.forward(batch((0, 0, [7]), table_rows=[1]), seats=(seat(0, row=1, prompt_len=1),), grants=granted((0, 0, 2)))
    made.inner.exec_stream.release()
    return landing


@pytest.mark.contract("DP-51")
def test_planted_fault_a_block_table_that_is_reused_before_its_forward_read_it_is_found() -> None:
    with rig(CheckedLaunches()) as made:
        landing = read_after_reuse(with_live_tables(made))
        with pytest.raises(
            InvariantBroken, match=r"input of a launched forward was changed.*'tables'.*launch and begin"
        ):
            landing.result()


@pytest.mark.contract("DP-51")
def test_without_the_check_that_fault_gives_a_wrong_token_and_without_the_fault_all_is_well() -> None:
    right = [hash_context([5, 6]) % VOCAB]
    right.append(hash_context([5, 6, right[0]]) % VOCAB)
    for check, plant, well in ((Unchecked(), True, False), (CheckedLaunches(), False, True)):
        with rig(check) as made:
            landing = read_after_reuse(with_live_tables(made) if plant else made)
            assert (landing.result().tokens == right[1:]) is well


@pytest.mark.contract("DP-51")
def test_planted_fault_a_step_that_reads_the_inputs_of_the_forward_before_finds_no_number_it_could_use() -> None:
    with rig(CheckedLaunches()) as made:
        made.forward(batch((0, 0, [5, 6])), seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))).result()
        made.forward(batch((0, 2, [FROM_DEVICE]))).result()
        assert made.step.seen == [[POISON] * 3]


@pytest.mark.contract("DP-51")
def test_inputs_cannot_be_written_from_the_launch_on() -> None:
    check = CheckedLaunches()
    with rig(Unchecked()) as made:
        prepared = made.forward(
            batch((0, 0, [5, 6])), seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))
        ).prepared
        check.forward(batch((0, 0, [5, 6])), prepared, lambda: None)
        for array in (prepared.token_ids, prepared.positions, prepared.tables, prepared.sampled_slots):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


@pytest.mark.contract("DP-51")
def test_an_input_that_changes_while_the_forward_runs_is_found() -> None:
    with rig(Unchecked()) as made:
        work = batch((0, 0, [5, 6]))
        prepared = made.forward(work, seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))).prepared
    check = CheckedLaunches()
    check.seats((seat(0),), lambda: None)()

    def edits() -> None:
        prepared.positions[0] = 7

    with pytest.raises(InvariantBroken, match=r"'positions'.*while the forward ran"):
        check.forward(work, prepared, edits)()


# ---- the same with futures ------------------------------------------------------------------------


@pytest.mark.contract("DP-51")
def test_planted_fault_inputs_and_the_future_that_a_step_has_taken_are_no_tokens_behind_it() -> None:
    """A step over futures that looks into the inputs of the step before finds nothing that it could use."""
    bound = ToyModel(vocab_size=VOCAB).bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
    step, log = KeepsRows(bound.step), FlowLog()
    with cpu_backend() as backend:
        shape = {"request_slots": SLOTS, "max_model_len": MAX_LEN, "num_pages": PAGES, "groups": GROUPS}
        parts = {"step": step, "pool": bound.pool, "sampler": ToySampler(), "logprobs": toy_logprobs, "log": log}
        made = on_stream(backend.exec_stream, lambda: futures_executor(backend=backend, **shape, **parts), "make")
        first = made.forward(
            batch((0, 0, [5, 6])), granted((0, 0, 1)), Dispatch(seats=(seat(0, prompt_len=2),)), AllReady()
        )
        landings = [made.forward(batch((0, at, [FROM_DEVICE])), (), Dispatch(), AllReady()) for at in (2, 3)]
        tokens = [landing.result().tokens[0] for landing in (first, *landings)]
        context = [5, 6]
        for token in tokens:  # what is spoilt is nothing that anybody needs
            assert token == hash_context(context) % VOCAB
            context.append(token)
        assert [set(seen) for seen in step.seen] == [{POISON}, {POISON}]
        taken = [future for launch in log.launches("forward") for future in launch.inputs]
        assert [future.unwrap().tolist() for future in taken] == [[POISON]] * 2
        backend.close()
        made.close()


# ---- a late token for a reused slot ---------------------------------------------------------------


def late_token(made: Rig) -> list[int]:
    """A decode of request 0 runs behind the prompt of request 1, which has its slot; the tokens of request 1."""
    made.forward(batch((0, 0, [5, 6])), seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))).result()
    made.stream.hold_next = True
    made.forward(batch((0, 2, [FROM_DEVICE])))
    made.executor.release((0,), (0,))
    first = made.forward(
        batch((0, 0, [7, 8, 9]), table_rows=[1]), seats=(seat(0, row=1, prompt_len=3),), grants=granted((0, 0, 2))
    )
    made.stream.let_go()
    second = made.forward(batch((0, 3, [FROM_DEVICE]), table_rows=[1]))
    return [*first.result().tokens, *second.result().tokens]


@pytest.mark.contract("DP-51")
def test_planted_fault_a_late_token_for_a_reused_slot_is_found() -> None:
    with (
        rig(CheckedLaunches()) as made,
        pytest.raises(InvariantBroken, match=r"a late forward.*row=0, slot=0, seated=1"),
    ):
        late_token(made)


def test_without_the_check_a_late_token_reaches_the_slots_next_request() -> None:
    first = hash_context([7, 8, 9]) % VOCAB
    with rig(Unchecked()) as made:
        tokens = late_token(made)
    assert tokens[0] == first
    assert tokens[1] != hash_context([7, 8, 9, first]) % VOCAB


@pytest.mark.contract("DP-51")
def test_the_token_of_a_request_that_left_its_slot_is_no_token_any_more() -> None:
    with rig(CheckedLaunches()) as made:
        made.forward(batch((0, 0, [5, 6])), seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))).result()
        made.executor.release((0,), (0,))
        tokens = on_stream(made.inner.exec_stream, made.executor.future_tokens.unwrap, "read")
        assert tokens[0].item() == POISON


# ---- an argument edited while it is queued --------------------------------------------------------


@pytest.mark.contract("DP-50")
@pytest.mark.parametrize("queued", [True, False], ids=["before its launch", "before its landing"])
def test_planted_fault_an_argument_that_is_edited_behind_the_queue_is_found(queued: bool) -> None:
    memory = np.array([5, 6], dtype=np.int32)
    memory.setflags(write=False)
    work = batch((0, 0, [5, 6]))._replace(input_ids=memory)
    handle = FakeHandle(held_landing=True)
    plane = open_data_plane(handle, CountingWakeup(), Strict())
    if not queued:
        handle.gate.set()
    ticket = plane.execute(plan(work=work), Dispatch())
    if not queued:
        plane.idle_forward()
    memory.setflags(write=True)  # what only a fault would do
    memory[0] = 9
    handle.gate.set()
    plane.idle_forward() if not queued else None
    for landing in handle.landings:
        landing.land()
    with pytest.raises(InvariantBroken, match="changed after it was queued"):
        plane.commit(ticket)
    plane.close()


def test_in_production_nothing_is_taken_down() -> None:
    argument = ([1],)
    seal = Trusting().seal("execute", argument)
    argument[0].append(2)
    seal.verify("later")
    assert isinstance(launch_check({}), Unchecked)
    assert isinstance(launch_check({"TOKENSPEED_CAPTURE_CHECK": "1"}), CheckedLaunches)


def job() -> None:
    return None


def test_a_production_launch_is_the_job_itself() -> None:
    check, work = Unchecked(), batch((0, 0, [1]))
    assert check.seats((), job) is job
    with rig(check) as made:
        prepared = made.forward(work, seats=(seat(0),), grants=granted((0, 0, 1))).prepared
        assert check.forward(work, prepared, job) is job
        assert check.release((0,), made.executor.future_tokens, job) is job


# ---- a device call from the control thread --------------------------------------------------------


@pytest.mark.contract("DP-20", "DP-43")
def test_planted_fault_a_device_call_from_the_control_thread_raises() -> None:
    found: list[BaseException] = []
    with rig(Unchecked()) as made:
        made.forward(batch((0, 0, [5, 6])), seats=(seat(0, prompt_len=2),), grants=granted((0, 0, 1))).result()
        tokens = made.step.before.token_ids

        def control() -> None:
            for call in (tokens.clone, made.executor.future_tokens.unwrap, lambda: made.inner.to_device(np.zeros(1))):
                try:
                    with control_plane_guard({}, device_type="cpu"):
                        call()
                except InvariantBroken as error:
                    found.append(error)

        with background(control):
            pass
    assert ["control thread" in str(error) for error in found] == [True, False, False]
    assert ["outside a stream job" in str(error) for error in found] == [False, True, True]
