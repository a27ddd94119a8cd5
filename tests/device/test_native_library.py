"""Finding, building and loading the library; what loading it must not do to the process."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from native_rig import checkpoint_of, native_model, own_library, prompt
from paged_rows import paged_run

from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.device.backends.cpu import open_cpu_backend
from tokenspeed.device.defaults import ModelFromWeights
from tokenspeed.device.native.compile import FLAGS, INSTRUCTION_SETS, SOURCES, CompileError, build_library, library_name
from tokenspeed.device.native.library import native_available, native_library, open_library, openmp_runtimes
from tokenspeed.device.native.model import NativeModel, cpu_model_factory, stored_bytes_each
from tokenspeed.device.native.ready import LayerCounter
from tokenspeed.device.native.step import rows_struct
from tokenspeed.device.native.structs import CallStruct, Status
from tokenspeed.device.step import AllReady
from tokenspeed.errors import NotSupported, SettingsError
from tokenspeed.settings.model import DeviceSettings, Forward, KvDtype, WeightsMode


def run_once() -> torch.Tensor:
    model = native_model(checkpoint_of("tiny-llama"), threads=2)
    run = paged_run(model.step, num_pages=8, page_tokens=8)
    return run.forward([(run.sequence(prompt(9, seed=1)), 9)])


def test_nan_stays_nan_and_denormals_survive_the_library(tmp_path: Path) -> None:
    own_library(tmp_path, "portable")
    run_once()
    tiny = np.float32(1e-40)
    assert tiny * np.float32(1.0) == tiny != 0
    assert sys.float_info.min / 4 > 0
    assert torch.tensor([1e-40]).mul(1.0).item() > 0
    nan = np.array([np.nan], dtype=np.float32)
    assert (nan != nan).all()
    assert torch.tensor([float("nan")]).isnan().all()


def test_denormals_survive_on_the_threads_that_computed() -> None:
    backend = open_cpu_backend(2)
    found: list[float] = []
    try:
        backend.exec_stream.submit(run_once, "run").wait()
        # Large enough that torch's own loop runs on the team the step used.
        numbers = torch.full((1 << 18,), 1e-40)
        backend.exec_stream.submit(lambda: found.append(numbers.mul(1.0).min().item()), "mul").wait()
    finally:
        backend.close()
    assert found[0] > 0


def test_no_flag_allows_the_compiler_to_change_arithmetic() -> None:
    flags = [*FLAGS, *(flag for group in INSTRUCTION_SETS.values() for flag in group)]
    assert not [flag for flag in flags if "fast" in flag or "unsafe" in flag or "finite" in flag]
    assert "-ffp-contract=off" in flags


def test_one_openmp_runtime_serves_torch_and_the_library() -> None:
    library = native_library()
    run_once()
    assert openmp_runtimes() == [library.openmp]
    needed = subprocess.run(["readelf", "-d", str(library.path)], capture_output=True, text=True, check=False).stdout
    assert "gomp" not in needed


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_step_uses_the_threads_that_torch_computes_with() -> None:
    """On the exec stream, torch's team comes first; the step's call must not start another."""
    backend, counts = open_cpu_backend(3), list[int]()

    def torch_first() -> None:
        torch.randn(400, 400) @ torch.randn(400, 400)
        torch.randn(1 << 20).exp()
        counts.append(count_threads())

    def then_native() -> None:
        model = native_model(checkpoint_of("tiny-llama"), threads=torch.get_num_threads())
        run = paged_run(model.step, num_pages=8, page_tokens=8)
        run.forward([(run.sequence(prompt(9, seed=1)), 9)])
        counts.append(count_threads())

    try:
        backend.exec_stream.submit(torch_first, "torch").wait()
        backend.exec_stream.submit(then_native, "native").wait()
    finally:
        backend.close()
    assert counts[0] == counts[1]


def test_a_step_binds_no_thread_to_a_core() -> None:
    """Threads of a team that meet on one core go apart; with more threads than cores some always do."""
    allowed = os.sched_getaffinity(0)
    model = native_model(checkpoint_of("tiny-llama"), threads=2 + len(allowed))
    run = paged_run(model.step, num_pages=8, page_tokens=8)
    for _ in range(3):
        run.forward([(run.sequence(prompt(9, seed=1)), 9)])
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset(allowed)}


def test_a_step_leaves_the_interpreter_free() -> None:
    """Another thread's Python runs while a step waits inside C for a layer that is not there."""
    model = native_model(checkpoint_of("tiny-llama"))
    run = paged_run(model.step, num_pages=8, page_tokens=8)
    run.ready = LayerCounter(model.step.library)
    forward = partial(run.forward, [(run.sequence(prompt(9, seed=1)), 9)])
    thread = threading.Thread(target=forward, daemon=True)  # nothing but the counter gets it out of C
    thread.start()
    counted = sum(range(100_000))
    run.ready.raise_to(2)
    thread.join(30)
    assert counted == 4999950000
    assert not thread.is_alive()


def test_without_a_compiler_and_a_built_library_the_reason_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = {"PATH": str(tmp_path), "TOKENSPEED_CACHE": str(tmp_path / "cache")}
    with pytest.raises(NotSupported, match="no C compiler"):
        native_library(bare, package=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not native_available(bare, package=tmp_path)
    assert "torch computes instead" in caplog.text
    assert native_available()


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_failing_compiler_leaves_nothing_behind_and_its_words_in_the_error(tmp_path: Path) -> None:
    fake_compiler(tmp_path, "echo no room on this machine >&2; exit 3")
    target = tmp_path / "out" / "library.so"
    with pytest.raises(CompileError, match="no room on this machine"):
        build_library(target, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert list(target.parent.iterdir()) == []


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NotSupported, match=r"broken\.so"):
        open_library(broken)


def test_the_library_of_these_sources_is_found_in_the_cache(tmp_path: Path) -> None:
    cached = tmp_path / "native" / library_name()
    cached.parent.mkdir()
    cached.write_bytes(native_library().path.read_bytes())
    bare = {"PATH": "", "TOKENSPEED_CACHE": str(tmp_path)}
    assert native_library(bare).path in (cached, native_library().path)


def test_the_name_of_the_library_changes_with_every_source() -> None:
    assert library_name() == library_name()
    assert len(list(SOURCES.glob("*.c"))) > 5
    assert library_name().startswith("native-")


def test_an_unknown_instruction_set_is_refused_with_those_there_are(tmp_path: Path) -> None:
    library = own_library(tmp_path, "portable")
    assert library.instruction_set == "portable"
    with pytest.raises(NotSupported, match="portable"):
        library.use("mmx")
    assert library.instruction_set == "portable"


def test_the_best_instruction_set_is_in_use_unless_told_otherwise() -> None:
    library = native_library()
    assert library.instruction_set == library.instruction_sets[0]
    assert library.instruction_sets[-1] == "portable"


@pytest.mark.parametrize("mode", [WeightsMode.EXACT, WeightsMode.NATIVE, WeightsMode.INT8G32, WeightsMode.FP16])
def test_the_chosen_factory_makes_a_model_of_the_mode(mode: WeightsMode) -> None:
    checkpoint = checkpoint_of("tiny-llama")
    factory = cpu_model_factory(DeviceSettings(forward=Forward.NATIVE, weights=mode))
    assert isinstance(factory, NativeModel)
    weights = factory.load(checkpoint, NoProgress())
    expected = factory.expected_bytes(checkpoint.config)
    assert abs(weights.nbytes - expected) < 0.1 * expected
    bound = factory.bind(weights, num_pages=5, page_tokens=16)
    assert bound.pool.nbytes == 5 * sum(group.block_bytes for group in factory.cache_groups(checkpoint.config, 16))
    run = paged_run(bound.step, num_pages=5, page_tokens=16)
    assert run.forward([(run.sequence(prompt(9, seed=1)), 9)]).isfinite().all()


def test_torch_is_chosen_by_name_and_refuses_weights_it_does_not_have() -> None:
    assert isinstance(cpu_model_factory(DeviceSettings(forward=Forward.TORCH)), ModelFromWeights)
    with pytest.raises(SettingsError, match=r"device\.weights: int8g32"):
        cpu_model_factory(DeviceSettings(forward=Forward.TORCH, weights=WeightsMode.INT8G32))
    with pytest.raises(SettingsError, match=r"device\.kv_dtype: float16"):
        cpu_model_factory(DeviceSettings(forward=Forward.TORCH, kv_dtype=KvDtype.FLOAT16))


@pytest.mark.parametrize(
    ("stored", "each"), [("Q4_1", 20 / 32), ("Q8_0", 34 / 32), ("F16", 2), ("bfloat16", 2), ("float32", 4), ("odd", 4)]
)
def test_the_size_of_native_weights_is_estimated_from_how_they_are_stored(stored: str, each: float) -> None:
    assert stored_bytes_each(attrs.evolve(checkpoint_of("tiny-llama").config, torch_dtype=stored)) == each


@pytest.mark.parametrize(
    ("weights", "kv_dtype", "mode", "numbers"),
    [
        (WeightsMode.AUTO, KvDtype.AUTO, WeightsMode.NATIVE, torch.float16),
        (WeightsMode.EXACT, KvDtype.AUTO, WeightsMode.EXACT, torch.float32),
        (WeightsMode.EXACT, KvDtype.FLOAT16, WeightsMode.EXACT, torch.float16),
        (WeightsMode.INT8G32, KvDtype.FLOAT32, WeightsMode.INT8G32, torch.float32),
    ],
)
def test_what_is_left_open_is_decided_from_the_rest(
    weights: WeightsMode, kv_dtype: KvDtype, mode: WeightsMode, numbers: torch.dtype
) -> None:
    factory = cpu_model_factory(DeviceSettings(weights=weights, kv_dtype=kv_dtype))
    assert isinstance(factory, NativeModel)
    assert (factory.mode, factory.kv_dtype) == (mode, numbers)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    model = native_model(checkpoint_of("tiny-llama"))
    run = paged_run(model.step, num_pages=8, page_tokens=8)
    rows = run.rows([(run.sequence(prompt(9, seed=1)), 9)])
    given = rows_struct(rows)
    call = CallStruct(first=0, last=2, threads=1, workspace=64, workspace_bytes=10)
    step = model.step
    status = step.library.calls.ts_run(
        ctypes.byref(step.model), ctypes.byref(step.pages), ctypes.byref(given), ctypes.byref(call)
    )
    assert status == Status.BAD_WORKSPACE
    assert step.run(rows, layers=range(2), ready=AllReady()).isfinite().all()
