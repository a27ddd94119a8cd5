"""How far each role runs ahead of its commits."""

from __future__ import annotations

import io
import json

import pytest
from rig import Rig, hand_rig, request

from tokenspeed.cli.console import Console
from tokenspeed.cli.main import main
from tokenspeed.control.pd import NoPeer
from tokenspeed.settings.model import SchedulerSettings, Settings
from tokenspeed.testing import ScriptedPlane

CHUNK = 32


class Prefilling(NoPeer):
    """The prefill half of a pair, whose transfers never end here."""

    @property
    def role(self) -> str:
        return "prefill"


def prefilling(overlap: bool) -> tuple[Rig, ScriptedPlane]:
    plane = ScriptedPlane()
    return hand_rig(plane=plane, pd=Prefilling(), overlap=overlap), plane


@pytest.mark.contract("DO-3", "DO-1")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefill_node_plans_the_next_chunk_before_it_commits_the_last_one(overlap: bool) -> None:
    rig, plane = prefilling(overlap)
    rig.put(request("a", 4 * CHUNK))
    rig.rounds(4)
    calls = [call for call, _ in plane.calls if call in ("execute", "commit")]
    assert [plan.batch.num_tokens for plan in plane.plans if plan.batch is not None] == [CHUNK] * 4
    assert calls == ["execute", *["execute", "commit"] * 3] if overlap else calls == ["execute", "commit"] * 4


@pytest.mark.contract("DO-12", "SP-29")
def test_prompts_behind_each_other_on_a_prefill_node_never_let_the_queue_run_empty() -> None:
    """What a remote decode waits for is the final chunk's result, and not that everything is committed."""
    rig, plane = prefilling(overlap=True)
    rig.put(request("a", 2 * CHUNK), request("b", 4 * CHUNK))
    flying = []
    for _ in range(4):
        rig.loop.round()
        flying.append(len(rig.loop.state.in_flight))
    rig.rounds(4)
    chunks = [plan.batch.num_tokens for plan in plane.plans if plan.batch is not None]
    assert (chunks, flying) == ([2 * CHUNK, 2 * CHUNK, CHUNK, CHUNK], [1] * 4)
    sent = [(number, stream.rid) for number, plan in enumerate(plane.plans) for stream in plan.remote_decode]
    assert sent == [(3, "a"), (4, "b")]  # the first went out with a chunk of the second


@pytest.mark.contract("DO-2", "DO-4")
@pytest.mark.parametrize(("arguments", "depth"), [((), 1), (("--disable-overlap-schedule",), 0)])
def test_the_switch_of_the_command_line_gives_depth_zero(arguments: tuple[str, ...], depth: int) -> None:
    out = io.StringIO()
    talk = Console(stdin=io.StringIO(), stdout=out, stderr=io.StringIO(), environ={})
    assert main(["config", "--json", *arguments], talk) == 0
    overlap = json.loads(out.getvalue())["settings"]["scheduler"]["overlap"]
    assert Settings(scheduler=SchedulerSettings(overlap=overlap)).in_flight_depth == depth
