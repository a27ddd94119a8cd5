"""Linear attention by the gated delta rule: a state of one size in place of keys and values of every token.

Per head, with the state S as a matrix ``[key_dim, value_dim]`` that maps keys to values::

    S = decay * S
    S = S + k (write * (v - k S))     the value stored under k moves towards v by the share `write`
    o = q S

Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), equation 10, transposed;
the delta rule without decay is of Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch.nn import functional

from tokenspeed.device.host_sync import device_code


@attrs.frozen(kw_only=True, eq=False)
class DeltaInputs:
    """What the rule takes of `T` tokens, float32.

    Attributes:
        query, key: ``[T, heads, key_dim]``; keys have length 1.
        value: ``[T, heads, value_dim]``.
        decay, write: ``[T, heads]``, between 0 and 1.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    write: torch.Tensor


def decay_of(rate: torch.Tensor, log_scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """How much of the state a token keeps: ``exp(-exp(log_scale) * softplus(rate + bias))``.

    Args:
        rate: ``[T, heads]``; `log_scale` and `bias` are ``[heads]``.
    Source: Dao, Gu 2024, Mamba-2 (arXiv:2405.21060), the discretised scalar A.
    """
    return torch.exp(-torch.exp(log_scale) * functional.softplus(rate + bias))


@device_code
def advance(states: torch.Tensor, inputs: DeltaInputs, offsets: Sequence[int]) -> torch.Tensor:
    """Run the rule over each row's tokens in order.

    Token after token, all rows side by side; the sums of one token and head are of that token and
    head only. So neither the other rows nor where a sequence was cut into chunks matter.

    Args:
        states: ``[n, heads, key_dim, value_dim]``, those behind the token before each row's first;
            replaced by those behind its last.
        offsets: ``n + 1``; row i owns tokens ``offsets[i] : offsets[i + 1]``.
    Returns: ``[T, heads, value_dim]``.
    """
    counts = [last - first for first, last in itertools.pairwise(offsets)]
    longest_first = sorted(range(len(counts)), key=lambda row: -counts[row])
    order = torch.tensor(longest_first, dtype=torch.int64)
    firsts = torch.tensor(offsets[:-1], dtype=torch.int64)[order]
    current = states[order]
    out = torch.empty_like(inputs.value)
    for step in range(counts[longest_first[0]] if counts else 0):
        rows = sum(count > step for count in counts)
        tokens = firsts[:rows] + step
        out[tokens] = _token(current[:rows], inputs, tokens)
    states[order] = current
    return out


def _token(states: torch.Tensor, inputs: DeltaInputs, tokens: torch.Tensor) -> torch.Tensor:
    """One token of each row; `states` is advanced in place. Returns ``[rows, heads, value_dim]``."""
    key = inputs.key[tokens][..., None]
    states *= inputs.decay[tokens][..., None, None]
    known = (states * key).sum(dim=2)
    change = (inputs.value[tokens] - known) * inputs.write[tokens][..., None]
    states += key * change[:, :, None]
    return (states * inputs.query[tokens][..., None]).sum(dim=2)
