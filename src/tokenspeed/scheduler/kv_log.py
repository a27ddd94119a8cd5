"""Net changes of the prefix cache between two drains (KM-2).

Events are kept by block hash: a block removed and stored again leaves nothing, whatever happened in
between. Entries stay in the order of their last change; since a prefix is stored before and removed
after whatever extends it, a subscriber always knows the parent of a stored block.
"""

from __future__ import annotations

import struct
from itertools import groupby
from typing import Protocol, TypeAlias

import attrs

from tokenspeed.plane.results import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class KvLog(Protocol):
    """Takes single changes, gives events."""

    def stored(self, name: bytes, parent: bytes | None, tokens: bytes) -> None:
        """A block became findable; `tokens` are its ids as little-endian int32."""
        ...

    def removed(self, name: bytes) -> None: ...

    def cleared(self) -> None: ...

    def drain(self) -> tuple[KvEvent, ...]: ...


Stored: TypeAlias = tuple[bytes | None, bytes]
"""Parent and token bytes of a stored block; a plain tuple, since a round may make hundreds."""


@attrs.define(eq=False)
class LogState:
    """Writer: NetKvLog. None: removed."""

    changes: dict[bytes, Stored | None] = attrs.field(factory=dict[bytes, Stored | None])
    cleared: bool = False


@attrs.frozen(kw_only=True, eq=False)
class NetKvLog:
    block_tokens: int
    group: int = 0
    state: LogState = attrs.field(factory=LogState)

    def stored(self, name: bytes, parent: bytes | None, tokens: bytes) -> None:
        changes = self.state.changes
        if name in changes:
            del changes[name]  # it was removed since the last drain: no change in all
        else:
            changes[name] = (parent, tokens)

    def removed(self, name: bytes) -> None:
        changes = self.state.changes
        if name in changes:
            del changes[name]
        else:
            changes[name] = None

    def cleared(self) -> None:
        """What was said before is void; one event a drain, however often the cache was cleared."""
        self.state.changes.clear()
        self.state.cleared = True

    def drain(self) -> tuple[KvEvent, ...]:
        if not (self.state.changes or self.state.cleared):
            return ()
        events: list[KvEvent] = [AllBlocksCleared()] if self.state.cleared else []
        for is_removal, run in groupby(self.state.changes.items(), key=lambda change: change[1] is None):
            if is_removal:
                events.append(BlockRemoved(hashes=tuple(name for name, _ in run), group=self.group))
            else:
                events.extend(self._chains([(name, stored) for name, stored in run if stored is not None]))
        self.state.changes.clear()
        self.state.cleared = False
        return tuple(events)

    def _chains(self, run: list[tuple[bytes, Stored]]) -> list[KvEvent]:
        """One event for each stretch of blocks that follow each other."""
        events: list[KvEvent] = []
        begin = 0
        for at in range(1, len(run) + 1):
            if at < len(run) and run[at][1][0] == run[at - 1][0]:
                continue
            stretch = run[begin:at]
            tokens = b"".join([part for _, (_, part) in stretch])
            events.append(
                BlockStored(
                    hashes=tuple([name for name, _ in stretch]),
                    parent=stretch[0][1][0],
                    token_ids=struct.unpack(f"<{len(tokens) // 4}i", tokens),
                    block_tokens=self.block_tokens,
                    group=self.group,
                )
            )
            begin = at
        return events


@attrs.frozen(kw_only=True, eq=False)
class NullKvLog:
    """Nobody listens."""

    def stored(self, name: bytes, parent: bytes | None, tokens: bytes) -> None:
        return None

    def removed(self, name: bytes) -> None:
        return None

    def cleared(self) -> None:
        return None

    def drain(self) -> tuple[KvEvent, ...]:
        return ()
