"""The entries of the forward thread's queue: one class for each named operation, its arguments as plain values."""

from __future__ import annotations

import threading
from typing import Protocol, TypeAlias

import attrs

from tokenspeed.device.capture import NO_SEAL, Seal
from tokenspeed.plane.operations import WeightsGroup, WeightsSource
from tokenspeed.plane.plan import Dispatch, ExecutionPlan
from tokenspeed.plane.ports import DeviceHandle, Landing


@attrs.define(eq=False)
class Flight:
    """One queued plan. Writer: ``ts-forward``, which sets `landing` before `launched`.

    Attributes:
        seal: over plan and dispatch; written before they are queued.
    """

    launched: threading.Event = attrs.field(factory=threading.Event)
    landing: Landing | None = None
    seal: Seal = NO_SEAL


@attrs.define(eq=False)
class Reply:
    """The answer of an awaited operation. Writer: ``ts-forward``, which sets `value` before `done`."""

    done: threading.Event = attrs.field(factory=threading.Event)
    value: str = ""


# ---- nobody waits for these; a commit waits for a flight


@attrs.frozen(eq=False)
class Execute:
    plan: ExecutionPlan
    dispatch: Dispatch
    flight: Flight


@attrs.frozen(eq=False)
class Release:
    rows: tuple[int, ...]
    slots: tuple[int, ...]

    def perform(self, handle: DeviceHandle) -> None:
        handle.release(self.rows, self.slots)


@attrs.frozen(eq=False)
class NoteForwarded:
    def perform(self, handle: DeviceHandle) -> None:
        handle.note_forwarded()


@attrs.frozen(eq=False)
class Close:
    """The last entry of the queue."""


# ---- the caller waits for the answer


class Asked(Protocol):
    """An operation whose caller waits."""

    def perform(self, handle: DeviceHandle) -> str:
        """The answer, "" where there is none; called from ``ts-forward``."""
        ...


@attrs.frozen(eq=False)
class IdleForward:
    def perform(self, handle: DeviceHandle) -> str:
        handle.idle_forward()
        return ""


@attrs.frozen(eq=False)
class FlushCache:
    def perform(self, handle: DeviceHandle) -> str:
        handle.flush_cache()
        return ""


@attrs.frozen(eq=False)
class ReleaseMemory:
    tags: tuple[str, ...]

    def perform(self, handle: DeviceHandle) -> str:
        return handle.release_memory(self.tags)


@attrs.frozen(eq=False)
class ResumeMemory:
    tags: tuple[str, ...]
    restore: bool

    def perform(self, handle: DeviceHandle) -> str:
        return handle.resume_memory(self.tags, self.restore)


@attrs.frozen(eq=False)
class LoadWeights:
    source: WeightsSource

    def perform(self, handle: DeviceHandle) -> str:
        return handle.load_weights(self.source)


@attrs.frozen(eq=False)
class CommitWeights:
    accept: bool

    def perform(self, handle: DeviceHandle) -> str:
        return handle.commit_weights(self.accept)


@attrs.frozen(eq=False)
class OpenWeightsGroup:
    group: WeightsGroup

    def perform(self, handle: DeviceHandle) -> str:
        return handle.open_weights_group(self.group)


@attrs.frozen(eq=False)
class CloseWeightsGroup:
    name: str

    def perform(self, handle: DeviceHandle) -> str:
        return handle.close_weights_group(self.name)


@attrs.frozen(eq=False)
class StartProfile:
    path: str

    def perform(self, handle: DeviceHandle) -> str:
        return handle.start_profile(self.path)


@attrs.frozen(eq=False)
class StopProfile:
    def perform(self, handle: DeviceHandle) -> str:
        return handle.stop_profile()


@attrs.frozen(eq=False)
class ShutdownCache:
    def perform(self, handle: DeviceHandle) -> str:
        handle.shutdown_cache()
        return ""


@attrs.frozen(eq=False)
class Awaited:
    asked: Asked
    reply: Reply

    def perform(self, handle: DeviceHandle) -> None:
        self.reply.value = self.asked.perform(handle)


Operation: TypeAlias = Execute | Release | NoteForwarded | Awaited


def name_of(operation: Operation) -> str:
    """For people."""
    return type(operation.asked if isinstance(operation, Awaited) else operation).__name__


def is_per_round(operation: Operation) -> bool:
    """Whether it must not wait for the device. Of the awaited ones only the idle forward is part of a round."""
    return not isinstance(operation, Awaited) or isinstance(operation.asked, IdleForward)
