"""The date of a response: made when it is sent, since nothing in an idle server keeps one current."""

from __future__ import annotations

import threading
from email.utils import parsedate_to_datetime

import httpx
from frontend_rig import live_server

from tokenspeed.settings.model import ServerSettings


def test_a_response_has_the_second_in_which_it_was_sent() -> None:
    with live_server(settings=ServerSettings(port=0)) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        first = parsedate_to_datetime(http.get("/health").headers["date"])
        threading.Event().wait(1.1)  # the next second
        second = parsedate_to_datetime(http.get("/health").headers["date"])
    assert 1 <= (second - first).total_seconds() < 20
