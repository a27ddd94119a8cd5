"""A load client for servers of the OpenAI protocol that costs little on a small machine.

One thread that reads by hand, since a client that took as long for an event as the server would be measured along
with it. One connection a request, streamed answers whose events are counted and timed but, except for the last, not
parsed.
"""

from __future__ import annotations

import itertools
import json
import random
import selectors
import socket
import statistics
import time
from collections.abc import Sequence

import attrs

LOWEST_ID, HIGHEST_ID = 1000, 20000
"""Ordinary words of the vocabularies of the models measured; no special token."""


@attrs.frozen(kw_only=True)
class Stream:
    """One request; absolute times of its sending and of the events with tokens."""

    sent_s: float
    event_s: tuple[float, ...]
    tokens: int


@attrs.frozen(kw_only=True)
class Load:
    """So many requests at once, all sent at the same time, none answered from a prefix cache."""

    tok_s: float
    ttft_ms: float
    itl_ms: float


def load(port: int, model: str, *, concurrency: int, prompt: int, output: int, rng: random.Random) -> Load:
    """Measure one burst. Raises RuntimeError: a request was refused or ended early."""
    bodies = [
        {
            "model": model,
            "prompt": [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(concurrency)
    ]
    begun = time.perf_counter()
    found = answers("127.0.0.1", port, [json.dumps(body).encode() for body in bodies])
    took = time.perf_counter() - begun
    if any(answer.tokens != output for answer in found):
        raise RuntimeError(f"answers of {sorted({answer.tokens for answer in found})} tokens instead of {output}")
    gaps = [late - early for answer in found for early, late in itertools.pairwise(answer.event_s)]
    return Load(
        tok_s=sum(answer.tokens for answer in found) / took,
        ttft_ms=1e3 * statistics.median(answer.event_s[0] - answer.sent_s for answer in found),
        itl_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
    )


@attrs.define(eq=False)
class Reader:
    """One request's connection.

    Attributes:
        line: the end of what was read, which is no whole line yet.
        last: the last event that has a body.
    """

    sock: socket.socket
    sent_s: float
    status: bytes = b""
    line: bytes = b""
    last: bytes = b""
    event_s: list[float] = attrs.field(factory=list[float])

    def read(self) -> bool:
        """Take what came; False: the stream is over. Raises RuntimeError: it was refused."""
        data = self.sock.recv(1 << 16)
        now_s = time.perf_counter()
        *lines, self.line = (self.line + data).split(b"\n")
        if lines and not self.status:
            self.status = lines[0]
        if self.status and b" 200 " not in self.status:
            raise RuntimeError(b"\n".join([*lines, self.line]).decode(errors="replace")[:2000])
        for line in lines:
            # Events are never split over chunks of the transfer encoding, so lines between are its own.
            if line.startswith(b"data: [DONE]"):
                return False
            if line.startswith(b"data: "):
                self.event_s.append(now_s)
                self.last = line
        return bool(data)

    def stream(self) -> Stream:
        tokens = json.loads(self.last.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return Stream(sent_s=self.sent_s, event_s=tuple(self.event_s[:-1]), tokens=tokens)  # the last has the usage


def answers(host: str, port: int, bodies: Sequence[bytes]) -> list[Stream]:
    """Stream completions, all at once. Raises RuntimeError: one was refused."""
    with selectors.DefaultSelector() as selector:
        readers = [_ask(host, port, body) for body in bodies]
        for reader in readers:
            selector.register(reader.sock, selectors.EVENT_READ, reader)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.data.sock)
                    key.data.sock.close()
    return [reader.stream() for reader in readers]


def _ask(host: str, port: int, body: bytes) -> Reader:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((host, port))
    sent_s = time.perf_counter()
    sock.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    sock.setblocking(False)
    return Reader(sock=sock, sent_s=sent_s)
