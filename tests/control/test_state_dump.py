"""The state of an engine on demand: what it holds, request by request, without anybody's tokens."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from rig import hand_rig, request

from tokenspeed.plane.operations import AskOp, Question


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    lines = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.state"]
    return [json.loads(line.removeprefix("state: ")) for line in lines]


def test_the_next_round_describes_every_request_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tokenspeed.state")
    rig = hand_rig()
    rig.put(request("a", 20, max_new=8))
    rig.put(request("b", 5, max_new=30))
    for _ in range(3):
        rig.loop.round()
    asker = threading.Thread(target=rig.loop.request_dump)
    asker.start()
    asker.join(20.0)
    rig.loop.round()
    rig.loop.round()
    (state,) = told(caplog)
    rows = state["rows"]
    assert isinstance(rows, list)
    assert [row["rid"] for row in rows] == ["a", "b"]
    assert [(row["prompt_tokens"], row["max_tokens"]) for row in rows] == [(20, 8), (5, 30)]
    assert {row["state"] for row in rows} <= {"waiting", "prefilling", "decoding"}
    blocks = state["blocks"]
    assert isinstance(blocks, dict)
    assert blocks["active"] + blocks["cached"] + blocks["empty"] == blocks["total"]
    assert "tokens" not in json.dumps(state).replace("_tokens", "")


def test_it_is_answered_over_the_wire_and_disturbs_nothing() -> None:
    rig = hand_rig()
    rig.put(request("a", 20, max_new=8))
    rig.loop.round()
    rig.put(AskOp(call_id=5, question=Question.STATE))
    rig.loop.round()
    (reply,) = (found for found in rig.link.replies if found.call_id == 5)
    assert json.loads(reply.message)["rows"][0]["rid"] == "a"
