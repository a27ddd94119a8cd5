"""What a request made goes with it: nothing of it waits for a collection, which would hold up other streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
from frontend_rig import FrontendRig, LiveServer, frontend, live_server
from scripted_engine import ScriptedEngine, engine_info
from starlette.types import Message

from tokenspeed.frontend.http.body import INLINE_BYTES
from tokenspeed.plane.messages import GenerateRequest

pytestmark = pytest.mark.anyio

REFUSED_SEED = 7
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT: Mapping[str, Any] = {"prompt": "abc", "max_tokens": 3}
TALK: Mapping[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
LONG: Mapping[str, Any] = {"prompt": "abc", "max_tokens": 200}
REFUSED: Mapping[str, Any] = {**TEXT, "seed": REFUSED_SEED}


@attrs.define(eq=False)
class Call:
    """One request of a client that speaks ASGI.

    Attributes:
        leaves_after: so many messages the client is gone; None: it stays.
    """

    path: str
    body: bytes
    leaves_after: int | None = None
    status: int = 0
    unread: bool = True
    seen: int = 0
    leaving: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def receive(self) -> Message:
        if self.unread:
            self.unread = False
            return {"type": "http.request", "body": self.body, "more_body": False}
        if self.leaves_after != 0:
            await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.seen += 1
        if self.seen == self.leaves_after:
            self.leaving.set()

    async def make(self, rig: FrontendRig) -> int:
        """Returns: the answer's status; 0 if there was none."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await rig.app(scope, self.receive, self.send)
        return self.status


@contextlib.contextmanager
def left_for_a_collection() -> Iterator[Counter[str]]:
    """Counts, at the end, the objects by type that only a collection frees."""
    found: Counter[str] = Counter()
    gc.disable()
    gc.freeze()  # what was there before, garbage or not, is not looked at
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(thing).__name__ for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def refuse(request: GenerateRequest) -> tuple[int, str] | None:
    return (400, "no such grammar") if request.sampling.seed == REFUSED_SEED else None


@pytest.fixture(name="rig")
async def fixture_rig() -> AsyncIterator[FrontendRig]:
    engine = ScriptedEngine(info=engine_info(max_model_len=1024), refuse=refuse)
    engine.start()
    async with frontend(engine) as rig:
        yield rig


def given(path: str, body: Mapping[str, Any] | bytes, leaves_after: int | None = None) -> Callable[[], Call]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda: Call(path=path, body=data, leaves_after=leaves_after)


@pytest.mark.parametrize(
    ("new_call", "status"),
    [
        pytest.param(given(COMPLETIONS, TEXT), 200, id="whole"),
        pytest.param(given(COMPLETIONS, {**TEXT, "stream": True}), 200, id="stream"),
        pytest.param(given(COMPLETIONS, {**LONG, "stream": True}, 3), 200, id="left-in-a-stream"),
        pytest.param(given(COMPLETIONS, LONG, 0), 0, id="left-before-anything-came"),
        pytest.param(given(COMPLETIONS, {**TEXT, "stop": ["a", "b"], "logprobs": 2, "n": 2}), 200, id="stops"),
        pytest.param(given(CHAT, TALK), 200, id="chat"),
        pytest.param(given(CHAT, {**TALK, "stream": True}), 200, id="chat-stream"),
        pytest.param(given("/v1/responses", {"input": "x", "max_output_tokens": 3}), 200, id="response"),
        pytest.param(given("/v1/messages", {**TALK, "model": "scripted"}), 200, id="message"),
        pytest.param(given(COMPLETIONS, REFUSED), 400, id="refused-by-the-engine"),
        pytest.param(given(COMPLETIONS, {**REFUSED, "stream": True}), 400, id="stream-refused-by-the-engine"),
        pytest.param(given(COMPLETIONS, b'{"prompt": "'), 400, id="no-json"),
        pytest.param(given(COMPLETIONS, b'{"prompt": "' + b"x" * INLINE_BYTES), 400, id="no-json-and-large"),
        pytest.param(given(COMPLETIONS, {"prompt": 3.5}), 400, id="wrong-type"),
        pytest.param(given(COMPLETIONS, {"prompt": "word " * 4096}), 400, id="too-long"),
        pytest.param(given(CHAT, {"messages": [{"role": "user", "content": 7}]}), 400, id="no-conversation"),
        pytest.param(given(COMPLETIONS, {**TEXT, "model": "another"}), 404, id="another-model"),
        pytest.param(given("/nowhere", {}), 404, id="no-route"),
    ],
)
async def test_a_request_leaves_nothing_for_a_collection(
    rig: FrontendRig, new_call: Callable[[], Call], status: int
) -> None:
    assert await new_call().make(rig) == status  # what is made once and kept
    with left_for_a_collection() as left:
        for _ in range(3):
            await new_call().make(rig)
    assert not left
    assert rig.client.in_flight == 0


ASKED = b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n"
RESET = struct.pack("ii", 1, 0)
"""As `SO_LINGER`: closing tells the peer of a failure, not of an end."""


async def connections_gone(live: LiveServer) -> None:
    while live.server.server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the transport lets go of the connection right behind its protocol


def connect_and_leave(live: LiveServer, *, linger: bytes | None) -> None:
    """One answered request on a connection of its own; returns once the server has seen the client close it."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(ASKED)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        (protocol,) = live.server.server.server_state.connections
        idle = live.on_loop(lambda: protocol.timeout_keep_alive_task)  # at once behind the answer
        assert isinstance(idle, asyncio.TimerHandle)
        if linger is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    asyncio.run_coroutine_threadsafe(connections_gone(live), live.loop).result(10)
    assert idle.cancelled()


@pytest.mark.parametrize("linger", [None, RESET], ids=["closed", "reset"])
def test_a_connection_leaves_nothing_for_a_collection(linger: bytes | None) -> None:
    with live_server() as live:
        connect_and_leave(live, linger=linger)
        with left_for_a_collection() as left:
            for _ in range(3):
                connect_and_leave(live, linger=linger)
    assert not left
