"""The compiler's own process: a grammar is tried here first, where it can be stopped and costs nobody's memory.

``python -m tokenspeed.grammar.child``; msgpack messages with a length of four bytes before each. The
first one in says what to compile for and is answered when the library is loaded; each further one is a
grammar, answered by why it cannot be compiled, or "". It ends with its input.

The library is imported without torch. Where that does not do, the process begins anew with `WHOLE`.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from tokenspeed.grammar.backend import GrammarRefused, load_backend
from tokenspeed.grammar.light_import import import_without
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource

LENGTH = struct.Struct("<I")
NICENESS = 10
WHOLE = "whole"
"""The argument with which the library gets all that it imports."""


class Begin(msgspec.Struct, array_like=True):
    tokens: list[bytes]
    stops: list[int]
    whitespace: int
    memory_bytes: int


class Job(msgspec.Struct, array_like=True):
    kind: str
    text: str


def read(stream: BinaryIO) -> bytes | None:
    """One message; None: there are no more."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def write(stream: BinaryIO, body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def address_space() -> int:
    """Bytes that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the engine, which closes us
    if WHOLE not in sys.argv:
        os.nice(NICENESS)
        try:
            import_without(("torch", "transformers"), ("tvm_ffi", "xgrammar"))
        except Exception:  # whatever it was: this version of the library needs more of them than their names
            os.execv(sys.executable, [sys.executable, "-m", "tokenspeed.grammar.child", WHOLE])  # noqa: S606 - ourselves
    inp, out = sys.stdin.buffer, sys.stdout.buffer
    first = read(inp)
    if first is None:
        return
    begin = msgspec.msgpack.decode(first, type=Begin)
    backend = load_backend(
        Vocabulary(tokens=tuple(begin.tokens), stops=tuple(begin.stops)), whitespace=begin.whitespace
    )
    most = address_space() + begin.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    write(out, b"")
    while (message := read(inp)) is not None:
        job = msgspec.msgpack.decode(message, type=Job)
        answer = ""
        try:
            backend.compile(GrammarSource(kind=job.kind, text=job.text))
        except GrammarRefused as no:
            answer = str(no)
        write(out, answer.encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
