"""Net changes of the prefix cache between two drains (KM-2).

Events are kept by block hash: a block removed and stored again leaves nothing, whatever happened in
between. Entries stay in the order of their last change. Where the index is a forest (see `index`), a
subscriber so knows the parent of every stored block.
"""

from __future__ import annotations

import struct
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


VOID: Stored = (None, b"")
"""A block stored and removed since the last drain: nothing to tell, but its place stays before what extends it."""


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
    block: struct.Struct = attrs.field(init=False)

    @block.default
    def _block(self) -> struct.Struct:
        return struct.Struct(f"<{self.block_tokens}i")

    def stored(self, name: bytes, parent: bytes | None, tokens: bytes) -> None:
        changes = self.state.changes
        if name in changes and changes[name] is None:
            del changes[name]  # it was removed since the last drain: no change in all
        else:
            changes[name] = (parent, tokens)

    def removed(self, name: bytes) -> None:
        changes = self.state.changes
        changes[name] = VOID if name in changes else None

    def cleared(self) -> None:
        """What was said before is void; one event a drain, however often the cache was cleared."""
        self.state.changes.clear()
        self.state.cleared = True

    def drain(self) -> tuple[KvEvent, ...]:
        state = self.state
        if not (state.changes or state.cleared):
            return ()
        events: list[KvEvent] = [AllBlocksCleared()] if state.cleared else []
        # A run of removals, or of blocks that follow each other, becomes one event.
        gone: list[bytes] = []
        names: list[bytes] = []
        tokens: list[bytes] = []
        parent: bytes | None = None
        for name, change in state.changes.items():
            if change is None:
                if names:
                    events.append(self._stored(names, tokens, parent))
                    names = []
                gone.append(name)
            elif change is not VOID:
                if gone:
                    events.append(BlockRemoved(hashes=tuple(gone), group=self.group))
                    gone.clear()
                before, data = change
                if names and before == names[-1]:
                    names.append(name)
                    tokens.append(data)
                    continue
                if names:
                    events.append(self._stored(names, tokens, parent))
                parent, names, tokens = before, [name], [data]
        if names:
            events.append(self._stored(names, tokens, parent))
        if gone:
            events.append(BlockRemoved(hashes=tuple(gone), group=self.group))
        state.changes.clear()
        state.cleared = False
        return tuple(events)

    def _stored(self, names: list[bytes], tokens: list[bytes], parent: bytes | None) -> KvEvent:
        ids = self.block.unpack(tokens[0]) if len(tokens) == 1 else _ids(b"".join(tokens))
        return BlockStored(tuple(names), parent, ids, self.block_tokens, self.group)


def _ids(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // 4}i", tokens)


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
