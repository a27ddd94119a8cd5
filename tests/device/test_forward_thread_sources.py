"""Static checks of the code that runs in every round: no host waits, no scalar fills, no names that leak."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokenspeed.control
import tokenspeed.device

DEVICE = Path(tokenspeed.device.__path__[0])
CONTROL = Path(tokenspeed.control.__path__[0])
FORWARD_THREAD = ("handle.py", "executors/streams.py", "executors/prepare.py", "executors/slots.py", "step.py")
FUTURES = sorted((Path(tokenspeed.device.__path__[0]) / "executors" / "futures").glob("*.py"))
HOST_SYNCS = {"item", "tolist", "cpu", "nonzero", "synchronize", "is_nonzero", "numpy"}
OWNERS_OF_DEVICE_STATE = ("backends", "executors", "kv", "models", "sampling", "attention", "layers", "kernels")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.contract("DP-55", "ER-8")
@pytest.mark.parametrize("name", FORWARD_THREAD)
def test_per_round_code_has_no_form_that_waits_for_the_device(name: str) -> None:
    called = [node for node in ast.walk(tree(DEVICE / name)) if isinstance(node, ast.Call)]
    methods = [node.func for node in called if isinstance(node.func, ast.Attribute)]
    assert [f"{m.lineno}: {ast.unparse(m)}" for m in methods if m.attr in HOST_SYNCS] == []


@pytest.mark.contract("DP-55", "AF-69")
def test_the_futures_executor_waits_for_the_device_where_a_wait_is_registered_and_nowhere_else() -> None:
    """Waits of the forward thread stand inside `host_sync`, or belong to the synchronous flow."""
    waiting = []
    for path in FUTURES:
        for function in (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)):
            calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
            names = {c.attr for c in calls if isinstance(c, ast.Attribute)}
            if names & {"wait", "to_host", "get_output", "result", "join"}:
                guarded = "host_sync" in {c.attr for c in calls if isinstance(c, ast.Attribute)}
                waiting.append((path.name, function.name, guarded))
    by_name = {name: guarded for _, name, guarded in waiting}
    assert {name for name, guarded in by_name.items() if guarded} == {
        "_materialize_pending_async_output",
        "_maybe_remap_async_future",
    }
    # What is left: futures themselves, the landing, the output thread, streams' waits for each
    # other, copies made inside jobs, and the two places of the synchronous flow.
    assert {name for name, guarded in by_name.items() if not guarded} == {
        *("wait", "to_host", "run", "launch", "get_output", "result", "read", "close", "_serve"),
        *("_sample", "_reader"),
        *("forward", "sample_tokens"),
    }


@pytest.mark.contract("DP-18")
def test_the_executor_fills_by_operations_and_not_by_indexed_assignment() -> None:
    stores = [n for n in ast.walk(tree(DEVICE / "executors/streams.py")) if isinstance(n, ast.Subscript)]
    assert [f"{n.lineno}: {ast.unparse(n)}" for n in stores if isinstance(n.ctx, ast.Store)] == []


@pytest.mark.contract("DP-58")
def test_tensors_reach_the_device_by_the_backend_only() -> None:
    for path in (DEVICE / "executors").rglob("*.py"):
        used = {n.attr for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute)}
        assert used.isdisjoint({"to", "from_numpy", "tensor", "cuda", "pin_memory"}), path.name


@pytest.mark.contract("DP-43")
def test_classes_that_own_device_state_have_no_name_in_the_control_plane() -> None:
    owned = {
        node.name
        for room in OWNERS_OF_DEVICE_STATE
        for path in (DEVICE / room).glob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {"StreamExecutor", "CpuBackend", "HostStream", "SlotState"} <= owned
    for path in CONTROL.glob("*.py"):
        names = {n.id for n in ast.walk(tree(path)) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute)}
        assert names.isdisjoint(owned), path.name


WAITING = {"wait", "join", "get", "acquire", "result", "recv", "select", "put_nowait", "sleep"}
MAY_WAIT = {"commit", "_await", "close", "_serve"}


@pytest.mark.contract("DP-6", "DP-12", "DP-13", "DP-3")
def test_of_all_operations_only_a_commit_and_the_awaited_ones_can_wait() -> None:
    found: dict[str, set[str]] = {}
    for method in methods_of("HostDataPlane", DEVICE / "data_plane.py"):
        called = [node.func for node in ast.walk(method) if isinstance(node, ast.Call)]
        attributes = {c.attr for c in called if isinstance(c, ast.Attribute)}
        found[method.name] = attributes & WAITING
    # `landed` looks a ticket up in a dictionary; everything else that could wait is where it may.
    assert found.pop("landed") == {"get"}
    assert {name for name, calls in found.items() if calls} == MAY_WAIT
    awaited = {
        method.name
        for method in methods_of("HostDataPlane", DEVICE / "data_plane.py")
        if any(isinstance(n, ast.Attribute) and n.attr == "_await" for n in ast.walk(method))
    }
    rare = {"release_memory", "resume_memory", "load_weights", "commit_weights"}
    rare |= {"open_weights_group", "close_weights_group", "start_profile", "stop_profile"}
    assert awaited == rare | {"idle_forward", "flush_cache", "shutdown_cache"}


def methods_of(name: str, path: Path) -> list[ast.FunctionDef]:
    found = next(node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node for node in found.body if isinstance(node, ast.FunctionDef)]
