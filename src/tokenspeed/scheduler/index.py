"""What one cache group has findable: names to blocks and back.

With one full group and no host tier the index is a forest at all times: a name is in it only together
with the name it extends, because whoever references a block references the same blocks before it that
the index knows, and because a release gives the deepest block first, so that the pool's LRU evicts
leaves before what they extend. Elsewhere a block may outlive what it extends: a store to the host pins
it, a neighbour keeps its parent, a window has moved on; it is found again once what it extends is back.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

Entry: TypeAlias = tuple[int, bytes, bytes]
"""Block, name of what it extends, its tokens as little-endian int32; a plain tuple, since a round may make hundreds."""


@attrs.define(eq=False)
class IndexState:
    """Writer: GroupIndex. ``latest``: by name, the entry stored last of those that extend it.

    Entries of a prompt with an image are not in ``latest``: tokens alone do not tell what they hold.
    """

    entries: dict[bytes, Entry] = attrs.field(factory=dict[bytes, Entry])
    name_of: dict[int, bytes] = attrs.field(factory=dict[int, bytes])
    latest: dict[bytes, bytes] = attrs.field(factory=dict[bytes, bytes])


@attrs.frozen(kw_only=True, eq=False)
class GroupIndex:
    state: IndexState = attrs.field(factory=IndexState)

    def block(self, name: bytes) -> int | None:
        entry = self.state.entries.get(name)
        return None if entry is None else entry[0]

    def name(self, block: int) -> bytes | None:
        return self.state.name_of.get(block)

    def extending(self, parent: bytes) -> Entry | None:
        """The entry stored last of those that extend `parent`; the others are not looked for."""
        name = self.state.latest.get(parent)
        return None if name is None else self.state.entries[name]

    def following(self, parent: bytes, pages: bytes, width: int) -> list[bytes]:
        """Names of entries that hold `pages`, `width` bytes each, one behind the other and the first behind `parent`.

        As far as those stored last lead: there may be more, but these need no hashing.
        """
        latest, entries = self.state.latest, self.state.entries
        names: list[bytes] = []
        for begin in range(0, len(pages), width):
            name = latest.get(parent)
            if name is None or entries[name][2] != pages[begin : begin + width]:
                break
            names.append(name)
            parent = name
        return names

    def store(self, name: bytes, block: int, parent: bytes, tokens: bytes, *, text: bool) -> None:
        """`text`: no image lies in it."""
        state = self.state
        state.entries[name] = (block, parent, tokens)
        state.name_of[block] = name
        if text:
            state.latest[parent] = name

    def remove(self, block: int) -> tuple[bytes, bytes]:
        """`block` is not findable any more. Returns its name and the tokens it held."""
        state = self.state
        name = state.name_of.pop(block)
        _, parent, tokens = state.entries.pop(name)
        if state.latest.get(parent) == name:
            del state.latest[parent]
        return name, tokens

    def clear(self) -> None:
        self.state.entries.clear()
        self.state.name_of.clear()
        self.state.latest.clear()
