"""Which rows of a batch must return log-probabilities: derived from what their requests asked for."""

from __future__ import annotations

import numpy as np

from tokenspeed.plane.plan import ForwardBatch, LogprobPlan
from tokenspeed.plane.table import RequestTable

NO_LOGPROBS = LogprobPlan()


def logprob_plan(table: RequestTable, batch: ForwardBatch) -> LogprobPlan:
    """The plan for `batch` (OL-4); :data:`NO_LOGPROBS` itself if it asks for nothing and never will.

    A prompt is told of once: a recomputation after a retraction is not news.
    """
    identity, rows = table.identity, batch.rows
    wanted, start = identity.logprobs[rows], identity.prompt_from[rows]
    if wanted.max(initial=-1) < 0 and start.max(initial=-1) < 0:
        return NO_LOGPROBS
    chosen = np.flatnonzero((wanted >= 0) & batch.samples)
    sampled = tuple(zip(chosen.tolist(), wanted[chosen].tolist(), strict=True))
    # Logits at position p predict token p + 1; a chunk of `counts` predicts that many positions.
    first = np.maximum(start, batch.starts + 1)
    last = np.minimum(batch.starts + batch.counts + 1, identity.prompt_len[rows])
    untold = table.tokens.known[rows] == identity.prompt_len[rows]
    chosen = np.flatnonzero((start >= 0) & (first < last) & untold)
    tops = np.maximum(wanted, 0)
    spans = zip(rows[chosen].tolist(), first[chosen].tolist(), last[chosen].tolist(), strict=True)
    return LogprobPlan(
        sampled=sampled,
        prompt=tuple(zip(chosen.tolist(), first[chosen].tolist(), tops[chosen].tolist(), strict=True)),
        prompt_targets=tuple(tuple(table.tokens_of(row)[low:high].tolist()) for row, low, high in spans),
    )
