"""Which pages fit which engine: the schema of its pages, and the namespace they are kept under.

A page may be used where the same tokens would compute the same bytes: the same weights, arithmetic, page
geometry and share of the model. All of that is in the namespace, so that what does not fit is not found.
"""

from __future__ import annotations

import hashlib
import json

import attrs

FORMAT = 1
"""Of pages and keys; another for each change that makes old pages unusable."""


@attrs.frozen(kw_only=True)
class GroupSchema:
    """One cache group's blocks; `layer_bytes` is one layer of one block."""

    name: str
    kind: str
    block_tokens: int
    window_tokens: int
    layers: int
    layer_bytes: int


@attrs.frozen(kw_only=True)
class PayloadFacts:
    """Everything but the weights that the bytes of a page depend on. Needs no device.

    Attributes:
        model: digest of the model's configuration.
        numerics: names the arithmetic: kernels, instruction set, formats of weights and KV.
        page_tokens: of the finest group: the step in which prefixes are named.
        rank, ranks: which share of each layer this rank holds.
        tenant: keeps deployments apart that share a store.
    """

    model: str
    numerics: str
    dtype: str
    page_tokens: int
    groups: tuple[GroupSchema, ...]
    rank: int = 0
    ranks: int = 1
    tenant: str = ""


def schema_of(facts: PayloadFacts) -> str:
    """The same for the same facts, on every machine and in every process."""
    return _digest("schema", FORMAT, attrs.asdict(facts))


def namespace_of(schema: str, weights: str) -> str:
    """Where pages of `schema` that were computed with `weights` are kept; hexadecimal."""
    return _digest("namespace", schema, weights)


def weights_over(weights: str, tensors: tuple[bytes, ...]) -> str:
    """The identity of `weights` after these tensors replaced some of them."""
    return _digest("tensors", weights, [hashlib.sha256(blob).hexdigest() for blob in tensors])


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
