"""A model without weights: the next token is a hash of the whole context, read back from the paged pool.

The "KV" of a token is its id, kept in pages and found through the block tables that the executor
gathers. A wrong token, position, slot, grant, page reuse or order changes every later token, so that
comparing token streams is a strong check of everything around a model.
"""

from __future__ import annotations

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.sampling.base import SampledTokens, TokenMasks
from tokenspeed.device.step import LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockCopy, GroupBlocks, Seat
from tokenspeed.plane.table import Int64Array

NEVER_WRITTEN = -7
_BASE, _MODULUS, _START = 1_000_003, 2_147_483_629, 17


def hash_context(tokens: list[int]) -> int:
    """A polynomial hash of a context, equal on every machine."""
    value = _START
    for token in tokens:
        value = (value * _BASE + token + 1) % _MODULUS
    return value


@attrs.frozen(kw_only=True, eq=False)
class ToyPool:
    """Token ids in pages: int64 ``[num_pages, page_tokens]``, NEVER_WRITTEN where clean."""

    pages: torch.Tensor

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        self.pages[[copy.destination for copy in copies]] = self.pages[[copy.source for copy in copies]]

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        self.pages[[block for group in blocks for block in group.blocks]] = NEVER_WRITTEN

    def layer_bytes(self, group: int) -> torch.Tensor:
        return self.pages.view(torch.uint8)[:, None]


@attrs.frozen(kw_only=True, eq=False)
class ToyStep:
    """`ForwardStep` of the hash model.

    Logits have one clear maximum at ``hash % vocab`` and a fixed wave elsewhere, so that
    log-probabilities depend on the context too. A context that ends in a token of `nan_after` gives
    a row with a NaN.
    """

    pool: ToyPool
    vocab_size: int
    nan_after: frozenset[int] = frozenset()
    num_layers: int = 1

    @device_code
    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layers != range(self.num_layers) or hidden is not None:
            raise InvariantBroken("the toy model runs whole", layers=layers)
        ready.wait_for(0)
        page_tokens, contexts = self.pool.pages.shape[1], list[list[int]]()
        for i in range(len(rows.contexts)):
            first, end = int(rows.offsets[i]), int(rows.offsets[i + 1])
            at = torch.arange(int(rows.contexts[i]))
            blocks = rows.block_tables[i].long()[at // page_tokens]
            positions = rows.positions[first:end]
            self.pool.pages[blocks[positions], positions % page_tokens] = rows.token_ids[first:end]
            context = self.pool.pages[blocks, at % page_tokens].tolist()
            contexts.extend(context[: int(position) + 1] for position in positions)
        wanted = [contexts[int(token)] for token in rows.logit_tokens]
        return torch.stack([self._logits(context) for context in wanted]) if wanted else torch.zeros(0, self.vocab_size)

    def _logits(self, context: list[int]) -> torch.Tensor:
        value = hash_context(context)
        logits = torch.sin(torch.arange(self.vocab_size) * 0.7 + value % 1000)
        logits[value % self.vocab_size] = 5.0
        if context[-1] in self.nan_after:
            logits[self.vocab_size // 2] = torch.nan
        return logits


@attrs.frozen(kw_only=True, eq=False)
class ToyWeights:
    nbytes: int = 0


@attrs.frozen(kw_only=True, eq=False)
class ToyBound:
    step: ToyStep
    pool: ToyPool


@attrs.frozen(kw_only=True, eq=False)
class ToyModel:
    """`device.parts.ModelFactory` of the hash model; takes nothing of the checkpoint but its shape."""

    vocab_size: int
    nan_after: frozenset[int] = frozenset()

    def expected_bytes(self, config: ModelConfig) -> int:
        return 0

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        return (CacheGroup(block_tokens=page_tokens, layers=(0,), layer_bytes=8 * page_tokens),)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> ToyWeights:
        return ToyWeights()

    def bind(self, weights: object, *, num_pages: int, page_tokens: int) -> ToyBound:
        pool = ToyPool(pages=torch.full((num_pages, page_tokens), NEVER_WRITTEN))
        return ToyBound(step=ToyStep(pool=pool, vocab_size=self.vocab_size, nan_after=self.nan_after), pool=pool)


@attrs.define(eq=False)
class ToySampler:
    """Takes the likeliest token.

    Attributes:
        log: what it was told, in order: ("seat" | "release" | "sample", slot).
        positions: of the tokens it drew.
    """

    log: list[tuple[str, int]] = attrs.field(factory=list[tuple[str, int]])
    positions: list[int] = attrs.field(factory=list[int])

    def seat(self, seat: Seat) -> None:
        self.log.append(("seat", seat.slot))

    def release(self, slot: int) -> None:
        self.log.append(("release", slot))

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        self.log.extend(("sample", slot) for slot in slots.tolist())
        self.positions.extend(positions.tolist())
        return SampledTokens(tokens=logits.argmax(dim=1), nan=logits.isnan().any(dim=1))
