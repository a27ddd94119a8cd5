"""How a page lies in a store: a header with length and digest, then the page's bytes.

The digest is over key and page, so that a torn, changed or misplaced value is never taken for the page:
SHA-256, its first 16 bytes. It finds faults, not forgers: whoever can write to the store can write what passes.
"""

from __future__ import annotations

import hashlib
import struct

from tokenspeed.plane.storage import HostBytes

MAGIC = b"TSKV\x01\r\n\x00"
DIGEST_BYTES = 16
HEADER = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
HEADER_BYTES = 64
"""Room that the header takes: pages begin at a cache line, whatever is in front."""


def frame_bytes(page_bytes: int) -> int:
    return HEADER_BYTES + page_bytes


def page_of(frame: HostBytes) -> HostBytes:
    """The page's bytes in a frame, a view."""
    return frame[HEADER_BYTES:]


def seal(key: str, frame: HostBytes) -> None:
    """Write the header of the page that `frame` already holds."""
    page = page_of(frame)
    HEADER.pack_into(frame.data, 0, MAGIC, len(page), _digest(key, page))
    frame[HEADER.size : HEADER_BYTES] = 0


def intact(key: str, frame: HostBytes) -> bool:
    """Whether `frame` holds the page that was sealed under `key`."""
    page = page_of(frame)
    magic, length, digest = HEADER.unpack_from(frame.data, 0)
    return bool(magic == MAGIC and length == len(page) and digest == _digest(key, page))


def _digest(key: str, page: HostBytes) -> bytes:
    found = hashlib.sha256(key.encode())
    found.update(page.data)  # without the interpreter's lock
    return found.digest()[:DIGEST_BYTES]
