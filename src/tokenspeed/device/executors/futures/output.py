"""From a sampled-token future to host values: materialised once, by whichever thread comes first."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import attrs

from tokenspeed.device.backends.host_stream import HostEvent
from tokenspeed.device.executors.futures.batch_state import InputBatch, Sampled
from tokenspeed.device.executors.futures.runtime import DeviceFuture, FuturesLog
from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import ForwardResult

OUTPUT_THREAD = "async_output_busy_loop"


@attrs.define(eq=False)
class OutputState:
    """Writer: the thread that materialises, under the output's lock."""

    result: ForwardResult | None = None


@attrs.frozen(kw_only=True, eq=False)
class AsyncModelRunnerOutput:
    """One step's output, and the `plane.ports.Landing` of its forward.

    Attributes:
        read: waits for the device, then makes the result of the host copies.
        done: the landing: set when the tokens are in the batch state.
        lock: the loser of two materialising threads finds the output actualized.
    """

    future: DeviceFuture
    read: Callable[[], ForwardResult]
    sampled: Sampled
    batch: InputBatch
    log: FuturesLog
    done: HostEvent = attrs.field(factory=HostEvent)
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    state: OutputState = attrs.field(factory=OutputState)

    def get_output(self) -> bool:
        """Wait for the future and give its tokens to the batch state; False if that was done already.

        What the device raised is kept for `result`.
        """
        with self.lock:
            if self.done.query():
                return False
            error: BaseException | None = None
            try:
                self.future.wait("get_output")
                self.state.result = result = self.read()
                self.batch.update_with_samples(self.sampled, result.tokens)
            except BaseException as caught:
                error = caught
            self.log.stage("output", self.future.label)
            self.done.complete(error, 0.0)
        return True

    def landed(self) -> bool:
        return self.done.query()

    def notify(self, wakeup: Wakeup) -> None:
        self.done.notify(wakeup)

    def result(self) -> ForwardResult:
        self.done.wait()
        if self.state.result is None:
            raise InvariantBroken("a landing without a result", label=self.future.label)
        return self.state.result


@attrs.frozen(eq=False)
class LastOutput:
    """The last entry of the queue."""


@attrs.frozen(kw_only=True, eq=False)
class OutputLoop:
    """Hands outputs of the output rank to a thread that materialises them in order.

    Attributes:
        outputs: unbounded, since the forward thread must not block; the control thread commits after
            at most depth + 1 entries.
    """

    rank: int
    output_rank: int
    outputs: queue.SimpleQueue[AsyncModelRunnerOutput | LastOutput]
    thread: threading.Thread

    def handle_output(self, output: AsyncModelRunnerOutput) -> None:
        """Other ranks drop theirs: they materialise only where they break the flow."""
        if self.rank == self.output_rank:
            self.enqueue_output(output)

    def enqueue_output(self, output: AsyncModelRunnerOutput) -> None:
        self.outputs.put(output)

    def close(self, timeout_s: float = 30.0) -> None:
        """Materialise what is queued and join the thread. The device must run, or be closed already.

        Raises: DeviceLost: the thread has not ended after `timeout_s`.
        """
        self.outputs.put(LastOutput())
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise DeviceLost(f"{OUTPUT_THREAD} did not end within {timeout_s:g} s")


def open_output_loop(*, rank: int = 0, output_rank: int = 0) -> OutputLoop:
    outputs: queue.SimpleQueue[AsyncModelRunnerOutput | LastOutput] = queue.SimpleQueue()
    # A daemon, so that a process that dies without closing is not kept alive by its device.
    thread = threading.Thread(target=_serve, args=(outputs,), name=OUTPUT_THREAD, daemon=True)
    thread.start()
    return OutputLoop(rank=rank, output_rank=output_rank, outputs=outputs, thread=thread)


def _serve(outputs: queue.SimpleQueue[AsyncModelRunnerOutput | LastOutput]) -> None:
    """One output after another; blocked, not polling, while there is none."""
    while True:
        output = outputs.get()
        if isinstance(output, LastOutput):
            return
        output.get_output()
        del output  # an idle thread must not keep the last step's arrays alive
