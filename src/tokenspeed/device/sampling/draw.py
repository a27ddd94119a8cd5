"""Draw tokens from probabilities cut down by top-k and top-p, without sorting the vocabulary.

What a row draws is a function of that row alone: which other rows are in the batch, or how many
candidates were looked at, does not change it, not even in the last bit. So sums run in a fixed order
(``cumsum``, and ``softmax`` along the last dimension), kept sets are decided by comparing values, and
the number drawn is looked up in the order of token ids.
"""

from __future__ import annotations

import torch

CANDIDATES = (128, 1024)
"""How many of the likeliest tokens are looked at, first try and second; then the whole row is sorted."""


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token at which the running sum of probabilities exceeds the uniform number's share.

    Args:
        probs: float32 ``[m, vocab]``; any sum above 0.
        uniforms: float64 ``[m]`` in ``[0, 1)``.
    Returns: int64 ``[m]``; never a token of probability 0.
    """
    sums = probs.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    # The product may round up to the total, which no sum exceeds.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)[:, 0]


def draw_top(probs: torch.Tensor, uniforms: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Draw from each row's `top_k` likeliest tokens, of these from the smallest set of mass `top_p`.

    Tokens as likely as the least likely one kept are kept too. The mass is that of what `top_k` left.

    Args:
        probs: float32 ``[m, vocab]``, each row a softmax.
        uniforms: float64 ``[m]`` in ``[0, 1)``.
        top_k: int64 ``[m]``; 0: all.
        top_p: float64 ``[m]`` in ``(0, 1]``.
    Returns: int64 ``[m]``.
    """
    vocab = probs.shape[1]
    tokens = torch.zeros(len(probs), dtype=torch.int64)
    rows = torch.arange(len(probs))
    for width in (*(count for count in CANDIDATES if count < vocab), vocab):
        values, ids = probs[rows].topk(width, dim=-1)
        kept, complete = _kept(values, top_k[rows], top_p[rows], whole=width == vocab)
        done = rows[complete]
        tokens[done] = _draw_kept(values[complete], ids[complete], kept[complete], uniforms[done], vocab)
        rows = rows[~complete]
        if not len(rows):
            break
    return tokens


def _kept(
    values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the likeliest tokens are kept, and in which rows nothing else would be.

    Args:
        values: float32 ``[m, width]``, descending.
    Returns: bool ``[m, width]``; bool ``[m]``.
    """
    ranks = torch.arange(values.shape[1])
    limited = top_k > 0
    among = ~limited[:, None] | (ranks < top_k[:, None])
    sums = (values * among).cumsum(dim=-1, dtype=torch.float64)
    mass = torch.where(limited, sums[:, -1], 1.0) * top_p
    wanted = among & ((sums - values < mass[:, None]) | (top_p[:, None] >= 1.0) | (ranks == 0))
    least = values.gather(1, wanted.sum(dim=-1, keepdim=True) - 1)
    seen = ~limited | (top_k <= values.shape[1])
    last = values[:, -1]
    complete = (seen & ((last < least[:, 0]) | (last == 0.0))) | whole
    return values >= least, complete


def _draw_kept(
    values: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, uniforms: torch.Tensor, vocab: int
) -> torch.Tensor:
    width = int(kept.sum(dim=-1).max()) if len(kept) else 1
    by_id, order = ids[:, :width].masked_fill(~kept[:, :width], vocab).sort(dim=-1)
    probs = (values * kept)[:, :width].gather(1, order)
    return by_id.gather(1, draw(probs, uniforms)[:, None])[:, 0]
