"""Token masks of constrained rows: the one fill, for both paths (GR-6).

On the eager path the forward thread fills before it launches the forward. On the capturable path the
forward fills itself, between model and sampler, and its matchers have accepted the tokens when it ends;
on the CPU that is the job of the exec stream, in place of an accelerator's host node.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from tokenspeed.device.sampling.base import TokenMasks
from tokenspeed.plane.grammar import GrammarMatchers, GrammarPlan, MatcherState
from tokenspeed.plane.table import Int64Array


@attrs.frozen(kw_only=True)
class GrammarEnds:
    """Batch indices by what became of their grammars, see `MatcherState`."""

    ends: tuple[int, ...] = ()
    faults: tuple[int, ...] = ()
    costly: tuple[int, ...] = ()


NO_ENDS = GrammarEnds()


@attrs.frozen(eq=False)
class Filler:
    """Stateless; whoever runs the path's fill calls it."""

    matchers: GrammarMatchers

    def fill(self, plan: GrammarPlan, sampled: Int64Array) -> TokenMasks | None:
        """Masks of the plan's rows; None: it has none.

        Args:
            sampled: int64 ``[s]``, batch indices of the rows that are sampled.
        """
        if not plan.rows:
            return None
        for row in plan.rows:
            if row.known is not None:
                self.matchers.bring(row.handle, row.known)
        words = np.empty((len(plan.rows), self.matchers.words), dtype=np.int32)
        self.matchers.fill(plan.rows, words)
        indices = np.array([row.index for row in plan.rows], dtype=np.int64)
        return TokenMasks(rows=np.searchsorted(sampled, indices), words=words)

    def accept(self, plan: GrammarPlan, masks: TokenMasks, tokens: torch.Tensor, nan: torch.Tensor) -> GrammarEnds:
        """The capturable path's other half.

        Args:
            tokens: int64 ``[s]``, of all sampled rows, in host memory.
            nan: bool ``[s]``, likewise.
        """
        ids, wrong = np.asarray(tokens), np.asarray(nan)
        places = masks.rows.tolist()
        drawn = [(row, int(ids[at])) for row, at in zip(plan.rows, places, strict=True) if not wrong[at]]
        states = self.matchers.accept([row.handle for row, _ in drawn], [token for _, token in drawn])
        where = [(row.index, state) for (row, _), state in zip(drawn, states, strict=True)]
        return GrammarEnds(
            ends=tuple(index for index, state in where if state is MatcherState.ENDED),
            faults=tuple(index for index, state in where if state is MatcherState.REFUSED),
            costly=tuple(index for index, state in where if state is MatcherState.COSTLY),
        )
