"""The simulated model: a token is a hash of its whole context, and costs what the timing model says.

The "KV" of a token is the hash of its sequence up to it, kept in pages and found through the block
tables: a wrong token, position, slot, grant, page reuse or order changes every later token. A row's
step reads one number of its context and not all of it, so that long contexts cost the host nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.attention.groups import attention_groups
from tokenspeed.device.backends.simulated import Work
from tokenspeed.device.backends.simulated_roofline import KV_BYTES, StepTime
from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kv.layout import STATE, CacheGroup
from tokenspeed.device.sampling.base import SampledTokens, TokenMasks
from tokenspeed.device.step import LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import BlockCopy, GroupBlocks, Seat
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array

BASE, MODULUS, START = 1_000_003, 2_147_483_629, 17
"""``hash(t1..tn) = ((START * BASE + t1 + 1) * BASE + t2 + 1) … mod MODULUS``, which is prime."""
SEED_STEP = 7_919
LIKELIEST_LOGPROB, OTHER_LOGPROB = -0.6931471805599453, -9.0


def start_of(seed: int) -> int:
    """The hash of an empty context; seed 0 gives `START`."""
    return (START + SEED_STEP * seed) % MODULUS


def powers(base: int, count: int) -> Int64Array:
    """``base ** 0 … base ** count`` modulo `MODULUS`."""
    table: Int64Array = np.ones(1, dtype=np.int64)
    while len(table) <= count:
        table = np.concatenate((table, table * pow(base, len(table), MODULUS) % MODULUS))
    return table[: count + 1]


@attrs.frozen(kw_only=True, eq=False)
class SimulatedPool:
    """Hashes by cache group, in blocks; memory is taken at the first write.

    Attributes:
        pages: of group 0, int64 ``[blocks, block_tokens]``.
        more: of groups 1, 2, …; of a state group ``[blocks, 1]``, the hash up to the latest token.
        states: numbers of the state groups.
    """

    pages: Int64Array
    more: tuple[Int64Array, ...] = ()
    states: frozenset[int] = frozenset()

    @property
    def groups(self) -> tuple[Int64Array, ...]:
        return (self.pages, *self.more)

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        groups = self.groups
        read = [groups[copy.group][copy.source].copy() for copy in copies]
        for copy, content in zip(copies, read, strict=True):
            groups[copy.group][copy.destination] = content

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        for group in blocks:
            self.groups[group.group][list(group.blocks)] = 0

    def layer_bytes(self, group: int) -> torch.Tensor:
        return torch.from_numpy(self.groups[group].view(np.uint8))[:, None]


@attrs.frozen(kw_only=True, eq=False)
class SimulatedStep:
    """`ForwardStep` of the hash. Its "logits" are int64 ``[m, 1]``: the one token of each row.

    Only `SimulatedSampler` and `SimulatedLogprobs` can read them.

    Attributes:
        forward, inverse: powers of the base and of its inverse, so that a chunk is hashed at once.
    """

    pool: SimulatedPool
    work: Work
    time: StepTime
    vocab_size: int
    start: int
    forward: Int64Array
    inverse: Int64Array
    num_layers: int = 1

    @device_code
    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layers != range(self.num_layers) or hidden is not None:
            raise InvariantBroken("the simulated model runs whole", layers=layers)
        ready.wait_for(0)
        offsets, contexts = rows.offsets.numpy(), rows.contexts.numpy()
        counts = np.diff(offsets)
        starts = contexts - counts
        self.work.charge(self.time.seconds(counts, starts))
        hashes = self._hash(rows, offsets, counts, starts)
        return torch.from_numpy(hashes[rows.logit_tokens.numpy()] % self.vocab_size)[:, None]

    def _hash(self, rows: RaggedRows, offsets: Int64Array, counts: Int64Array, starts: Int64Array) -> Int64Array:
        """The hash up to each token, int64 ``[T]``, written into the pool.

        With ``h[e] = BASE ** e * (h[0] + sum of (t[i] + 1) * BASE ** -i for i in 1..e)`` a chunk is one
        cumulative sum, in which rows follow each other and what came before is taken off again.
        """
        known = np.where(starts == 0, self.start, self._known(rows, starts))
        row = np.repeat(np.arange(len(counts)), counts)
        exponent = np.arange(1, len(row) + 1) - offsets[row]
        total = np.cumsum((rows.token_ids.numpy() + 1) * self.inverse[exponent] % MODULUS)
        earlier = np.concatenate((np.zeros(1, dtype=np.int64), total))[offsets[:-1]]
        hashes: Int64Array = self.forward[exponent] * ((known[row] + total - earlier[row]) % MODULUS) % MODULUS
        positions = rows.positions.numpy()
        for pages, table, state in self._tables(rows):
            if state:
                pages[table[:, 0], 0] = hashes[offsets[1:] - 1]
            else:
                block_tokens = pages.shape[1]
                pages[table[row, positions // block_tokens], positions % block_tokens] = hashes
        return hashes

    def _known(self, rows: RaggedRows, starts: Int64Array) -> Int64Array:
        """The hash up to the token before each row's first: every group's says the same, or the tokens go wrong."""
        before, at = np.maximum(starts - 1, 0), np.arange(len(starts))
        found = [
            pages[table[:, 0], 0] if state else pages[table[at, before // pages.shape[1]], before % pages.shape[1]]
            for pages, table, state in self._tables(rows)
        ]
        known: Int64Array = found[0] + sum((other - found[0] for other in found[1:]), np.zeros_like(found[0]))
        return known % MODULUS

    def _tables(self, rows: RaggedRows) -> Iterator[tuple[Int64Array, Int32Array, bool]]:
        """Blocks and block tables of each cache group, and whether it keeps states."""
        for number, (pages, table) in enumerate(zip(self.pool.groups, rows.group_tables, strict=True)):
            yield pages, table.numpy(), number in self.pool.states


@attrs.frozen(kw_only=True, eq=False)
class SimulatedWeights:
    """The size of weights that nobody loads."""

    nbytes: int


@attrs.frozen(kw_only=True, eq=False)
class SimulatedBound:
    step: SimulatedStep
    pool: SimulatedPool


@attrs.frozen(kw_only=True, eq=False)
class SimulatedModel:
    """`device.parts.ModelFactory` that takes the checkpoint's shape and reads no weights.

    Attributes:
        max_tokens: of one forward.
        groups: of the pool, as packed; (): one of full attention.
    """

    work: Work
    time: StepTime
    weight_bytes: int
    vocab_size: int
    seed: int
    max_tokens: int
    groups: tuple[CacheGroupSpec, ...] = ()

    def expected_bytes(self, config: ModelConfig) -> int:
        return 0  # nothing is read: the plan of the pool says whether the weights fit

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        """Those of the real model: the memory is the real one's, the content a hash."""
        return attention_groups(config, page_tokens, number_bytes=KV_BYTES)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> SimulatedWeights:
        return SimulatedWeights(nbytes=self.weight_bytes)

    def bind(self, weights: object, *, num_pages: int, page_tokens: int) -> SimulatedBound:
        groups = self.groups or (CacheGroupSpec(block_tokens=page_tokens),)
        pages, *more = (_hashes(group, num_pages) for group in groups)
        states = frozenset(number for number, group in enumerate(groups) if group.kind == STATE)
        pool = SimulatedPool(pages=pages, more=tuple(more), states=states)
        step = SimulatedStep(
            pool=pool,
            work=self.work,
            time=self.time,
            vocab_size=self.vocab_size,
            start=start_of(self.seed),
            forward=powers(BASE, self.max_tokens),
            inverse=powers(pow(BASE, -1, MODULUS), self.max_tokens),
        )
        return SimulatedBound(step=step, pool=pool)


def _hashes(group: CacheGroupSpec, parents: int) -> Int64Array:
    each = 1 if group.kind == STATE else group.block_tokens
    return np.zeros((parents * group.blocks_per_parent, each), dtype=np.int64)


@attrs.frozen(eq=False)
class SimulatedSampler:
    """`Sampler` that takes the token the step names, whatever the request's sampling parameters."""

    def seat(self, seat: Seat) -> None:
        return None

    def release(self, slot: int) -> None:
        return None

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        return SampledTokens(tokens=logits[:, 0], nan=torch.zeros(len(logits), dtype=torch.bool))


@attrs.frozen(kw_only=True, eq=False)
class SimulatedLogprobs:
    """Log-probabilities of a made-up distribution: the named token has one half, the next id a quarter, …"""

    vocab_size: int

    def __call__(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        named = logits[:, 0]
        values = torch.full((len(named),), OTHER_LOGPROB).masked_fill(tokens == named, LIKELIEST_LOGPROB)
        ranks = torch.arange(min(top, self.vocab_size))
        ids = (named[:, None] + ranks) % self.vocab_size
        return values, ids, (LIKELIEST_LOGPROB * (ranks + 1.0)).expand(ids.shape)
