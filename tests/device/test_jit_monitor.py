"""The JIT monitor, fed with compilations by hand: what it logs, counts, names and refuses."""

from __future__ import annotations

import logging

import attrs
import pytest
from device_doubles import CountingWakeup, FakeHandle, plan

from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.jit_monitor import SWITCH, Compilation, JitCheckMode, JitCounts, JitMonitor, jit_monitor
from tokenspeed.device.jit_routes import Product, Route, capture_call, eager_route
from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.plan import Dispatch

ONE = Compilation(kernel="gemm", site="model.py:7", seconds=0.15, key="M=16", constants=(("M", "16"), ("BLOCK", "64")))


def of(m: int, **changes: object) -> Compilation:
    return attrs.evolve(ONE, key=f"M={m}", constants=(("M", str(m)), ("BLOCK", "64")), **changes)


def serving(mode: JitCheckMode = JitCheckMode.WARN) -> JitMonitor:
    monitor = JitMonitor(mode=mode)
    monitor.enter_serving()
    return monitor


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("jit_monitor")]


@pytest.mark.contract("DP-72", "DP-76")
def test_a_compilation_after_the_mark_is_logged_with_kernel_place_duration_and_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = JitMonitor()
    monitor.compiled(of(16))
    assert lines(caplog) == []
    assert monitor.take() == JitCounts()
    monitor.enter_serving()
    monitor.compiled(of(17))
    assert lines(caplog) == ["gemm was compiled while serving, at model.py:7, in 0.150 s: new value of M=17"]
    assert monitor.take() == JitCounts(compiles=1, seconds=0.15)
    assert monitor.take() == JitCounts()


@pytest.mark.contract("DP-76")
@pytest.mark.parametrize(
    ("before", "event", "cause"),
    [
        ([], of(16), "its first call from here"),
        ([of(16)], attrs.evolve(of(16), key="fp16"), "a new key: fp16"),
        ([of(16)], of(16), "a key it was compiled for before"),
        ([of(16)], of(17, cause="guards failed: size of x"), "guards failed: size of x"),
        ([of(16)], of(16, direct_trace=True), "it was called directly"),
    ],
)
def test_the_cause_is_worked_out_from_what_was_compiled_before(
    before: list[Compilation], event: Compilation, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = JitMonitor()
    for earlier in before:
        monitor.compiled(earlier)
    monitor.enter_serving()
    monitor.compiled(event)
    assert lines(caplog)[0].endswith(f"s: {cause}")


@pytest.mark.contract("DP-77")
def test_a_parameter_that_takes_ever_new_values_at_one_place_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = serving()
    for m in (16, 17):
        monitor.compiled(of(m))
    assert not [line for line in lines(caplog) if "ever new" in line]
    for m in range(18, 30):
        monitor.compiled(of(m))
    found = [line for line in lines(caplog) if "ever new" in line]
    assert found == ["model.py:7: gemm: compile-time parameter M takes ever new values: 16, 17, 18, …"]


@pytest.mark.contract("DP-77")
def test_the_buckets_of_start_up_are_not_taken_for_a_quantity_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    monitor = JitMonitor()
    for m in (1, 2, 4, 8, 16):
        monitor.compiled(of(m))
    monitor.enter_serving()
    monitor.compiled(attrs.evolve(of(8), key="other", constants=(("M", "8"), ("BLOCK", "32"))))
    monitor.compiled(of(1, site="elsewhere.py:3"))
    monitor.compiled(of(2, site="elsewhere.py:3"))
    assert not [line for line in lines(caplog) if "ever new" in line]


@pytest.mark.contract("DP-78")
def test_a_place_that_compiles_again_what_it_was_specialised_for_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = JitMonitor()
    monitor.compiled(of(16))
    monitor.enter_serving()
    for _ in range(3):
        monitor.compiled(of(16))
    found = [line for line in lines(caplog) if "again and again" in line]
    assert found == ["model.py:7: gemm: it compiles again and again what it was specialised for already: M=16"]
    assert monitor.take().compiles == 3


@pytest.mark.contract("DP-79")
def test_a_direct_call_of_a_function_to_be_compiled_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    monitor = serving()
    for _ in range(3):
        monitor.compiled(of(16, direct_trace=True))
    found = [line for line in lines(caplog) if "traces its Python each time" in line]
    assert len(found) == 1
    assert "model.py:7: gemm" in found[0]


@pytest.mark.contract("DP-81")
def test_under_error_a_compilation_raises_after_the_mark_and_not_before() -> None:
    monitor = jit_monitor({SWITCH: "error"})
    monitor.starting("gemm", "model.py:7")
    monitor.compiled(of(16))
    monitor.enter_serving()
    with pytest.raises(InvariantBroken, match=r"while serving.*kernel='gemm', site='model.py:7'"):
        monitor.starting("gemm", "model.py:7")
    with pytest.raises(InvariantBroken, match="while serving"):
        monitor.compiled(of(17))
    assert monitor.take().compiles == 1


@pytest.mark.contract("DP-81")
def test_the_environment_chooses_between_a_report_and_a_refusal() -> None:
    assert jit_monitor({}).mode is jit_monitor({SWITCH: "warn"}).mode is JitCheckMode.WARN
    assert jit_monitor({SWITCH: "error"}).mode is JitCheckMode.ERROR
    with pytest.raises(SettingsError, match=f"{SWITCH}: 'off' is not one of warn, error"):
        jit_monitor({SWITCH: "off"})


@pytest.mark.contract("DP-80", "KM-14")
def test_a_commit_carries_the_compilations_since_the_one_before() -> None:
    monitor = serving()
    events = iter([[of(1), of(2)], [], [of(3)]])

    def body(operation: str) -> None:
        for event in next(events) if operation == "execute" else ():
            monitor.compiled(event)

    handle = FakeHandle(body=body)
    handle.gate.set()
    plane = open_data_plane(handle, CountingWakeup(), jit=monitor)
    results = [plane.commit(plane.execute(plan(), Dispatch())) for _ in range(3)]
    assert [r.jit_compiles for r in results] == [2, 0, 1]
    assert [r.jit_seconds for r in results] == pytest.approx([0.3, 0.0, 0.15])
    plane.close()


@pytest.mark.contract("DP-81")
def test_under_error_a_compilation_in_a_forward_surfaces_at_its_commit() -> None:
    monitor = serving(JitCheckMode.ERROR)
    handle = FakeHandle(body=lambda operation: monitor.compiled(of(1)) if operation == "execute" else None)
    handle.gate.set()
    plane = open_data_plane(handle, CountingWakeup(), jit=monitor)
    ticket = plane.execute(plan(), Dispatch())
    with pytest.raises(InvariantBroken, match="compiled while serving"):
        plane.commit(ticket)
    plane.close()


def test_what_is_remembered_of_a_place_is_bounded() -> None:
    monitor = serving()
    logging.getLogger("tokenspeed.device.jit_monitor").disabled = True
    try:
        for m in range(1500):
            monitor.compiled(of(m))
            monitor.compiled(of(1, site=f"line {m}"))
    finally:
        logging.getLogger("tokenspeed.device.jit_monitor").disabled = False
    sites = monitor.state.sites
    assert len(sites) <= 1024
    assert all(len(site.keys) <= 1024 and len(site.values["M"]) <= 1024 for site in sites.values())
    assert monitor.take().compiles == 3000


@pytest.mark.contract("DP-82", "DP-83", "DP-84")
@pytest.mark.parametrize(
    ("product", "before"),
    [
        (Product.JOINT_BF16, Route.COMPILED_PER_SHAPE),
        (Product.ROUTER_DOT, Route.COMPILED_PER_SHAPE),
        (Product.DECODE_BF16, Route.PINNED_TILE),
        (Product.OTHER, Route.PREBUILT),
    ],
)
def test_kernels_that_compile_per_shape_are_of_start_up_and_graphs_keep_them(product: Product, before: Route) -> None:
    monitor = JitMonitor()
    captured = capture_call(product, monitor)
    assert eager_route(product, monitor) is captured.route is before
    monitor.enter_serving()
    assert eager_route(product, monitor) is Route.PREBUILT
    assert captured.route is before
    assert capture_call(product, monitor).route is Route.PREBUILT
