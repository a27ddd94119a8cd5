"""The debug form of the capture contract for a launched forward: frozen, compared, then poisoned (DP-51).

With TOKENSPEED_CAPTURE_CHECK=1 the arrays that a forward reads cannot be written from its launch on;
a digest of them at the launch is compared when the forward begins and when it has ended, which finds
edits through other views; and at the end they are overwritten with a number that is neither token,
position, block nor slot, so that whatever still reads them goes wrong at once and visibly. The latest
token of a slot is overwritten when its request leaves. Every forward also finds the requests that it
was launched for in their slots: the token of any other would reach a stranger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Protocol

import attrs
import numpy as np
import torch

from tokenspeed.device.backends.base import DeviceBuffer, HostArray, Job
from tokenspeed.device.capture import ENV_SWITCH
from tokenspeed.device.executors.prepare import Prepared
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import ForwardBatch, Seat

POISON = -0x5A5A5A5B
"""Fits int32 and int64, and is no valid token, position, offset, block or slot."""

READ_BY_LANDING = frozenset({"sampled", "sampled_positions"})
"""Fields of `Prepared` that outlive the forward: its result is made with them, by another thread."""


class Frozen(Protocol):
    """Inputs of one forward; called inside its jobs."""

    def begin(self) -> None:
        """Raises InvariantBroken: an input was changed since the launch."""
        ...

    def end(self, spent: tuple[torch.Tensor, ...] = ()) -> None:
        """Nobody reads the inputs any more, nor `spent`. Raises InvariantBroken: one was changed meanwhile."""
        ...


@attrs.frozen(eq=False)
class NotFrozen:
    def begin(self) -> None:
        return None

    def end(self, spent: tuple[torch.Tensor, ...] = ()) -> None:
        return None


@attrs.frozen(kw_only=True, eq=False)
class FrozenInputs:
    """`Frozen` by digests.

    Attributes:
        inputs: every array that the forward reads, with its name.
        writeable: those of them that could be written before the launch.
    """

    inputs: tuple[tuple[str, HostArray], ...]
    digests: tuple[int, ...]
    writeable: tuple[HostArray, ...]

    def begin(self) -> None:
        self._compare("between launch and begin")
        # torch takes no tensor of memory that cannot be written; nothing of it is written all the same.
        _let_write(self.writeable, allowed=True)

    def end(self, spent: tuple[torch.Tensor, ...] = ()) -> None:
        self._compare("while the forward ran")
        for name, array in self.inputs:
            if name not in READ_BY_LANDING:
                _let_write((array,), allowed=True)
                array.fill(POISON)
        _let_write(self.writeable, allowed=False)
        for tensor in spent:
            tensor.fill_(POISON)

    def _compare(self, when: str) -> None:
        pairs = zip(self.inputs, self.digests, strict=True)
        changed = [name for (name, array), digest in pairs if _digest(array) != digest]
        if changed:
            raise InvariantBroken("an input of a launched forward was changed", inputs=changed, when=when)


def freeze(prepared: Prepared, ids: HostArray | None = None) -> FrozenInputs:
    """`ids`: input ids that are not those of `prepared`. No array of them can be written until the forward begins."""
    inputs = (*_inputs(prepared), *(() if ids is None or ids is prepared.token_ids else (("ids", ids),)))
    writeable = tuple(array for _, array in inputs if array.flags.writeable)
    _let_write(writeable, allowed=False)
    return FrozenInputs(inputs=inputs, digests=tuple(_digest(array) for _, array in inputs), writeable=writeable)


class LaunchCheck(Protocol):
    """Wraps the jobs that an executor submits; ``ts-forward`` calls it, in the order of submission."""

    def freeze(self, prepared: Prepared, ids: HostArray | None = None) -> Frozen:
        """For a forward of several jobs, the first of which begins and the last ends what is returned."""
        ...

    def forward(self, batch: ForwardBatch, prepared: Prepared, job: Job) -> Job:
        """`job` runs `batch` and reads `prepared`. What is returned raises InvariantBroken where it runs."""
        ...

    def seats(self, seats: tuple[Seat, ...], job: Job) -> Job: ...

    def release(self, slots: tuple[int, ...], tokens: DeviceBuffer, job: Job) -> Job:
        """`tokens`: int64 ``[all slots]``, each one's latest token."""
        ...


@attrs.frozen(eq=False)
class Unchecked:
    """Costs nothing; for production."""

    def freeze(self, prepared: Prepared, ids: HostArray | None = None) -> Frozen:
        return NotFrozen()

    def forward(self, batch: ForwardBatch, prepared: Prepared, job: Job) -> Job:
        del batch, prepared
        return job

    def seats(self, seats: tuple[Seat, ...], job: Job) -> Job:
        del seats
        return job

    def release(self, slots: tuple[int, ...], tokens: DeviceBuffer, job: Job) -> Job:
        del slots, tokens
        return job


@attrs.define(eq=False)
class Seated:
    """Writer: jobs of the exec stream. The request-table row in each slot, as of the stream's time."""

    rows: dict[int, int] = attrs.field(factory=dict[int, int])


@attrs.frozen(eq=False)
class CheckedLaunches:
    """`LaunchCheck` of one executor."""

    seated: Seated = attrs.field(factory=Seated)

    def freeze(self, prepared: Prepared, ids: HostArray | None = None) -> Frozen:
        return freeze(prepared, ids)

    def forward(self, batch: ForwardBatch, prepared: Prepared, job: Job) -> Job:
        frozen = freeze(prepared)

        def checked() -> None:
            self._owned(batch)
            frozen.begin()
            job()
            frozen.end()

        return checked

    def seats(self, seats: tuple[Seat, ...], job: Job) -> Job:
        def checked() -> None:
            self.seated.rows.update({seat.slot: seat.row for seat in seats})
            job()

        return checked

    def release(self, slots: tuple[int, ...], tokens: DeviceBuffer, job: Job) -> Job:
        def checked() -> None:
            job()
            latest = tokens.unwrap(slots)
            for slot in slots:
                self.seated.rows.pop(slot, None)
                latest[slot] = POISON

        return checked

    def _owned(self, batch: ForwardBatch) -> None:
        for row, slot in zip(batch.rows.tolist(), batch.slots.tolist(), strict=True):
            if self.seated.rows.get(slot) != row:
                raise InvariantBroken(
                    "a late forward: its request has left the slot that it would write to",
                    row=row,
                    slot=slot,
                    seated=self.seated.rows.get(slot),
                )


def launch_check(environ: Mapping[str, str] | None = None) -> LaunchCheck:
    """`CheckedLaunches` where the environment (None: this process's) has TOKENSPEED_CAPTURE_CHECK=1."""
    asked = (os.environ if environ is None else environ).get(ENV_SWITCH)
    return CheckedLaunches() if asked == "1" else Unchecked()


def _inputs(prepared: Prepared) -> Iterator[tuple[str, HostArray]]:
    """Every array below `prepared`, by name."""
    for field in attrs.fields(Prepared):
        value = getattr(prepared, field.name)
        if isinstance(value, np.ndarray):
            yield field.name, value
        elif isinstance(value, tuple):
            yield from ((f"{field.name}[{i}]", array) for i, array in enumerate(value))
    if prepared.logprobs is not None:
        yield "logprobs.among", prepared.logprobs.among
    if prepared.prompt is not None:
        yield "prompt.targets", prepared.prompt.targets


def _digest(array: HostArray) -> int:
    return hash(array.tobytes())


def _let_write(arrays: tuple[HostArray, ...], *, allowed: bool) -> None:
    for array in arrays:
        array.flags.writeable = allowed
