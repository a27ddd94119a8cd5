"""What the round and the control modules may contain."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from source_tree import CONTROL, LOOP, SRC, calls, class_named, functions, imported, method_calls, modules, tree

LOOP_CLASS = class_named(LOOP, "EventLoop")
ROUND = functions(LOOP_CLASS)["round"]
PARTS = {
    node.target.id
    for node in LOOP_CLASS.body
    if isinstance(node, ast.AnnAssign)
    and isinstance(node.target, ast.Name)
    and node.target.id not in ("depth", "state")
}


@pytest.mark.contract("RA-1")
def test_the_round_is_short_and_loops_over_no_requests() -> None:
    assert (ROUND.end_lineno or 0) - ROUND.lineno < 120
    loops = [node for node in ast.walk(ROUND) if isinstance(node, (ast.For, ast.While, ast.ListComp, ast.GeneratorExp))]
    # the only loop hands out replies, of which a round has as many as the frontend made calls
    assert [ast.unparse(node.iter) for node in loops if isinstance(node, ast.For)] == [
        "self.control_ops.take_replies()"
    ]
    assert len(loops) == 1


@pytest.mark.contract("RA-1", "RA-3", "ER-5")
def test_the_round_branches_only_on_what_this_round_produced() -> None:
    tests = [ast.unparse(node.test) for node in ast.walk(ROUND) if isinstance(node, (ast.If, ast.IfExp))]
    local = {target.id for node in ast.walk(ROUND) for target in _targets(node)}
    names = [test for test in tests if test not in local]
    assert names == [], "a branch in the round on something else than a value of this round"
    text = ast.unparse(ROUND)
    assert [word for word in ("isinstance", "settings", " is None", " is not None", "hasattr") if word in text] == []


def _targets(node: ast.AST) -> list[ast.Name]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    found: list[ast.Name] = []
    for target in targets:
        found += [inner for inner in ast.walk(target) if isinstance(inner, ast.Name)]
    return found


@pytest.mark.contract("RA-2", "ER-5")
def test_the_round_calls_each_method_of_a_module_at_one_place() -> None:
    sites = Counter(
        ast.unparse(call.func)
        for call in calls(ROUND)
        if ast.unparse(call.func).startswith("self.") and ast.unparse(call.func).split(".")[1] in PARTS
    )
    assert {name: count for name, count in sites.items() if count > 1} == {}


@pytest.mark.contract("EB-14", "RA-44")
def test_one_line_of_the_round_concerns_the_rebalance() -> None:
    noted = [call for call in calls(tree(LOOP)) if ast.unparse(call.func).startswith("self.eplb.")]
    assert [ast.unparse(call) for call in noted] == ["self.eplb.note(forwarded=forwarded)"]


@pytest.mark.contract("RA-4", "RA-5")
@pytest.mark.parametrize("path", [p for p in modules(CONTROL) if p != LOOP], ids=lambda p: p.stem)
def test_no_control_module_knows_the_loop_or_another_module(path: Path) -> None:
    others = [name for name in imported(tree(path)) if name.startswith("tokenspeed.control.")]
    assert others == []
    words = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    assert "EventLoop" not in words


@pytest.mark.contract("RA-3")
def test_no_method_of_the_loop_asks_whether_a_feature_is_on() -> None:
    tests = [
        ast.unparse(node.test) for node in ast.walk(LOOP_CLASS) if isinstance(node, (ast.If, ast.IfExp, ast.While))
    ]
    asked = [
        test
        for test in tests
        if any(word in test for word in ("enable", "disable", "settings", "hasattr", "callable("))
    ]
    assert asked == []


@pytest.mark.contract("PT-23")
def test_pause_state_lives_in_one_module_and_one_class_writes_it() -> None:
    words = {"Phase", "PauseState", "WaitingFlush"}
    defining = {
        path.stem
        for path in modules()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and node.name in words
    }
    assert defining == {"control_ops"}
    users = {path.stem for path in modules() if {n.id for n in ast.walk(tree(path)) if isinstance(n, ast.Name)} & words}
    assert users == {"control_ops"}


def defined_in(folder: Path) -> set[str]:
    return {node.name for path in modules(folder) for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}


@pytest.mark.contract("DP-43")
def test_no_class_of_the_device_side_has_a_name_in_the_control_room() -> None:
    device = defined_in(SRC / "device")
    own = defined_in(CONTROL) | defined_in(SRC / "plane")
    assert device, "the device room defines classes"
    named = {
        f"{path.name}: {node.id}"
        for path in modules(CONTROL)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Name) and node.id in device - own
    }
    assert named == set()


@pytest.mark.contract("DP-1", "ER-7")
@pytest.mark.parametrize("path", modules(CONTROL), ids=lambda p: p.stem)
def test_the_control_room_imports_plane_settings_errors_and_itself(path: Path) -> None:
    ours = {".".join(name.split(".")[:2]) for name in imported(tree(path)) if name.startswith("tokenspeed.")}
    assert ours <= {"tokenspeed.plane", "tokenspeed.settings", "tokenspeed.errors", "tokenspeed.control"}
    assert [name for name in imported(tree(path)) if name.split(".")[0] in ("torch", "triton", "numba", "ctypes")] == []


@pytest.mark.contract("EE-6", "SP-26")
def test_no_reader_of_a_batch_asks_for_the_role() -> None:
    readers = [*modules(CONTROL), *modules(SRC / "device")]
    asked = [
        path.name
        for path in readers
        if any("role" in ast.unparse(n.test) for n in ast.walk(tree(path)) if isinstance(n, ast.If))
    ]
    assert asked == []


def test_the_loop_waits_in_one_place() -> None:
    waits = [ast.unparse(call.func) for call in method_calls(tree(LOOP), "wait", "join", "result", "get", "sleep")]
    assert waits == ["self.wakeup.wait"]
