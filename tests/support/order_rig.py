"""The order of jobs on the exec stream, taken away in one place: each way is a fence left out.

Every scenario holds the exec stream while it submits, so that a job that goes around it runs for
certain before what it should have been behind. With a fence in place nothing goes around.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch
from device_doubles import TIMEOUT_S, batch, cpu_backend, granted, seat
from toy_rig import EXECUTORS, MAX_LEN, PAGE_TOKENS, PAGES, SLOTS, VOCAB, LoggedBackend, StreamLog, toy_logprobs

from tokenspeed.device.backends.base import DeviceEvent, DeviceStream, Job
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import Executor, StreamDeviceHandle
from tokenspeed.device.handle import cache_ops_from_plan as adapt
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.sampling.base import SampledTokens
from tokenspeed.device.toy import NEVER_WRITTEN, ToyBound, ToyModel, hash_context
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import FROM_DEVICE, BlockCopy, Dispatch, ExecutionPlan, ForwardBatch, GroupBlocks, Seat
from tokenspeed.plane.ports import Landing, Wakeup
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array

FORWARDED = "batch", "sample"
"""The last job of a forward, by executor."""


class Order(enum.Enum):
    """What holds between jobs, or between a job and the host. `host_fences.Fence` has the waits between streams.

    ZERO_BEHIND_FORWARDS: a block is cleared behind the forwards that still write it (RA-25).
    ZERO_BEFORE_BATCH: … and before the forward that begins it.
    COPY_BEHIND_FORWARDS: a block is copied behind the forwards that write its source (RA-31).
    COPY_BEFORE_ZERO: … before its source is cleared.
    COPY_BEFORE_BATCH: … and before a forward reads its destination.
    SEAT_BEHIND_FORWARDS: a slot's next owner is seated behind the forwards of the one before.
    SEAT_BEFORE_BATCH: … and before its own.
    RELEASE_BEHIND_FORWARDS: what is kept for a request goes behind the forwards that read it (OL-14).
    RELEASE_BEFORE_SEAT: … and before the slot's next owner comes.
    FORWARD_BEHIND_SAMPLE: a forward takes the tokens that the one before sampled.
    LANDING_BEHIND_PLAN: a plan without a batch lands when its cache work is done.
    FUTURE_BEFORE_FORWARD: a device with several queues begins a forward when the future that it takes is
        resolved (AF-5).
    RESULT_BEHIND_COPY: the result is read when the copy to the host has ended (OL-1).
    """

    ZERO_BEHIND_FORWARDS = "zero behind forwards"
    ZERO_BEFORE_BATCH = "zero before batch"
    COPY_BEHIND_FORWARDS = "copy behind forwards"
    COPY_BEFORE_ZERO = "copy before zero"
    COPY_BEFORE_BATCH = "copy before batch"
    SEAT_BEHIND_FORWARDS = "seat behind forwards"
    SEAT_BEFORE_BATCH = "seat before batch"
    RELEASE_BEHIND_FORWARDS = "release behind forwards"
    RELEASE_BEFORE_SEAT = "release before seat"
    FORWARD_BEHIND_SAMPLE = "forward behind sample"
    LANDING_BEHIND_PLAN = "landing behind plan"
    FUTURE_BEFORE_FORWARD = "future before forward"
    RESULT_BEHIND_COPY = "result behind copy"


@attrs.frozen(kw_only=True)
class Removal:
    """How a fence is left out.

    Attributes:
        labels: of the job that leaves its place: the next with such a label that is submitted once the stream is armed.
        behind: labels; it runs behind the next such job. (): at once, around all that is queued.
        apart: labels of jobs that have a queue of their own, with the fence or without.
        deaf: no queue waits for another.
        blind: the host does not wait for a result.
    """

    labels: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    deaf: bool = False
    blind: bool = False

    def undone(self) -> Removal:
        """The same device with the fence in place."""
        return Removal(apart=self.apart)


@attrs.define(eq=False)
class HostWaits:
    """`came`: somebody has come to wait for the result. `blind`: and goes on without it."""

    blind: bool = False
    came: threading.Event = attrs.field(factory=threading.Event)


@attrs.frozen(eq=False)
class ResultEvent:
    inner: DeviceEvent
    waits: HostWaits

    def query(self) -> bool:
        return self.inner.query()

    def wait(self) -> None:
        self.waits.came.set()
        if not self.waits.blind:
            self.inner.wait()

    def notify(self, wakeup: Wakeup) -> None:
        self.inner.notify(wakeup)

    @property
    def busy_s(self) -> float:
        return self.inner.busy_s


@attrs.define(eq=False)
class LooseStream:
    """The exec stream in front of the real one, where one fence may be missing.

    Attributes:
        side: another stream, which runs at once what goes around, and what is kept apart.
        results: labels of the jobs whose ends the host waits for.
        armed: the next job that can leave its place does.
    """

    inner: DeviceStream
    side: DeviceStream
    removal: Removal
    results: tuple[str, ...]
    waits: HostWaits
    armed: bool = False
    kept: tuple[Job, str] | None = None
    after: list[DeviceEvent] = attrs.field(factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    def submit(self, job: Job, label: str) -> DeviceEvent:
        removal = self.removal
        stream = self.side if label in removal.apart else self.inner
        after, self.after = self.after, []
        for event in after:
            stream.wait(event)
        if self.armed and label in removal.labels:
            self.armed = False
            if not removal.behind:
                return self.side.submit(job, label)
            self.kept = job, label
            return self.inner.submit(lambda: None, "its place")
        event = stream.submit(job, label)
        if self.kept is not None and label in removal.behind:
            kept, self.kept = self.kept, None
            self.inner.submit(*kept)
        return ResultEvent(event, self.waits) if label in self.results else event

    def wait(self, event: DeviceEvent) -> None:
        if not self.removal.deaf:
            self.after.append(event.inner if isinstance(event, ResultEvent) else event)

    def hold(self) -> None:
        self.inner.hold()

    def release(self) -> None:
        """The side stream has run what it was given."""
        self.side.submit(lambda: None, "its end").wait()
        self.inner.release()


@attrs.define(eq=False)
class SeatedSampler:
    """The token is the likeliest one plus the row that sits in the slot: a stranger's seat gives another."""

    rows: dict[int, int] = attrs.field(factory=dict)

    def seat(self, seat: Seat) -> None:
        self.rows[seat.slot] = seat.row

    def release(self, slot: int) -> None:
        self.rows.pop(slot, None)

    def sample(self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array) -> SampledTokens:
        rows = torch.tensor([self.rows.get(slot, VOCAB // 2) for slot in slots.tolist()])
        return SampledTokens(tokens=(logits.argmax(1) + rows) % VOCAB, nan=torch.zeros(len(logits), dtype=torch.bool))


def said(context: list[int], row: int) -> int:
    """The token after `context` of the request in row `row`."""
    return (hash_context(context) % VOCAB + row) % VOCAB


@attrs.frozen(eq=False)
class OrderRig:
    stream: LooseStream
    bound: ToyBound
    handle: StreamDeviceHandle

    def submit(
        self, work: ForwardBatch | None = None, *, seats: tuple[Seat, ...] = (), blocks: tuple = (), **streams: object
    ) -> Landing:
        grants = granted(*blocks) if blocks else ()
        plan = ExecutionPlan(round_id=1, batch=work, grants=grants, **streams)
        return self.handle.execute(plan, Dispatch(seats=seats), adapt(plan).device)

    def page(self, page: int) -> list[int]:
        return on_stream(self.stream.inner, self.bound.pool.pages[page].tolist, "read")


@contextmanager
def order_rig(executor: str, removal: Removal) -> Iterator[OrderRig]:
    with cpu_backend() as inner:
        waits = HostWaits(blind=removal.blind)
        stream = LooseStream(inner.exec_stream, inner.write_stream, removal, FORWARDED, waits)
        others = {f"{name}_stream": StreamLog(getattr(inner, f"{name}_stream"), []) for name in ("write", "load")}
        backend = LoggedBackend(inner=inner, log=[], exec_stream=stream, **others)

        def make() -> tuple[ToyBound, Executor]:
            bound = ToyModel(vocab_size=VOCAB).bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
            shape = {"request_slots": SLOTS, "max_model_len": MAX_LEN, "num_pages": PAGES}
            parts = {"step": bound.step, "pool": bound.pool, "sampler": SeatedSampler(), "logprobs": toy_logprobs}
            groups = (CacheGroupSpec(block_tokens=PAGE_TOKENS),)
            return bound, EXECUTORS[executor](backend=backend, groups=groups, **shape, **parts)

        bound, made = on_stream(inner.exec_stream, make, "make")
        handle = StreamDeviceHandle(
            backend=backend,
            executor=made,
            profiler=TraceProfiler(stream=stream),
            rounds=AutomaticCollection(),
        )
        try:
            yield OrderRig(stream, bound, handle)
        finally:
            inner.close()  # the device first: it resolves what an executor's thread waits for
            made.close()


# ---- what goes wrong without each of them ---------------------------------------------------------

OLD, NEW = [3, 1, 4], [2, 7]


def first(rig: OrderRig, *, row: int = 0, slot: int = 0, prompt: list[int] = OLD, block: int = 1) -> Landing:
    owner = seat(slot, row=row, prompt_len=len(prompt))
    work = batch((slot, 0, prompt), table_rows=[row])
    return rig.submit(work, seats=(owner,), blocks=((slot, 0, block),))


def a_freed_block_is_clean_although_its_last_forward_ran_late(rig: OrderRig) -> None:
    first(rig).result()
    rig.stream.hold()
    late = rig.submit(batch((0, 3, [FROM_DEVICE])))
    rig.handle.release((0,), (0,))
    rig.stream.armed = True
    rig.submit(pages_to_zero=(GroupBlocks(blocks=(1,)),))
    rig.stream.release()
    late.result()
    assert rig.page(1) == [NEVER_WRITTEN] * PAGE_TOKENS


def a_block_that_is_cleared_for_a_request_keeps_what_it_writes(rig: OrderRig) -> None:
    rig.stream.armed = True
    owner = seat(0, prompt_len=3)
    clear = (GroupBlocks(blocks=(1,)),)
    landing = rig.submit(batch((0, 0, OLD)), seats=(owner,), blocks=((0, 0, 1),), pages_to_zero=clear)
    tokens = landing.result().tokens
    again = rig.submit(batch((0, 3, tokens))).result().tokens
    assert again == [said([*OLD, *tokens], 0)]


def a_copy_has_what_the_forward_before_it_wrote(rig: OrderRig) -> None:
    rig.stream.hold()
    landing = first(rig)
    rig.stream.armed = True
    rig.submit(pages_to_copy=(BlockCopy(source=1, destination=2),))
    rig.stream.release()
    landing.result()
    assert rig.page(2)[: len(OLD)] == OLD


def a_copy_has_what_its_plan_clears(rig: OrderRig) -> None:
    first(rig).result()
    rig.stream.armed = True
    rig.submit(pages_to_copy=(BlockCopy(source=1, destination=2),), pages_to_zero=(GroupBlocks(blocks=(1,)),)).result()
    assert rig.page(2)[: len(OLD)] == OLD


def a_forward_reads_what_its_plan_copies(rig: OrderRig) -> None:
    first(rig).result()
    rig.stream.armed = True
    landing = rig.submit(
        batch((1, 3, NEW), table_rows=[1]),
        seats=(seat(1, prompt_len=5),),
        blocks=((1, 0, 2),),
        pages_to_copy=(BlockCopy(source=1, destination=2),),
    )
    assert landing.result().tokens == [said(OLD + NEW, 1)]


def a_late_forward_samples_for_the_request_that_it_was_launched_for(rig: OrderRig) -> None:
    token = first(rig).result().tokens
    rig.stream.hold()
    late = rig.submit(batch((0, 3, token)))
    rig.handle.release((0,), (0,))
    rig.stream.armed = True
    first(rig, row=5, prompt=NEW, block=2)
    rig.stream.release()
    assert late.result().tokens == [said(OLD + token, 0)]


def a_forward_samples_for_the_request_that_was_seated_with_it(rig: OrderRig) -> None:
    rig.stream.armed = True
    assert first(rig, row=5).result().tokens == [said(OLD, 5)]


def what_is_kept_for_a_request_outlives_its_last_forward(rig: OrderRig) -> None:
    token = first(rig, row=1).result().tokens
    rig.stream.hold()
    late = rig.submit(batch((0, 3, token), table_rows=[1]))
    rig.stream.armed = True
    rig.handle.release((1,), (0,))
    rig.stream.release()
    assert late.result().tokens == [said(OLD + token, 1)]


def what_is_kept_for_a_request_is_not_taken_from_the_next(rig: OrderRig) -> None:
    first(rig, row=1).result()
    rig.stream.armed = True
    rig.handle.release((1,), (0,))
    assert first(rig, row=2, prompt=NEW, block=2).result().tokens == [said(NEW, 2)]


def a_forward_takes_the_token_of_the_one_before(rig: OrderRig) -> None:
    rig.stream.hold()
    landing = first(rig)
    rig.stream.armed = True
    following = rig.submit(batch((0, 3, [FROM_DEVICE])))
    rig.stream.release()
    token = landing.result().tokens
    assert following.result().tokens == [said(OLD + token, 0)]


def a_plan_without_a_batch_lands_with_its_cache_work(rig: OrderRig) -> None:
    first(rig).result()
    rig.stream.hold()
    rig.stream.armed = True
    landing = rig.submit(pages_to_zero=(GroupBlocks(blocks=(1,)),))
    rig.stream.side.submit(lambda: None, "its end").wait()
    at_landing = rig.bound.pool.pages[1].tolist() if landing.landed() else [NEVER_WRITTEN] * PAGE_TOKENS
    rig.stream.release()
    landing.result()
    assert at_landing == [NEVER_WRITTEN] * PAGE_TOKENS


def a_result_is_read_when_it_has_been_copied(rig: OrderRig) -> None:
    found: list[list[int]] = []
    rig.stream.hold()
    landing = first(rig)

    def read() -> None:
        try:
            found.append(landing.result().tokens)
        except ValueError:
            found.append([])  # fewer tokens than requests

    reader = threading.Thread(target=read, name="reader")
    reader.start()
    assert rig.stream.waits.came.wait(TIMEOUT_S)
    if rig.stream.waits.blind:
        reader.join(TIMEOUT_S)
    rig.stream.release()
    reader.join(TIMEOUT_S)
    assert found == [[said(OLD, 0)]]


def a_forward_waits_for_the_future_that_it_takes(rig: OrderRig) -> None:
    rig.stream.side.hold()
    landing = first(rig)
    following = rig.submit(batch((0, 3, [FROM_DEVICE])))
    if rig.stream.removal.deaf:
        rig.stream.inner.submit(lambda: None, "its end").wait()
    rig.stream.side.release()
    assert following.result().tokens == [said(OLD + landing.result().tokens, 0)]


@attrs.frozen
class Scenario:
    run: Callable[[OrderRig], None]
    removal: Removal
    executors: tuple[str, ...] = ("streams", "futures")


def around(*labels: str) -> Removal:
    return Removal(labels=labels)


def behind(label: str, *others: str) -> Removal:
    return Removal(labels=(label,), behind=others)


SCENARIOS = {
    Order.ZERO_BEHIND_FORWARDS: Scenario(a_freed_block_is_clean_although_its_last_forward_ran_late, around("zero")),
    Order.ZERO_BEFORE_BATCH: Scenario(
        a_block_that_is_cleared_for_a_request_keeps_what_it_writes, behind("zero", *FORWARDED)
    ),
    Order.COPY_BEHIND_FORWARDS: Scenario(a_copy_has_what_the_forward_before_it_wrote, around("copy")),
    Order.COPY_BEFORE_ZERO: Scenario(a_copy_has_what_its_plan_clears, behind("copy", "zero")),
    Order.COPY_BEFORE_BATCH: Scenario(a_forward_reads_what_its_plan_copies, behind("copy", *FORWARDED)),
    Order.SEAT_BEHIND_FORWARDS: Scenario(
        a_late_forward_samples_for_the_request_that_it_was_launched_for, around("seat")
    ),
    Order.SEAT_BEFORE_BATCH: Scenario(
        a_forward_samples_for_the_request_that_was_seated_with_it, behind("seat", *FORWARDED)
    ),
    Order.RELEASE_BEHIND_FORWARDS: Scenario(what_is_kept_for_a_request_outlives_its_last_forward, around("release")),
    Order.RELEASE_BEFORE_SEAT: Scenario(
        what_is_kept_for_a_request_is_not_taken_from_the_next, behind("release", "seat")
    ),
    Order.FORWARD_BEHIND_SAMPLE: Scenario(a_forward_takes_the_token_of_the_one_before, around("forward", "batch")),
    Order.LANDING_BEHIND_PLAN: Scenario(a_plan_without_a_batch_lands_with_its_cache_work, around("fence")),
    Order.FUTURE_BEFORE_FORWARD: Scenario(
        a_forward_waits_for_the_future_that_it_takes, Removal(apart=("sample",), deaf=True), ("futures",)
    ),
    Order.RESULT_BEHIND_COPY: Scenario(a_result_is_read_when_it_has_been_copied, Removal(blind=True)),
}
"""For each what must go wrong without it."""

CASES = tuple((order, executor) for order, scenario in SCENARIOS.items() for executor in scenario.executors)


def run(order: Order, executor: str, *, without: bool) -> None:
    """Raises AssertionError, or what the engine itself found, where something went wrong."""
    scenario = SCENARIOS[order]
    with order_rig(executor, scenario.removal if without else scenario.removal.undone()) as rig:
        scenario.run(rig)


def wrong_without(order: Order, executor: str) -> str:
    """What goes wrong without the fence, in a line; "" if nothing does."""
    try:
        run(order, executor, without=True)
    except AssertionError as error:
        return f"a wrong token or byte: {error}".splitlines()[0]
    except InvariantBroken as error:
        return f"found by the engine: {error}"
    return ""
