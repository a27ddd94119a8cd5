"""What a rank process does before its first round, in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import attrs
import pytest

from tokenspeed.device.guards import EnterServing
from tokenspeed.device.jit_monitor import JitMonitor
from tokenspeed.errors import InvariantBroken


@attrs.define(eq=False)
class OrderSpy:
    """Stands for sync debugging and garbage collector; notes the mark as each sees it."""

    jit: JitMonitor
    log: list[tuple[str, bool]] = attrs.field(factory=list)

    def _note(self, what: str) -> None:
        self.log.append((what, self.jit.is_serving()))

    def arm(self) -> None:
        self._note("arm")

    def watching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def collect(self) -> int:
        self._note("collect")
        return 0

    def freeze(self) -> None:
        self._note("freeze")

    def get_threshold(self) -> tuple[int, int, int]:
        return (700, 10, 10)

    def set_threshold(self, threshold0: int, threshold1: int, threshold2: int, /) -> None:
        self._note("threshold")


@pytest.mark.contract("SS-11", "DP-74", "DP-82", "DP-86")
def test_sync_debug_is_armed_then_the_mark_set_then_the_heap_frozen() -> None:
    jit = JitMonitor()
    spy = OrderSpy(jit)
    EnterServing(sync_debug=spy, jit=jit, collector=spy).enter()
    assert spy.log == [("arm", False), ("collect", True), ("freeze", True), ("threshold", True)]


def test_serving_is_entered_once() -> None:
    jit = JitMonitor()
    spy = OrderSpy(jit)
    entering = EnterServing(sync_debug=spy, jit=jit, collector=spy)
    entering.enter()
    with pytest.raises(InvariantBroken, match="twice"):
        entering.enter()


@pytest.mark.contract("DP-82")
def test_kernels_may_compile_until_the_mark_and_not_after() -> None:
    monitor = JitMonitor()
    assert monitor.is_serving() is False
    monitor.enter_serving()
    assert monitor.is_serving() is True
