"""The simulated model: a token is a hash of its whole context, and costs what the timing model says.

The "KV" of a token is the hash of its sequence up to it, kept in pages and found through the block
tables: a wrong token, position, slot, grant, page reuse or order changes every later token. A row's
step reads one number of its context and not all of it, so that long contexts cost the host nothing.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.backends.simulated import Work
from tokenspeed.device.backends.simulated_roofline import KV_BYTES, StepTime
from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kv.layout import CacheGroup, attention_group
from tokenspeed.device.sampling.base import SampledTokens, TokenMasks
from tokenspeed.device.step import LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockCopy, GroupBlocks, Seat
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
    """Hashes in pages: int64 ``[num_pages, page_tokens]``; memory is taken at the first write."""

    pages: Int64Array

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        self.pages[[copy.destination for copy in copies]] = self.pages[[copy.source for copy in copies]]

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        self.pages[[block for group in blocks for block in group.blocks]] = 0

    def layer_bytes(self, group: int) -> torch.Tensor:
        return torch.from_numpy(self.pages.view(np.uint8))[:, None]


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
        self.work.charge(
            self.time.seconds(
                tokens=int(offsets[-1]),
                context_tokens=int(contexts.sum()),
                attended=int((counts * starts + counts * (counts + 1) // 2).sum()),
            )
        )
        hashes = self._hash(rows, offsets, counts, starts)
        return torch.from_numpy(hashes[rows.logit_tokens.numpy()] % self.vocab_size)[:, None]

    def _hash(self, rows: RaggedRows, offsets: Int64Array, counts: Int64Array, starts: Int64Array) -> Int64Array:
        """The hash up to each token, int64 ``[T]``, written into the pool.

        With ``h[e] = BASE ** e * (h[0] + sum of (t[i] + 1) * BASE ** -i for i in 1..e)`` a chunk is one
        cumulative sum, in which rows follow each other and what came before is taken off again.
        """
        pages, tables = self.pool.pages, rows.block_tables.numpy()
        page_tokens = pages.shape[1]
        before = np.maximum(starts - 1, 0)
        known = pages[tables[np.arange(len(counts)), before // page_tokens], before % page_tokens]
        known = np.where(starts == 0, self.start, known)
        row = np.repeat(np.arange(len(counts)), counts)
        exponent = np.arange(1, len(row) + 1) - offsets[row]
        total = np.cumsum((rows.token_ids.numpy() + 1) * self.inverse[exponent] % MODULUS)
        earlier = np.concatenate((np.zeros(1, dtype=np.int64), total))[offsets[:-1]]
        hashes: Int64Array = self.forward[exponent] * ((known[row] + total - earlier[row]) % MODULUS) % MODULUS
        positions = rows.positions.numpy()
        pages[tables[row, positions // page_tokens], positions % page_tokens] = hashes
        return hashes


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
    """

    work: Work
    time: StepTime
    weight_bytes: int
    vocab_size: int
    seed: int
    max_tokens: int

    def expected_bytes(self, config: ModelConfig) -> int:
        return 0  # nothing is read: the plan of the pool says whether the weights fit

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        """One group, whatever the model has: the memory is the real one's, the content a hash."""
        return attention_group(config, page_tokens, number_bytes=KV_BYTES)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> SimulatedWeights:
        return SimulatedWeights(nbytes=self.weight_bytes)

    def bind(self, weights: object, *, num_pages: int, page_tokens: int) -> SimulatedBound:
        pool = SimulatedPool(pages=np.zeros((num_pages, page_tokens), dtype=np.int64))
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
