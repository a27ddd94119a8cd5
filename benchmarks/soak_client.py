"""One of the soak's clients, and the books of what all of them did and saw."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import aiohttp
import attrs

ADMIN_KEY = "soak"
ACTS: Mapping[str, int] = MappingProxyType(
    {
        "stream": 8,
        "leave": 4,
        "vanish": 3,
        "abort": 3,
        "whole": 5,
        "chat": 4,
        "grammar": 3,
        "bad": 4,
        "look": 1,
    }
)
"""What a client may do, and how often compared with the rest."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMS: tuple[tuple[dict[str, Any], Callable[[str], bool]], ...] = (
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        lambda text: set(json.loads(text)) == {"n"},
    ),
    ({"structured_outputs": {"choice": ["river", "stone"]}}, lambda text: text in ("river", "stone")),
    ({"structured_outputs": {"regex": "[a-c]{2,4}"}}, lambda text: re.fullmatch("[a-c]{2,4}", text) is not None),
)
"""How an answer is held to a form, and whether a text has it."""
BAD: tuple[tuple[str, str], ...] = (
    (COMPLETIONS, '{"prompt": "x", "temperature": NaN}'),
    (COMPLETIONS, '{"prompt": 3.5}'),
    (COMPLETIONS, '{"prompt": "x", "max_tokens": "many"}'),
    (COMPLETIONS, '{"prompt": [1, 99999999999]}'),
    (COMPLETIONS, '{"prompt": "x", "n": 0}'),
    (COMPLETIONS, '{"prompt": "'),
    (COMPLETIONS, '{"prompt": "x", "model": "another"}'),
    (CHAT, '{"messages": []}'),
    (CHAT, '{"messages": [{"role": "user", "content": 7}]}'),
    (CHAT, '{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "("}}'),
    (CHAT, '{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": {"type": "nothing"}}}'),
)
LATE = "structured_outputs"
"""What is no grammar is found out by the engine, which refuses a choice that was admitted."""


@attrs.define(eq=False)
class Books:
    """What the clients did and saw.

    Attributes:
        sent: requests, answered or not.
        status: of answers that a client saw.
        ended: reasons of choices whose end was seen.
        left: choices that were running when their client left.
        vanished: choices whose client left before it was told that they run.
        refused: choices that the engine refused after they were admitted.
        faults: what must not happen.
    """

    acts: Counter[str] = attrs.field(factory=Counter)
    sent: int = 0
    status: Counter[int] = attrs.field(factory=Counter)
    ended: Counter[str] = attrs.field(factory=Counter)
    left: int = 0
    vanished: int = 0
    refused: int = 0
    tokens: int = 0
    faults: Counter[str] = attrs.field(factory=Counter)


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """For any number of clients. An event handed over as a request's `trace_request_ctx` is set once it is sent."""

    async def sent(_session: object, context: SimpleNamespace, _params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.set()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        trace_configs=[trace],
    )


@attrs.frozen(kw_only=True, eq=False)
class Client:
    """One act after another, each drawn at random.

    Attributes:
        name: of no other client; no other one's begins with it.
        acts: those to draw from.
    """

    session: aiohttp.ClientSession
    url: str
    books: Books
    draw: random.Random
    name: str
    acts: Sequence[str] = tuple(ACTS)
    numbers: itertools.count[int] = attrs.field(factory=itertools.count)

    async def act(self) -> None:
        runs: dict[str, Callable[[], Awaitable[None]]] = {
            "stream": self.stream,
            "leave": self.leave,
            "vanish": self.vanish,
            "abort": self.abort,
            "whole": self.whole,
            "chat": self.chat,
            "grammar": self.constrained,
            "bad": self.bad,
            "look": self.look,
        }
        (name,) = self.draw.choices(self.acts, [ACTS[name] for name in self.acts])
        self.books.acts[name] += 1
        await runs[name]()

    def body(self, **more: Any) -> dict[str, Any]:
        words = self.draw.choices(("river", "stone", "seven", "light", "open", "and"), k=self.draw.choice((2, 20, 120)))
        return {
            "prompt": " ".join(words),
            "max_tokens": self.draw.choice((1, 4, 16, 48)),
            "temperature": self.draw.choice((0, 0.8)),
            "seed": self.draw.randrange(1 << 30),
            "n": self.draw.choice((1, 1, 1, 2)),
            **more,
        }

    async def stream(self) -> None:
        await self._stream(self.body(), after=None)

    async def leave(self) -> None:
        """Close the connection in the middle of a stream."""
        await self._stream(self.body(), after=self.draw.randrange(4))

    async def abort(self) -> None:
        """Have a stream ended by its name, by somebody else; it says so itself."""
        rid = f"{self.name}-{next(self.numbers)}."
        # Whoever is aborted has not more than its tokens to go on, so it may as well have ended.
        await self._stream(self.body(request_id=rid, max_tokens=200), after=self.draw.randrange(4), end=rid)

    async def vanish(self) -> None:
        """Hang up on a request that is on its way, not knowing how far it has come."""
        body, sent = self.body(), asyncio.Event()
        task = asyncio.ensure_future(self._post(COMPLETIONS, body, sent=sent))
        waiting = asyncio.ensure_future(sent.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await asyncio.wait((task,), timeout=self.draw.choice((0.0, 0.01, 0.1)))
        if task.done():
            self._whole(task.result(), choices=body["n"])
            return
        task.cancel()
        await asyncio.wait((task,))
        self.books.vanished += body["n"]

    async def whole(self) -> None:
        body = self.body()
        self._whole(await self._post(COMPLETIONS, body), choices=body["n"])

    async def chat(self) -> None:
        body = self.body()
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        self._whole(await self._post(CHAT, body), choices=body["n"])

    async def constrained(self) -> None:
        form, fits = self.draw.choice(FORMS)
        body = {"messages": [{"role": "user", "content": "a word or a number"}], "max_tokens": 48, **form}
        told = await self._post(CHAT, body)
        self._whole(told, choices=1)
        for choice in told["choices"] if told is not None else ():
            text = choice["message"]["content"]
            if choice["finish_reason"] == "stop" and not fits(text):
                self.books.faults[f"an answer without its form: {text[:40]!r}"] += 1

    async def bad(self) -> None:
        route, body = self.draw.choice(BAD)
        self.books.sent += 1
        async with self.session.post(
            f"{self.url}{route}", data=body, headers={"content-type": "application/json"}
        ) as answer:
            self.books.status[answer.status] += 1
            told = await answer.json()
            if answer.status not in (400, 404) or not told["error"]["message"]:
                self.books.faults[f"{answer.status} for {body[-60:]}"] += 1
            elif LATE in body:
                self.books.refused += 1

    async def look(self) -> None:
        self.books.sent += 1
        async with self.session.get(f"{self.url}/health") as answer:
            self.books.status[answer.status] += 1
            if answer.status != 200:
                self.books.faults[f"health answers {answer.status}"] += 1

    async def _stream(self, body: dict[str, Any], *, after: int | None, end: str = "") -> None:
        """Read a stream; `after` so many events with text leave, or have what is called `end` ended and read on."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reasons: list[str] = []
        done, usage, pieces = False, 0, 0
        self.books.sent += 1
        async with self.session.post(f"{self.url}{COMPLETIONS}", json=body) as answer:
            self.books.status[answer.status] += 1
            if answer.status != 200:
                self._refused(answer.status, body)
                return
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    done = True
                    break
                event = json.loads(line[5:])
                if "error" in event:
                    self.books.faults[f"error in a stream: {event['error']['message'][:60]}"] += 1
                    return
                reasons += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
                pieces += 1
                if after is None or pieces <= after or reasons:
                    continue
                if not end:
                    answer.close()
                    self.books.left += body["n"]
                    return
                await self._end(end)
                after = None
        self._ended(reasons, usage)
        if not done or len(reasons) != body["n"]:
            self.books.faults[f"stream ended with done={done}, {len(reasons)} of {body['n']} reasons"] += 1

    async def _end(self, rid: str) -> None:
        self.books.sent += 1
        async with self.session.post(
            f"{self.url}/abort_request", json={"rid": rid}, headers={"authorization": f"Bearer {ADMIN_KEY}"}
        ) as answer:
            self.books.status[answer.status] += 1
            if answer.status != 200:
                self.books.faults[f"an abort is answered with {answer.status}"] += 1

    async def _post(
        self, route: str, body: dict[str, Any], *, sent: asyncio.Event | None = None
    ) -> dict[str, Any] | None:
        self.books.sent += 1
        async with self.session.post(f"{self.url}{route}", json=body, trace_request_ctx=sent) as answer:
            told: dict[str, Any] = await answer.json()
            self.books.status[answer.status] += 1
            if answer.status == 200:
                return told
            self._refused(answer.status, told)
            return None

    def _whole(self, told: dict[str, Any] | None, *, choices: int) -> None:
        if told is None:
            return
        self._ended([choice["finish_reason"] for choice in told["choices"]], told["usage"]["completion_tokens"])
        if len(told["choices"]) != choices:
            self.books.faults["another number of choices than asked for"] += 1

    def _ended(self, reasons: list[str], tokens: int) -> None:
        self.books.ended.update(reasons)
        self.books.tokens += tokens

    def _refused(self, status: int, said: object) -> None:
        if status not in (429, 503):  # full is a fair answer
            self.books.faults[f"{status}: {str(said)[:80]}"] += 1
