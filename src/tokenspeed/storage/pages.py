"""What a worker does with a part: one call of the store, and copies between its frames and host blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import numpy as np

from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.storage import HostBytes, HostRegion, StorageBackend
from tokenspeed.storage.frame import frame_bytes, intact, page_of, seal
from tokenspeed.storage.jobs import Desk, Job, Part

ARENA_BYTES = 4 << 20
"""Of frames that a worker handles at once, unless a page alone is larger."""

NAMES_AT_ONCE = 512
ALIGNMENT = 64


def group_of(key: bytes) -> int:
    """The cache group of a key of the scheduler: its first two bytes."""
    return int.from_bytes(key[:2], "little")


@attrs.frozen(kw_only=True, eq=False)
class Pages:
    """Worker threads. Host memory is touched under the operation's lock only, and only while it is not over."""

    regions: tuple[HostRegion, ...]
    backend: StorageBackend
    desk: Desk

    @property
    def arena_bytes(self) -> int:
        return max(ARENA_BYTES, *(_room(region) for region in self.regions))

    def parts(self, job: Job) -> list[Part]:
        """Divide an operation, so that several workers share it and what was done by its time limit counts."""
        keys = job.op.keys
        if job.op.verb is StorageVerb.QUERY:
            ends = [*range(NAMES_AT_ONCE, len(keys), NAMES_AT_ONCE), len(keys)]
        else:
            ends = self._ends(job.op)
        return [Part(job, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def serve(self, part: Part, arena: HostBytes) -> None:
        """Raises: whatever the store raises; the keys of this part have failed then."""
        match part.job.op.verb:
            case StorageVerb.QUERY:
                self._query(part)
            case StorageVerb.GET:
                self._get(part, self._frames(part, arena))
            case StorageVerb.PUT:
                self._put(part, self._frames(part, arena))
            case StorageVerb.CANCEL:
                return

    def _query(self, part: Part) -> None:
        job = part.job
        found = self.backend.exists([job.name(at) for at in range(part.begin, part.end)])
        spans = [self._region(job, at).block_tokens for at in range(part.begin, part.end)]
        hits = sum(span for span, there in zip(spans, found, strict=True) if there)
        with job.lock:
            if job.over:
                return
            job.outcomes[part.begin : part.end] = map(bool, found)
        self.desk.count(queried_tokens=sum(spans), hit_tokens=hits)

    def _get(self, part: Part, frames: Sequence[HostBytes]) -> None:
        job, began = part.job, time.monotonic()
        names = [job.name(at) for at in range(part.begin, part.end)]
        there = self.backend.get(names, frames)
        wrong = [not intact(name, frame) if ok else False for name, frame, ok in zip(names, frames, there, strict=True)]
        moved = 0
        for place, frame in enumerate(frames):
            if not there[place] or wrong[place]:
                continue
            at = part.begin + place
            with job.lock:
                if job.over:
                    return
                self._region(job, at).blocks[job.op.host_blocks[at]] = page_of(frame)
                job.outcomes[at] = True
            moved += len(frame)
        self.desk.count(read_bytes=moved, read_s=time.monotonic() - began, damaged=sum(wrong))
        if any(wrong):
            self.backend.delete([name for name, bad in zip(names, wrong, strict=True) if bad])

    def _put(self, part: Part, frames: Sequence[HostBytes]) -> None:
        job, began = part.job, time.monotonic()
        names = [job.name(at) for at in range(part.begin, part.end)]
        for place, frame in enumerate(frames):
            at = part.begin + place
            with job.lock:
                if job.over:
                    return
                page_of(frame)[:] = self._region(job, at).blocks[job.op.host_blocks[at]]
            seal(names[place], frame)
        stored = self.backend.put(names, frames)
        moved = sum(len(frame) for frame, ok in zip(frames, stored, strict=True) if ok)
        self.desk.count(written_bytes=moved, write_s=time.monotonic() - began)
        with job.lock:
            if not job.over:
                job.outcomes[part.begin : part.end] = map(bool, stored)

    def _frames(self, part: Part, arena: HostBytes) -> list[HostBytes]:
        frames, begin = [], 0
        for at in range(part.begin, part.end):
            region = self._region(part.job, at)
            frames.append(arena[begin : begin + frame_bytes(region.block_bytes)])
            begin += _room(region)
        return frames

    def _ends(self, op: StorageOp) -> list[int]:
        ends, taken, room = [], 0, self.arena_bytes
        for at, key in enumerate(op.keys):
            size = _room(self.regions[group_of(key)])
            if taken + size > room:
                ends.append(at)
                taken = 0
            taken += size
        return [*ends, len(op.keys)]

    def _region(self, job: Job, at: int) -> HostRegion:
        return self.regions[group_of(job.op.keys[at])]


def arena(pages: Pages) -> HostBytes:
    """Memory for one worker's frames; begins at a page of the machine."""
    size, page = pages.arena_bytes, 4096
    memory = np.zeros(size + page, dtype=np.uint8)
    begin = -memory.ctypes.data % page
    return memory[begin : begin + size]


def _room(region: HostRegion) -> int:
    return -(-frame_bytes(region.block_bytes) // ALIGNMENT) * ALIGNMENT
