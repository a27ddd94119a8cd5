"""Retraction images: a victim's KV and state on the host, from where it resumes without computing them again.

An image has two parts. Pages with a name are kept in the host tier, where other requests may find them
too; the rest, the *tail*, is kept in the snapshot pool with the slot's state. Both are stored
stream-ordered, so that the victim's blocks and slot are free in the very plan that stores them. A
suspended request waits until all of it is there (SP-44), then comes back, first in first out, ahead of
requests that never ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import GroupBlocks, HostPages, int32
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.groups import Group
from tokenspeed.scheduler.hits import NOWHERE, GroupHit, Hit
from tokenspeed.scheduler.host.images import no_image
from tokenspeed.scheduler.host.operations import Restore, Snapshot, Store, Work
from tokenspeed.scheduler.host.tier import HostTier
from tokenspeed.scheduler.prefix import PrefixCache
from tokenspeed.scheduler.residents import Residents

NO_IMAGE = -1
NO_ROW = -1


@attrs.frozen(kw_only=True, eq=False)
class ImagedGroup:
    """Attributes:
    first: table index of the first block.
    names: of the whole blocks from there on.
    host_blocks: int32 ``[len(names)]``, pinned.
    tail: count of blocks behind those.
    """

    first: int
    names: tuple[bytes, ...]
    host_blocks: Int32Array
    tail: int


@attrs.define(eq=False)
class Image:
    """One place of the snapshot pool in use. Writer: SnapshotImages.

    Attributes:
        row: whose; NO_ROW: of nobody any more, but an operation still uses the place.
        tokens: computed ones.
        snapped: the tail and the slot's state are there.
    """

    row: int
    tokens: int
    groups: tuple[ImagedGroup, ...]
    snapped: bool = False


@attrs.define(eq=False)
class ImagesState:
    """Writer: SnapshotImages.

    Attributes:
        free: places.
        images: by place.
        place_of: by row.
        queue: suspended rows, the first to be retracted first.
    """

    free: list[int]
    images: dict[int, Image] = attrs.field(factory=dict[int, Image])
    place_of: dict[int, int] = attrs.field(factory=dict[int, int])
    queue: deque[int] = attrs.field(factory=deque[int])


@attrs.define(eq=False)
class _Pages:
    """Collects what a restore reads from the host tier. Meets `residents.Loads`."""

    pages: list[HostPages] = attrs.field(factory=list[HostPages])

    def load(self, group: int, host_blocks: Int32Array, device_blocks: Int32Array) -> None:
        self.pages.append(
            HostPages(group=group, host_blocks=tuple(host_blocks.tolist()), device_blocks=tuple(device_blocks.tolist()))
        )


@attrs.frozen(kw_only=True, eq=False)
class SnapshotImages:
    specs: tuple[CacheGroupSpec, ...]
    groups: tuple[Group, ...]
    table: RequestTable
    residents: Residents
    cache: PrefixCache
    tier: HostTier
    state: ImagesState

    @property
    def held(self) -> int:
        return len(self.state.images)

    def possible(self, row: int) -> bool:
        schedule = self.table.schedule
        known = min(int(schedule.scheduled[row]), int(self.table.tokens.known[row]))
        return self._survey(row, known) is not None

    def store(self, row: int) -> bool:
        tokens, slot = int(self.table.schedule.scheduled[row]), int(self.table.schedule.slot[row])
        surveyed = self._survey(row, tokens)
        if surveyed is None or self._being_filled(slot, tokens):
            return False
        self._store_pages(slot, surveyed)
        place = self.state.free.pop()
        self.state.images[place] = Image(row=row, tokens=tokens, groups=surveyed)
        self.state.place_of[row] = place
        self.state.queue.append(row)
        self.tier.operations.add(Snapshot(slot=slot, tail=self._tail(slot, surveyed), image=place))
        return True

    def waiting(self) -> int | None:
        return self.state.queue[0] if self.state.queue else None

    def ready(self, row: int) -> bool:
        image = self._image(row)
        host = self.tier.host
        return image.snapped and all(
            host.all_written(group, imaged.host_blocks) for group, imaged in enumerate(image.groups)
        )

    def hit(self, row: int, *, device: bool = True) -> Hit:
        image = self._image(row)
        return Hit(
            tokens=image.tokens,
            groups=tuple(self._found(group, imaged, device=device) for group, imaged in enumerate(image.groups)),
        )

    def restore(self, row: int, hit: Hit, *, goal: int, limit: int, cover: int) -> None:
        image, pages = self._image(row), _Pages()
        slot = self.residents.seat(row, hit, pages, goal=goal, limit=limit, cover=cover)
        tail = tuple(
            GroupBlocks(group=number, blocks=tuple(self.residents.append(number, slot, imaged.tail).tolist()))
            for number, imaged in enumerate(image.groups)
            if imaged.tail
        )
        self.state.queue.remove(row)
        self.tier.operations.add(
            Restore(slot=slot, pages=tuple(pages.pages), tail=tail, image=self.state.place_of[row])
        )

    def settled(self, works: Sequence[Work]) -> tuple[int, ...]:
        restored: list[int] = []
        for work in works:
            if isinstance(work, Snapshot):
                image = self.state.images[work.image]
                image.snapped = True
                if image.row == NO_ROW:
                    self._free(work.image)
            elif isinstance(work, Restore):
                row = self.state.images[work.image].row
                restored.append(row)
                self.discard(row)
        return tuple(restored)

    def discard(self, row: int) -> None:
        image, place = self._image(row), self.state.place_of.pop(row)
        for group, imaged in enumerate(image.groups):
            # Stores under way have pins of their own.
            self.tier.host.unpin(group, imaged.host_blocks)
        if row in self.state.queue:
            self.state.queue.remove(row)
        if image.snapped:
            self._free(place)
        else:
            image.row = NO_ROW

    def _image(self, row: int) -> Image:
        place = self.state.place_of.get(row, NO_IMAGE)
        if place == NO_IMAGE:
            raise no_image(row)
        return self.state.images[place]

    def _free(self, place: int) -> None:
        del self.state.images[place]
        self.state.free.append(place)

    def _survey(self, row: int, tokens: int) -> tuple[ImagedGroup, ...] | None:
        """What an image of the row's first `tokens` tokens consists of; None: there is no room for it.

        Host blocks are those that have a page already, or are getting it, else NOWHERE.
        """
        if not self.state.free or not tokens:
            return None
        slot = int(self.table.schedule.slot[row])
        surveyed = tuple(self._survey_group(group, row, slot, tokens) for group in self.groups)
        want, have = [], []
        for imaged, spec, group in zip(surveyed, self.specs, self.groups, strict=True):
            whole = tokens // group.block_tokens - imaged.first if group.by_position else 0
            if imaged.tail > spec.image_blocks or len(imaged.names) < whole:
                return None
            known = imaged.host_blocks[imaged.host_blocks != NOWHERE]
            if not all(self.tier.host.keeps(group.number, block) for block in known.tolist()):
                return None  # storage is filling one of them, which may fail
            want.append(len(imaged.names) - len(known))
            have.append(known)
        return surveyed if self.tier.host.pool.fits(want, have) else None

    def _survey_group(self, group: Group, row: int, slot: int, tokens: int) -> ImagedGroup:
        if not group.by_position:
            return ImagedGroup(first=0, names=(), host_blocks=int32(()), tail=1)
        first = max(int(self.residents.state.groups[group.number].first[slot]), group.first_seen(tokens))
        whole = tokens // group.block_tokens
        names = tuple(self.cache.names(row, group.number, tokens=tokens)[first:])
        held = [self.tier.host.holds(group.number, name) for name in names]
        return ImagedGroup(
            first=first,
            names=names,
            host_blocks=np.array([NOWHERE if block is None else block for block in held], dtype=np.int32),
            tail=group.blocks_for(tokens) - max(whole, first),
        )

    def _being_filled(self, slot: int, tokens: int) -> bool:
        """Whether a load may still write blocks of `slot`. A store waits for no load, but for forwards that did."""
        return tokens < self.residents.state.goal[slot] and any(
            self.tier.is_loading(group, tables.blocks[slot, int(tables.first[slot]) : int(tables.held[slot])])
            for group, tables in enumerate(self.residents.state.groups)
        )

    def _store_pages(self, slot: int, surveyed: tuple[ImagedGroup, ...]) -> None:
        """Pin the host blocks of all pages, in place; store those that are not there yet."""
        host = self.tier.host
        for group, imaged in enumerate(surveyed):
            host.pin(group, imaged.host_blocks[imaged.host_blocks != NOWHERE])
        lacking = [(imaged.host_blocks == NOWHERE).nonzero()[0] for imaged in surveyed]
        # Promised first: what one group takes must not be what another was said to get.
        for group, missing in enumerate(lacking):
            host.pool.promise(group, len(missing))
        for group, (imaged, missing) in enumerate(zip(surveyed, lacking, strict=True)):
            host.pool.redeem(group, len(missing))
            if not len(missing):
                continue
            got = host.reserve(group, [imaged.names[at] for at in missing.tolist()], certain=True)
            if len(got) < len(missing):
                raise InvariantBroken("host room for an image vanished", group=group, wanted=len(missing))
            host.pin(group, got)
            imaged.host_blocks[missing] = got
            table = self.residents.state.groups[group].blocks
            self.tier.operations.add(
                Store(
                    group=group,
                    device_blocks=int32(table[slot, imaged.first + missing]),
                    host_blocks=int32(got),
                    ordered=True,
                )
            )

    def _tail(self, slot: int, surveyed: tuple[ImagedGroup, ...]) -> tuple[GroupBlocks, ...]:
        tail = []
        for number, imaged in enumerate(surveyed):
            if imaged.tail:
                begin = imaged.first + len(imaged.names)
                blocks = self.residents.state.groups[number].blocks[slot, begin : begin + imaged.tail].tolist()
                # Stores come before the plan's copies, and it may just have moved the state.
                sources = tuple(self.residents.source_of(number, block) for block in blocks)
                tail.append(GroupBlocks(group=number, blocks=sources))
        return tuple(tail)

    def _found(self, group: int, imaged: ImagedGroup, *, device: bool) -> GroupHit:
        found: Int32Array = np.full(len(imaged.names), NOWHERE, dtype=np.int32)
        if device:
            blocks = [self.cache.block(group, name) for name in imaged.names]
            found[:] = [NOWHERE if block is None else block for block in blocks]
        return GroupHit(
            first=imaged.first, device=found, host=np.where(found == NOWHERE, imaged.host_blocks, np.int32(NOWHERE))
        )


def snapshot_images(
    places: int,
    *,
    specs: tuple[CacheGroupSpec, ...],
    groups: tuple[Group, ...],
    table: RequestTable,
    residents: Residents,
    cache: PrefixCache,
    tier: HostTier,
) -> SnapshotImages:
    """`places`: of the snapshot pool."""
    return SnapshotImages(
        specs=specs,
        groups=groups,
        table=table,
        residents=residents,
        cache=cache,
        tier=tier,
        state=ImagesState(free=list(range(places - 1, -1, -1))),
    )
