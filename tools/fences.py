"""Leaves out one fence of the device side after another, and names the run that goes wrong without it.

::

    python tools/fences.py              # every fence, on both executors: about a minute

A fence is a wait between streams (`device.kv.host_fences.Fence`), or a place in the order of the device's
jobs, or the host's wait for a result (`Order` of ``tests/support/order_rig.py``). Each has a scenario, a
run whose tokens or bytes are right with the fence and wrong without it; streams are held meanwhile, so
that neither outcome depends on time. `SITES` says which fences each place of the code stands for: a
place that waits or queues and is not listed, or a fence without a place, is an error, too.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICE = ROOT / "src" / "tokenspeed" / "device"
PLACES = (
    "executors",
    "kv",
    "backends",
    "weights",
    "data_plane.py",
    "handle.py",
    "layer_counter.py",
    "on_stream.py",
    "profile.py",
)
METHODS = ("wait", "wait_for", "submit", "_submit", "queue", "launch")

HOST = "host: "
"""A reason behind it: a wait that orders no work of the device."""

SITES: dict[str, tuple[str, ...]] = {
    # ---- waits between streams
    "kv/host_cache.py HostCacheExecutor.store self.fences.wait": ("STORE_AFTER_PLANS", "PLAN_AFTER_STORES"),
    "kv/host_cache.py HostCacheExecutor.load self.fences.wait": ("LOAD_AFTER_PLAN",),
    "kv/host_cache.py HostCacheExecutor._load_backs self.fences.wait": ("FORWARD_AFTER_LOAD",),
    "layer_counter.py LayersArrived.wait_for self.changed.wait_for": ("FORWARD_AFTER_LAYER",),
    "backends/simulated_model.py SimulatedStep.run ready.wait_for": ("FORWARD_AFTER_LAYER",),
    "executors/futures/runtime.py FuturesRuntime.launch stream.wait": ("FUTURE_BEFORE_FORWARD",),
    # ---- how a backend and the fences pass them on
    "kv/host_fences.py AllFences.wait stream.wait": ("STORE_AFTER_PLANS", "PLAN_AFTER_STORES", "LOAD_AFTER_PLAN"),
    "backends/host_stream.py _work event.wait": ("STORE_AFTER_PLANS", "PLAN_AFTER_STORES", "LOAD_AFTER_PLAN"),
    "backends/host_stream.py HostEvent.wait self.done.wait": ("PLAN_AFTER_STORES", "RESULT_BEHIND_COPY"),
    # ---- the order of jobs
    "executors/streams.py StreamExecutor.copy_blocks self._submit": (
        "COPY_BEHIND_FORWARDS",
        "COPY_BEFORE_ZERO",
        "COPY_BEFORE_BATCH",
    ),
    "executors/streams.py StreamExecutor.zero_blocks self._submit": ("ZERO_BEHIND_FORWARDS", "ZERO_BEFORE_BATCH"),
    "executors/streams.py StreamExecutor.forward self._submit": (
        "SEAT_BEHIND_FORWARDS",
        "SEAT_BEFORE_BATCH",
        "FORWARD_BEHIND_SAMPLE",
    ),
    "executors/streams.py StreamExecutor.forward self.backend.exec_stream.submit": ("LANDING_BEHIND_PLAN",),
    "executors/streams.py StreamExecutor.release self._submit": ("RELEASE_BEHIND_FORWARDS", "RELEASE_BEFORE_SEAT"),
    "executors/streams.py StreamExecutor._submit self.backend.exec_stream.submit": ("FORWARD_BEHIND_SAMPLE",),
    "executors/futures/executor.py FuturesExecutor.copy_blocks self.runtime.queue": (
        "COPY_BEHIND_FORWARDS",
        "COPY_BEFORE_ZERO",
        "COPY_BEFORE_BATCH",
    ),
    "executors/futures/executor.py FuturesExecutor.zero_blocks self.runtime.queue": (
        "ZERO_BEHIND_FORWARDS",
        "ZERO_BEFORE_BATCH",
    ),
    "executors/futures/executor.py FuturesExecutor.forward self.runtime.queue": (
        "SEAT_BEHIND_FORWARDS",
        "SEAT_BEFORE_BATCH",
        "LANDING_BEHIND_PLAN",
    ),
    "executors/futures/executor.py FuturesExecutor.release self.runtime.queue": (
        "RELEASE_BEHIND_FORWARDS",
        "RELEASE_BEFORE_SEAT",
    ),
    "executors/futures/device_step.py DeviceStep.forward self.runtime.launch": ("FORWARD_BEHIND_SAMPLE",),
    "executors/futures/device_step.py DeviceStep.sample self.runtime.launch": ("FORWARD_BEHIND_SAMPLE",),
    "executors/futures/runtime.py FuturesRuntime.launch self.queue": ("FORWARD_BEHIND_SAMPLE",),
    "executors/futures/runtime.py FuturesRuntime.queue self.backend.exec_stream.submit": ("FORWARD_BEHIND_SAMPLE",),
    "kv/host_cache.py HostCacheExecutor._so_far stream.submit": ("STORE_AFTER_PLANS", "LOAD_AFTER_PLAN"),
    "kv/host_cache.py HostCacheExecutor._store write.submit": ("PLAN_AFTER_STORES",),
    "kv/host_cache.py HostCacheExecutor._load_backs load.submit": ("FORWARD_AFTER_LAYER", "FORWARD_AFTER_LOAD"),
    "kv/host_cache.py HostCacheExecutor.load load.submit": ("LOAD_AFTER_PLAN",),
    # ---- the host's waits for results
    "executors/landing.py StreamLanding.result self.event.wait": ("RESULT_BEHIND_COPY",),
    "executors/landing.py NoForwardLanding.result self.event.wait": ("LANDING_BEHIND_PLAN",),
    "executors/futures/output.py AsyncModelRunnerOutput.get_output self.future.wait": ("RESULT_BEHIND_COPY",),
    "executors/futures/output.py AsyncModelRunnerOutput.result self.done.wait": ("RESULT_BEHIND_COPY",),
    "executors/futures/runtime.py DeviceFuture.wait self.event.wait": ("RESULT_BEHIND_COPY",),
    "executors/futures/runtime.py DeviceFuture.to_host self.wait": ("RESULT_BEHIND_COPY",),
    "executors/futures/runner.py ModelRunner.sample_tokens wrapped.done.wait": ("RESULT_BEHIND_COPY",),
    "executors/futures/runner.py ModelRunner._materialize_pending_async_output pending.done.wait": (
        "RESULT_BEHIND_COPY",
    ),
    # ---- waits that order no work of the device
    "executors/futures/device_step.py DeviceStep.forward forward.wait": (
        HOST + "the synchronous flow: each transfer blocks",
    ),
    "backends/cpu.py open_cpu_backend streams[0].submit": (HOST + "start-up",),
    "backends/cpu.py open_cpu_backend streams[0].submit(lambda: torch.set_num_threads(threads), 'threads').wait": (
        HOST + "start-up",
    ),
    "backends/host_stream.py _work gate.wait": (HOST + "the gate of tests",),
    "backends/simulated_time.py _tick timeline.changed.wait": (HOST + "the clock of the simulated device",),
    "data_plane.py HostDataPlane.commit flight.launched.wait": (HOST + "without it a commit finds no landing: raises",),
    "data_plane.py HostDataPlane._await reply.done.wait": (HOST + "the answer of an awaited operation",),
    "handle.py StreamDeviceHandle.execute self._submit": (HOST + "the plan itself, in a recording",),
    "handle.py StreamDeviceHandle._submit self.peer.submit": (HOST + "the transfer peer has fences of its own",),
    "kv/host_acks.py OpenCopies.take copy.event.wait": (HOST + "of a copy that has ended, for what it raised",),
    "kv/host_acks.py OpenCopies.close ended.wait": (HOST + "shutdown",),
    "kv/host_acks.py Ended.wait self.event.wait": (HOST + "shutdown",),
    "kv/host_cache.py LoadEnd.set self.event.wait": (HOST + "of a load that has ended, for what it raised",),
    "on_stream.py on_stream stream.submit": (HOST + "start-up and tests",),
    "on_stream.py on_stream stream.submit(job, label).wait": (HOST + "start-up and tests",),
    "profile.py TraceProfiler.start self.stream.submit": (HOST + "a recording begins between rounds",),
    "profile.py TraceProfiler.start self.stream.submit(session.start, 'profile start').wait": (
        HOST + "a recording begins between rounds",
    ),
    "profile.py TraceProfiler.stop self.stream.submit": (HOST + "a recording ends between rounds",),
    "profile.py TraceProfiler.stop self.stream.submit(session.stop, 'profile stop').wait": (
        HOST + "a recording ends between rounds",
    ),
    "weights/update.py HostOccupancy._tried self.stream.submit": (HOST + "weights change between rounds",),
    "weights/update.py HostOccupancy._tried self.stream.submit(guarded, label).wait": (
        HOST + "weights change between rounds",
    ),
}
"""By file, function and call, below ``src/tokenspeed/device``: names of fences, or a reason that begins with `HOST`."""


class Sites(ast.NodeVisitor):
    """Calls of one file that wait or queue, as keys of `SITES`."""

    def __init__(self, name: str) -> None:
        self.name, self.inside, self.found = name, list[str](), set[str]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node.name, node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            self.found.add(f"{self.name} {'.'.join(self.inside)} {ast.unparse(node.func)}")
        self.generic_visit(node)

    def _within(self, name: str, node: ast.AST) -> None:
        self.inside.append(name)
        self.generic_visit(node)
        self.inside.pop()


def sites() -> set[str]:
    """Every place of the device side that waits for a job or queues one, the CUDA backend's aside."""
    found = set[str]()
    for path in sorted(DEVICE.rglob("*.py")):
        name = path.relative_to(DEVICE).as_posix()
        if name.split("/")[0] in PLACES and not name.startswith("backends/cuda"):
            visitor = Sites(name)
            visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
            found |= visitor.found
    return found


def unlisted(fences: set[str]) -> Iterator[str]:
    """What is wrong with `SITES`, for fences of these names."""
    found = sites()
    yield from (f"waits or queues, and stands for no fence: {site}" for site in sorted(found - SITES.keys()))
    yield from (f"is not in the code any more: {site}" for site in sorted(SITES.keys() - found))
    named = {name for names in SITES.values() for name in names if not name.startswith(HOST)}
    yield from (f"a fence without a scenario: {name}" for name in sorted(named - fences))
    yield from (f"a fence without a place in the code: {name}" for name in sorted(fences - named))


def main() -> int:
    # The scenarios do not use the capture check: a fence must be missed without it.
    os.environ["TOKENSPEED_CAPTURE_CHECK"] = "0"
    sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests/support", "tests/device")]
    import order_rig
    import test_host_cache_fences as tier

    rows = [
        (fence.name, executor, tier.SCENARIOS[fence].run.__name__, tier.wrong_without(fence, executor))
        for fence in tier.Fence
        for executor in ("streams", "futures")
    ]
    rows += [
        (order.name, executor, order_rig.SCENARIOS[order].run.__name__, order_rig.wrong_without(order, executor))
        for order, executor in order_rig.CASES
    ]
    for name, executor, run, wrong in rows:
        print(f"{name:24} {executor:8} {run}: {wrong[:100] or 'NOTHING GOES WRONG'}")  # noqa: T201 - a script
    faults = [
        *unlisted({row[0] for row in rows}),
        *(f"nobody misses {row[0]} ({row[1]})" for row in rows if not row[3]),
    ]
    print("\n".join(faults) or f"{len(rows)} runs, each wrong without its fence")  # noqa: T201 - a script
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
