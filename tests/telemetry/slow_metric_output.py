"""A metric output that stands still at its first message until it is released; made by the relay of a test."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from tokenspeed.telemetry.events import EventBatch


@attrs.define(eq=False)
class HeldOutput:
    scratch: str
    batches: int = 0

    def __attrs_post_init__(self) -> None:
        Path(self.scratch, "made_in").write_text(str(os.getpid()))
        with Path(self.scratch, "imported_by").open("a") as log:
            log.write(f"{os.getpid()}\n")

    def write(self, batch: EventBatch) -> None:
        if not self.batches:
            Path(self.scratch, "release").read_text()
        self.batches += 1

    def close(self) -> None:
        Path(self.scratch, "batches").write_text(str(self.batches))
