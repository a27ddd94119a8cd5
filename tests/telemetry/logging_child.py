"""A child of a launcher that logs and ends, in the way its start message's model source says; run as a script."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings

from tokenspeed.errors import ModelError
from tokenspeed.launch.child import Parent, run_child
from tokenspeed.launch.messages import StartRank

RECORDS = 300


def work(parent: Parent, start: StartRank) -> None:
    """``WAY``: return, raise or leave; with ``WAY-much`` more is logged than a pipe holds."""
    way, _, much = start.settings.model.source.partition("-")
    ours, foreign = logging.getLogger("tokenspeed.child"), logging.getLogger("somebody.else")
    for number in range(RECORDS):
        ours.info("record %d%s", number, "." * 2000 if much else "")
    warnings.warn("a warning of Python's", stacklevel=1)
    foreign.warning("a library's record on %s", threading.current_thread().name)
    ours.info("the last record")
    if way == "raise":
        raise ModelError("the end of the road")
    if way == "leave":  # an end without Python's finalization, behind the cleanup
        parent.logs.close()
        os._exit(3)


if __name__ == "__main__":
    sys.exit(run_child(sys.argv, StartRank, work))
