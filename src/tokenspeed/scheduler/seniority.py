"""When each request was first admitted, and whether it has been a victim."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class SeniorityState:
    """Writer: Seniority. Entries live from the first admission to the drop."""

    stamps: dict[int, int] = attrs.field(factory=dict[int, int])
    retracted: set[int] = attrs.field(factory=set[int])
    last: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Seniority:
    state: SeniorityState = attrs.field(factory=SeniorityState)

    def note_admitted(self, row: int) -> None:
        """Later admissions of the same request keep its first date."""
        if row not in self.state.stamps:
            self.state.last += 1
            self.state.stamps[row] = self.state.last

    def note_retracted(self, row: int) -> None:
        self.state.retracted.add(row)

    def forget(self, row: int) -> None:
        self.state.stamps.pop(row, None)
        self.state.retracted.discard(row)

    def admitted(self, row: int) -> int:
        return self.state.stamps[row]

    def as_victim(self, row: int) -> tuple[bool, int]:
        """The largest gives way first."""
        return row not in self.state.retracted, self.state.stamps[row]

    def was_retracted(self, row: int) -> bool:
        return row in self.state.retracted
