"""What the host tier holds, as plain values, and the rules that must hold between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.scheduler.host.images import Images
from tokenspeed.scheduler.host.operations import Load, Store
from tokenspeed.scheduler.host.snapshots import NO_ROW, SnapshotImages
from tokenspeed.scheduler.host.tier import HostTier
from tokenspeed.scheduler.states import OWNS, Owned, State
from tokenspeed.scheduler.storage import Storage
from tokenspeed.scheduler.tier import Tier


@attrs.frozen(kw_only=True, eq=False)
class HostGroupSnapshot:
    """One cache group of the host tier, copied.

    Attributes:
        references: by block, pinned ones only.
        pinned: blocks, once for each operation, image or storage transaction that needs them.
        idle: blocks nobody needs, next to make room first.
        named: block by name, written or being written.
        findable: block by name.
    """

    references: Mapping[int, int]
    pinned: tuple[int, ...]
    idle: tuple[int, ...]
    named: Mapping[bytes, int]
    findable: Mapping[bytes, int]


@attrs.frozen(kw_only=True, eq=False)
class HostSnapshot:
    """Attributes:
    device_pins: by group, device blocks that open operations read or write, once for each.
    images: rows by place of the snapshot pool, NO_ROW where only an operation still uses it.
    free_images: places.
    suspended: rows whose turn to come back is next first.
    """

    groups: tuple[HostGroupSnapshot, ...] = ()
    device_pins: tuple[tuple[int, ...], ...]
    images: Mapping[int, int] = attrs.field(factory=dict[int, int])
    free_images: tuple[int, ...] = ()
    suspended: tuple[int, ...] = ()


def host_snapshot(tier: Tier, images: Images, storage: Storage, groups: int) -> HostSnapshot:
    if not isinstance(tier, HostTier):
        return HostSnapshot(device_pins=((),) * groups)
    device: list[list[int]] = [[] for _ in range(groups)]
    host: list[list[int]] = [[] for _ in range(groups)]
    for work in tier.operations.works():
        if isinstance(work, Store | Load):
            host[work.group].extend(work.host_blocks.tolist())
            if isinstance(work, Load) or not work.ordered:
                device[work.group].extend(work.device_blocks.tolist())
    for number, block in storage.pins():
        host[number].append(block)
    rows: dict[int, int] = {}
    free: tuple[int, ...] = ()
    suspended: tuple[int, ...] = ()
    if isinstance(images, SnapshotImages):
        free, suspended = tuple(images.state.free), tuple(images.state.queue)
        for place, image in images.state.images.items():
            rows[place] = image.row
            if image.row != NO_ROW:
                for group, imaged in enumerate(image.groups):
                    host[group].extend(imaged.host_blocks.tolist())
    held, findable = tier.host.pool.contents(), tier.host.contents()
    return HostSnapshot(
        groups=tuple(
            HostGroupSnapshot(
                references=held.references[group],
                pinned=tuple(host[group]),
                idle=held.idle[group],
                named=dict(lane.block_of),
                findable=findable[group],
            )
            for group, lane in enumerate(tier.host.lanes)
        ),
        device_pins=tuple(tuple(blocks) for blocks in device),
        images=rows,
        free_images=free,
        suspended=suspended,
    )


def audit_host(snapshot: HostSnapshot, states: Mapping[int, State], places: int) -> None:
    """Raises: InvariantBroken: pins, names, images and states do not fit each other."""
    for number, group in enumerate(snapshot.groups):
        if Counter(group.pinned) != Counter(group.references):
            raise InvariantBroken("host pins", group=number, counted=dict(Counter(group.pinned)), kept=group.references)
        blocks = list(group.named.values())
        if len(set(blocks)) != len(blocks) or not set(blocks) <= {*group.references, *group.idle}:
            raise InvariantBroken("names of host blocks", group=number, named=sorted(blocks))
        if not set(group.idle) <= set(group.findable.values()):
            raise InvariantBroken("an idle host block that nobody finds", group=number, idle=group.idle)
    imaged = {row for row, state in states.items() if Owned.IMAGE in OWNS[state]}
    owners = [row for row in snapshot.images.values() if row != NO_ROW]
    if sorted(owners) != sorted(imaged):
        raise InvariantBroken("images and the states that own one", images=dict(snapshot.images), rows=sorted(imaged))
    away = {row for row in imaged if Owned.SLOT not in OWNS[states[row]]}
    if set(snapshot.suspended) != away:
        raise InvariantBroken("who comes back", queue=snapshot.suspended, suspended=sorted(away))
    if snapshot.groups and sorted([*snapshot.images, *snapshot.free_images]) not in ([], list(range(places))):
        raise InvariantBroken("places of the snapshot pool", images=sorted(snapshot.images), free=snapshot.free_images)
