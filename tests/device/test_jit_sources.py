"""The hooks in Triton and torch.compile, and that a rank has them before it builds anything."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch._dynamo
from rig import request
from triton import knobs
from triton.runtime.jit import JitFunctionInfo

from tokenspeed.compose.engine import RankEngine, rank_engine
from tokenspeed.device.jit_monitor import JitCheckMode, JitMonitor
from tokenspeed.device.jit_sources import hook_dynamo, hook_triton, open_sources
from tokenspeed.device.parts import SamplerFactory
from tokenspeed.device.sampling.base import SampledTokens, Sampler, TokenMasks
from tokenspeed.device.sampling.sampler import batch_sampler
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings
from tokenspeed.testing import RecordingLink

TINY = Settings(model=ModelSettings(source="random:tiny-llama"), device=DeviceSettings(kv_pool_tokens=2048))


@attrs.define(eq=False)
class Runtime:
    """The hooks of `triton.knobs.runtime`."""

    jit_cache_hook: Any = None
    jit_post_compile_hook: Any = None

    def compile(self, fn: Any, key: str, **constants: object) -> bool | None:
        """Call the hooks as Triton does around a compilation."""
        places = {(fn.jit_function.arg_names.index(name),): value for name, value in constants.items()}
        told = {"repr": key, "compile": {"key": key, "constants": places}, "is_manual_warmup": False}
        skip: bool | None = self.jit_cache_hook(key=key, fn=fn, already_compiled=False, **told)
        if not skip:
            self.jit_post_compile_hook(key=key, fn=fn, already_compiled=False, **told)
        return skip


@attrs.frozen(eq=False)
class Kernel:
    arg_names: tuple[str, ...] = ("x", "M", "BLOCK")


GEMM = JitFunctionInfo("kernels", "gemm", Kernel())


@pytest.mark.contract("DP-76", "DP-77")
def test_tritons_hooks_tell_of_kernel_and_constants_by_name(caplog: pytest.LogCaptureFixture) -> None:
    monitor, runtime = JitMonitor(), Runtime()
    undo = hook_triton(monitor, runtime)
    runtime.compile(GEMM, "a", M=16, BLOCK=64)
    monitor.enter_serving()
    for m in (17, 18, 19):
        runtime.compile(GEMM, f"m{m}", M=m, BLOCK=64)
    text = caplog.text
    assert "kernels.gemm was compiled while serving, at " in text
    assert "test_jit_sources.py" in text
    assert "new value of M=17" in text
    assert "compile-time parameter M takes ever new values" in text
    assert monitor.take().compiles == 3
    undo()
    assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == (None, None)


def test_hooks_that_were_there_go_on_being_called_and_may_skip_a_compilation() -> None:
    told: list[str] = []

    def cache(**fields: Any) -> bool:
        told.append(f"cache {fields['key']}")
        return fields["key"] == "skipped"

    runtime = Runtime(jit_cache_hook=cache, jit_post_compile_hook=lambda **fields: told.append(f"post {fields['key']}"))
    monitor = JitMonitor()
    undo = hook_triton(monitor, runtime)
    monitor.enter_serving()
    assert runtime.compile(GEMM, "skipped", M=1) is True
    assert monitor.take().compiles == 0
    runtime.compile(GEMM, "done", M=1)
    assert monitor.take().compiles == 1
    assert told == ["cache skipped", "cache done", "post done"]
    undo()
    assert runtime.jit_cache_hook is cache


@pytest.mark.contract("DP-81")
def test_under_error_triton_does_not_get_to_compile() -> None:
    monitor, runtime = JitMonitor(mode=JitCheckMode.ERROR), Runtime()
    hook_triton(monitor, runtime)
    monitor.enter_serving()
    with pytest.raises(InvariantBroken, match=r"kernels\.gemm"):
        runtime.compile(GEMM, "a", M=1)
    assert monitor.take().compiles == 0


def test_the_hooks_have_the_names_that_the_installed_triton_calls() -> None:
    assert hasattr(knobs.runtime, "jit_cache_hook")
    assert hasattr(knobs.runtime, "jit_post_compile_hook")
    before = knobs.runtime.jit_post_compile_hook
    sources = open_sources(JitMonitor(), device_type="cpu")
    assert knobs.runtime.jit_post_compile_hook is not before
    sources.catch_up()
    sources.close()
    assert knobs.runtime.jit_post_compile_hook is before


@pytest.mark.contract("DP-72", "DP-76")
def test_torch_compile_is_reported_with_function_cause_and_duration(caplog: pytest.LogCaptureFixture) -> None:
    monitor = JitMonitor()
    undo = hook_dynamo(monitor)

    @torch.compile(backend="eager")
    def doubled(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    doubled(torch.ones(3))
    assert monitor.take().compiles == 0
    monitor.enter_serving()
    doubled(torch.ones(3))
    assert monitor.take().compiles == 0
    doubled(torch.ones(3, dtype=torch.int64))
    counts = monitor.take()
    undo()
    doubled(torch.ones(3, dtype=torch.float64))
    assert counts.compiles == 1
    assert counts.seconds > 0
    assert "doubled (" in caplog.text
    assert "dtype mismatch" in caplog.text
    assert monitor.take().compiles == 0


@pytest.mark.contract("DP-81")
def test_under_error_torch_compile_is_refused_before_it_begins_and_works_again_without_the_monitor() -> None:
    monitor = JitMonitor(mode=JitCheckMode.ERROR)
    undo = hook_dynamo(monitor)
    monitor.enter_serving()

    @torch.compile(backend="eager")
    def doubled(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    try:
        with pytest.raises(Exception, match="compiled while serving"):
            doubled(torch.ones(5))
        assert monitor.take().compiles == 0
    finally:
        undo()
    assert doubled(torch.ones(5)).sum() == 10


@attrs.frozen(eq=False)
class Compiling:
    """A sampler that compiles for another shape each time."""

    inner: Sampler
    asked: list[int]

    def seat(self, seat: Seat) -> None:
        self.inner.seat(seat)

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        self.asked.append(len(slots))
        torch.compile(lambda values: values + 1, backend="eager", dynamic=False)(torch.zeros(len(self.asked)))
        return self.inner.sample(logits, slots=slots, positions=positions, masks=masks)


def rounds(engine: RankEngine, count: int) -> None:
    for _ in range(count):
        engine.loop.round()


def served_past_the_mark(link: RecordingLink, make: SamplerFactory) -> None:
    with rank_engine(TINY, connect=lambda info, wakeup: link, sampler=make) as engine:
        link.put(request("a", 3, max_new=2))
        rounds(engine, 20)
        assert engine.serving.jit.mode is JitCheckMode.ERROR  # tests run under it, see conftest.py
        engine.serving.jit.enter_serving()
        link.put(request("b", 3, max_new=2))
        rounds(engine, 20)


@pytest.mark.contract("DP-73", "DP-80", "DP-81")
def test_a_rank_watches_compilations_from_before_its_build_and_refuses_them_while_serving() -> None:
    link, hooks = RecordingLink(), list[object]()

    def make(*, slots: int, vocab_size: int) -> Sampler:
        hooks.append(knobs.runtime.jit_cache_hook)
        return Compiling(batch_sampler(slots=slots, vocab_size=vocab_size), [])

    before = knobs.runtime.jit_cache_hook
    with pytest.raises(Exception, match="compiled while serving"):
        served_past_the_mark(link, make)
    assert hooks != [before]  # made inside the build, the sampler found the monitor's hook
    assert len(link.tokens("a")) == 2
    assert not link.finish("b")
    assert knobs.runtime.jit_cache_hook is before
