"""What a real rank tells the server: how many alternatives a request may ask for, and its state for an operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ops_rig import tiny_settings
from ops_server import OpsServer, ops_server

from tokenspeed.settings.grammar import SamplingSettings

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, "echo": True}


@pytest.fixture(scope="module")
def server() -> Iterator[OpsServer]:
    with ops_server(tiny_settings(sampling=SamplingSettings(max_logprobs=30))) as running:
        yield running


def test_a_setting_says_how_many_alternatives_may_be_asked_for(server: OpsServer) -> None:
    answer = server.user.post("/v1/completions", json={**PROMPT, "logprobs": 30})
    assert answer.status_code == 200, answer.text
    tops = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [top is None or len(top) >= 30 for top in tops] == [True] * 5
    for stream in (False, True):
        refused = server.user.post("/v1/completions", json={**PROMPT, "logprobs": 31, "stream": stream})
        assert refused.status_code == 400
        assert "0 to 30" in refused.json()["error"]["message"]


def test_an_operator_gets_each_requests_place_and_nobody_else_does(server: OpsServer) -> None:
    state = server.call("get_internal_state")
    assert (state["rows"], state["rows_left_out"]) == ([], 0)
    assert state["blocks"]["total"] == sum(state["blocks"][name] for name in ("active", "cached", "empty"))
    assert server.user.get("/get_internal_state").status_code == 401
