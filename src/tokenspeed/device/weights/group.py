"""Processes that broadcast weights to this one, over torch.distributed.

The group stands beside the process's default group, which need not exist. It is made the way trainers
of this family make theirs (a store at member 0, prefixed with the group's name), so that they meet.
"""

from __future__ import annotations

from datetime import timedelta

import attrs
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName, PrefixStore
from torch.distributed.rendezvous import rendezvous

from tokenspeed.errors import ModelError
from tokenspeed.plane.operations import GroupWeights, WeightsGroup

_DTYPES = ("float32", "float16", "bfloat16")


@attrs.frozen(kw_only=True, eq=False)
class OpenGroup:
    """A group this process is a member of."""

    told: WeightsGroup
    group: distributed.ProcessGroup


@attrs.define(eq=False)
class Groups:
    """Writer: UpdateGroups. By name."""

    open: dict[str, OpenGroup] = attrs.field(factory=dict[str, OpenGroup])


@attrs.frozen(kw_only=True, eq=False)
class UpdateGroups:
    """``ts-forward`` only. Everything here waits for other processes, each at most the group's time-out."""

    state: Groups = attrs.field(factory=Groups)

    def open(self, told: WeightsGroup) -> None:
        """Raises: ModelError: the name is taken, or the members did not meet in time."""
        if told.name in self.state.open:
            raise ModelError(f"group {told.name!r}: it exists already; destroy it first")
        limit = timedelta(seconds=told.timeout_s)
        try:
            found = next(rendezvous(f"tcp://{told.address}", told.rank, told.size, timeout=limit))
            store = PrefixStore(told.name, found[0])
            group, _ = distributed_c10d._new_process_group_helper(
                told.size,
                told.rank,
                [],
                distributed.Backend(told.backend),
                store,
                group_name=GroupName(told.name),
                timeout=limit,
            )
        except (RuntimeError, ValueError) as fault:
            raise ModelError(f"group {told.name!r} at {told.address}: {_first_line(fault)}") from fault
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(told.size)}
        self.state.open[told.name] = OpenGroup(told=told, group=group)

    def close(self, name: str) -> None:
        """Raises: ModelError: there is no such group."""
        self._named(name)
        distributed.destroy_process_group(self.state.open.pop(name).group)

    def close_all(self) -> None:
        for name in tuple(self.state.open):
            self.close(name)

    def receive(self, source: GroupWeights) -> dict[str, torch.Tensor]:
        """The tensors, by name, as member 0 broadcasts them.

        Raises: ModelError: there is no such group, the description is faulty, or member 0 did not send in time.
        """
        group = self._named(source.group)
        received: dict[str, torch.Tensor] = {}
        for name, kind, shape in zip(source.names, source.dtypes, source.shapes, strict=True):
            if kind not in _DTYPES:
                raise ModelError(f"tensor {name}: dtype {kind!r} is not one of {', '.join(_DTYPES)}")
            received[name] = torch.empty(shape, dtype=getattr(torch, kind))
        for name, tensor in received.items():
            try:
                distributed.broadcast(tensor, src=0, group=group.group)
            except RuntimeError as fault:
                text = f"tensor {name}: not received from group {source.group!r}: {_first_line(fault)}"
                raise ModelError(text) from fault
        return received

    def _named(self, name: str) -> OpenGroup:
        found = self.state.open.get(name)
        if found is None:
            there = ", ".join(self.state.open) or "none"
            raise ModelError(f"group {name!r}: there is no such group; open: {there}")
        return found


def _first_line(fault: Exception) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0]
