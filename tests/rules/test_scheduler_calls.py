"""Scheduler state moves in the round and nowhere else, and each place says why."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from source_tree import CONTROL, LOOP, SRC, class_named, functions, method_calls, modules, receiver, room, tree

ONLY_A_SCHEDULER_HAS = ("advance", "advance_head", "next_execution_plan", "drain_kv_events", "clear_cache")
MUTATING = (*ONLY_A_SCHEDULER_HAS, "submit", "abort")


def scheduler_calls(node: ast.AST) -> list[ast.Call]:
    """Calls of mutating scheduler methods: by name where the name is the scheduler's own, else by receiver."""
    own = method_calls(node, *ONLY_A_SCHEDULER_HAS)
    shared = [call for call in method_calls(node, "submit", "abort") if receiver(call).endswith("scheduler")]
    return own + shared


@pytest.mark.contract("SP-17", "SP-23", "ER-2", "ER-6", "KM-3", "PT-27")
def test_only_the_event_loop_moves_the_scheduler() -> None:
    others = [path for path in modules() if path != LOOP and room(path) not in ("scheduler", "testing")]
    found = [f"{path.relative_to(SRC)}:{call.lineno}" for path in others for call in scheduler_calls(tree(path))]
    assert found == []


@pytest.mark.contract("SP-17", "IS-5", "KM-1", "PT-27")
def test_each_mutating_method_has_one_call_site_and_the_advances_stand_in_the_round() -> None:
    counts = Counter(call.func.attr for call in scheduler_calls(tree(LOOP)))  # type: ignore[attr-defined]
    assert counts == dict.fromkeys(MUTATING, 1)
    body = functions(class_named(LOOP, "EventLoop"))
    inside = {call.func.attr for call in scheduler_calls(body["round"])}  # type: ignore[attr-defined]
    assert {"advance", "advance_head", "drain_kv_events"} <= inside
    assert len(scheduler_calls(body["_submit"])) == 1


@pytest.mark.contract("SP-18", "SP-23")
def test_every_place_where_scheduler_state_moves_has_a_comment_above_it() -> None:
    lines = LOOP.read_text(encoding="utf-8").splitlines()
    statements = [node for node in ast.walk(tree(LOOP)) if isinstance(node, ast.stmt)]
    bare = []
    for call in scheduler_calls(tree(LOOP)):
        holders = [s for s in statements if s.lineno <= call.lineno <= (s.end_lineno or s.lineno)]
        simple = max(holders, key=lambda s: s.lineno)
        if not lines[simple.lineno - 2].lstrip().startswith("#"):
            bare.append(f"{LOOP.name}:{call.lineno} {ast.unparse(call)}")
    assert bare == []


@pytest.mark.contract("ER-4", "DO-10")
def test_the_queue_is_drained_in_full_only_for_a_dependent_dispatch_and_where_nothing_forwards() -> None:
    loop = class_named(LOOP, "EventLoop")
    sites = {
        name
        for name, function in functions(loop).items()
        for call in method_calls(function, "_commit_down_to")
        if isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    }
    assert sites == {"_plan_and_dispatch", "_drain_if"}


@pytest.mark.contract("PT-27", "KM-3", "ER-6")
def test_cache_events_are_published_by_one_module_called_once_a_round() -> None:
    publishers = {path.name for path in modules(CONTROL) if method_calls(tree(path), "publish")}
    assert publishers == {"event_loop.py", "kv_events.py"}
    assert [receiver(call) for call in method_calls(tree(LOOP), "publish")] == ["self.kv_events"]


@pytest.mark.contract("IS-16")
def test_one_lookup_says_whether_the_scheduler_still_holds_a_request() -> None:
    assert method_calls(tree(LOOP), "holds") == []
    passed = [node for node in ast.walk(tree(LOOP)) if isinstance(node, ast.Attribute) and node.attr == "holds"]
    assert [ast.unparse(node) for node in passed] == ["self.scheduler.holds"]


def test_the_check_sees_a_planted_call() -> None:
    planted = ast.parse(
        "def helper(self):\n    self.scheduler.advance([])\n    peer.scheduler.abort((1,))\n    pool.submit(f)\n"
    )
    assert [call.func.attr for call in scheduler_calls(planted)] == ["advance", "abort"]  # type: ignore[attr-defined]
