"""Grammar-constrained requests: queued until compiled, admitted when ready."""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.plan import ForwardBatch, GrammarAdvance


class GrammarQueue(Protocol):
    def refuses(self, sampling: SamplingParams) -> str:
        """Why this request's grammar cannot be served, or ""."""
        ...

    def queue(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Keep rows whose grammar must compile first; the rest is returned for submission."""
        ...

    def ready(self) -> tuple[int, ...]:
        """Rows whose grammar has compiled (RA-10)."""
        ...

    def needs_commit_first(self, batch: ForwardBatch) -> bool:
        """Whether filling this batch's masks reads matchers that only a pending commit advances."""
        ...

    def advances(self, batch: ForwardBatch) -> tuple[GrammarAdvance, ...]: ...


@attrs.frozen(kw_only=True, eq=False)
class NoGrammar:
    """Refuses every grammar by name; constrains nothing."""

    def refuses(self, sampling: SamplingParams) -> str:
        for kind in ("json_schema", "regex", "ebnf", "structural_tag"):
            if getattr(sampling, kind) is not None:
                return f"{kind}: constrained generation is not supported by this engine yet"
        return ""

    def queue(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return rows

    def ready(self) -> tuple[int, ...]:
        return ()

    def needs_commit_first(self, batch: ForwardBatch) -> bool:
        return False

    def advances(self, batch: ForwardBatch) -> tuple[GrammarAdvance, ...]:
        return ()
