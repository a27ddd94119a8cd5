"""Doubles that ship with the package: typed, held to the same protocols as the real parts, tested.

Each fits a seam of `plane.ports`. None of them patches anything; hand them to a constructor or to
`rank_engine(settings, name=double)`.
"""

from __future__ import annotations

from tokenspeed.testing.device import HashModelHandle, hash_continuation, hash_model
from tokenspeed.testing.doubles import HandClock, HandWakeup, RecordingLink, RecordingSink, ScriptedPlane, token_script
from tokenspeed.testing.mesh import memory_mesh
from tokenspeed.testing.storage import MemoryStore, ScriptedStorage

__all__ = [
    "HandClock",
    "HandWakeup",
    "HashModelHandle",
    "MemoryStore",
    "RecordingLink",
    "RecordingSink",
    "ScriptedPlane",
    "ScriptedStorage",
    "hash_continuation",
    "hash_model",
    "memory_mesh",
    "token_script",
]
