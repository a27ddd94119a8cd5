"""Parts of an output as a row of blocks that open, grow and close: how newer APIs tell a stream."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import attrs

from tokenspeed.frontend.text.output.parts import Part, PartKind


class StepKind(enum.Enum):
    """What happens to a block."""

    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


@attrs.define(eq=False)
class Block:
    """One stretch of text or reasoning, or one call. Writer: its BlockRow.

    Attributes:
        text: so far; of a call, its arguments' JSON.
        name: of the function that a call calls.
        ident: what the API calls the block.
    """

    kind: PartKind
    index: int
    ident: str
    name: str = ""
    text: str = ""


@attrs.frozen
class Step:
    """`text`: what a block grew by."""

    kind: StepKind
    block: Block
    text: str = ""


@attrs.define(eq=False)
class BlockRow:
    """The blocks of one answer. Writer: the answer."""

    blocks: list[Block] = attrs.field(factory=list[Block])
    is_open: bool = False

    def take(self, part: Part, ident: str) -> Iterator[Step]:
        """What `part` does.

        Args:
            ident: for the block, if it begins one.
        """
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        current = self.blocks[-1] if self.is_open else None
        if current is None or current.kind is not kind or part.kind is PartKind.CALL:
            yield from self.close()
            name = part.text if part.kind is PartKind.CALL else ""
            current = Block(kind=kind, index=len(self.blocks), ident=ident, name=name)
            self.blocks.append(current)
            self.is_open = True
            yield Step(StepKind.OPEN, current)
        if part.kind is not PartKind.CALL:
            current.text += part.text
            yield Step(StepKind.GROW, current, part.text)

    def close(self) -> Iterator[Step]:
        """The open block ends, if there is one."""
        if self.is_open:
            self.is_open = False
            yield Step(StepKind.CLOSE, self.blocks[-1])
