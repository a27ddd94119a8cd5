"""A device handle without a device: deterministic tokens from a hash over a real paged pool."""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, Dispatch, ExecutionPlan, ForwardBatch
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import NO_ACKS, CacheAcks, ForwardResult
from tokenspeed.plane.specs import DeviceSpecs

NEVER_WRITTEN = -7


@attrs.frozen(eq=False)
class Landed:
    """`Landing` of work that was done at launch."""

    value: ForwardResult

    def landed(self) -> bool:
        return True

    def result(self) -> ForwardResult:
        return self.value

    def notify(self, wakeup: Wakeup) -> None:
        wakeup.set()


@attrs.define(eq=False)
class HashModelHandle:
    """`DeviceHandle` whose model hashes the whole context: next = f(all tokens before).

    The "KV" of a token is its id, kept in pages and found through the slot's block table, as on a
    real device: a wrong token, position, slot, grant, page reuse or order changes every later token,
    so that comparing token streams is a strong check. Build with :func:`hash_model`.

    Attributes:
        pool: int32 ``[num_pages, page_tokens]``.
        tables: int32 ``[slots, max_blocks]``.
        latest: int32 ``[slots]``, the token the slot's last forward sampled.
    """

    vocab_size: int
    pool: Int32Array
    tables: Int32Array
    latest: Int32Array
    forwards: int = 0
    closed: bool = False

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[object, ...]) -> Landed:
        copies = plan.pages_to_copy
        self.pool[[copy.destination for copy in copies]] = self.pool[[copy.source for copy in copies]]
        for group in plan.pages_to_zero:
            self.pool[list(group.blocks)] = NEVER_WRITTEN
        for grants in plan.grants:
            self.tables[grants.slots, grants.indices] = grants.blocks
        if plan.batch is None:
            return Landed(ForwardResult(tokens=[]))
        self.forwards += 1
        tokens = self._forward(plan.batch)
        return Landed(ForwardResult(tokens=tokens, next_inputs=list(tokens)))

    def _forward(self, batch: ForwardBatch) -> list[int]:
        page_tokens, at, tokens = self.pool.shape[1], 0, []
        for i in range(len(batch.rows)):
            slot, start, count = int(batch.slots[i]), int(batch.starts[i]), int(batch.counts[i])
            ids = batch.input_ids[at : at + count].copy()
            at += count
            ids[ids == FROM_DEVICE] = self.latest[slot]
            positions = np.arange(start + count)
            blocks, offsets = self.tables[slot, positions // page_tokens], positions % page_tokens
            self.pool[blocks[start:], offsets[start:]] = ids
            if batch.samples[i]:
                token = hash_token(self.pool[blocks, offsets], vocab_size=self.vocab_size)
                self.latest[slot] = token
                tokens.append(token)
        return tokens

    def poll_cache_results(self) -> CacheAcks:
        return NO_ACKS

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        return None

    def note_forwarded(self) -> None:
        return None

    def idle_forward(self) -> None:
        return None

    def flush_cache(self) -> None:
        return None

    def start_profile(self, path: str) -> str:
        return path

    def stop_profile(self) -> str:
        return ""

    def shutdown_cache(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def hash_model(specs: DeviceSpecs) -> HashModelHandle:
    """A `HashModelHandle` of the geometry in `specs`."""
    max_blocks = -(-specs.max_model_len // specs.page_tokens) + 1
    return HashModelHandle(
        vocab_size=specs.vocab_size,
        pool=np.full((specs.num_pages, specs.page_tokens), NEVER_WRITTEN, dtype=np.int32),
        tables=np.zeros((specs.max_num_seqs, max_blocks), dtype=np.int32),
        latest=np.full(specs.max_num_seqs, NEVER_WRITTEN, dtype=np.int32),
    )


def hash_token(context: Int32Array, *, vocab_size: int) -> int:
    """The token after `context` (int32 ``[n]``): a polynomial hash, equal on every machine."""
    value = 17
    for token in context.tolist():
        value = (value * 1_000_003 + token + 1) % 2_147_483_629
    return value % vocab_size


def hash_continuation(prompt: list[int], count: int, *, vocab_size: int) -> list[int]:
    """What a request with `prompt` must generate on a `HashModelHandle`, alone or in any company."""
    context = list(prompt)
    for _ in range(count):
        context.append(hash_token(np.array(context, dtype=np.int32), vocab_size=vocab_size))
    return context[len(prompt) :]
