"""A device handle without a device: deterministic tokens from a hash over a real pool of blocks."""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.operations import WeightsGroup, WeightsSource
from tokenspeed.plane.plan import FROM_DEVICE, DeviceCacheOp, Dispatch, ExecutionPlan, ForwardBatch
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import NO_ACKS, CacheAcks, ForwardResult
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs
from tokenspeed.testing.group_memory import NEVER_WRITTEN, GroupMemory, group_memory, value_of


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

    What it keeps of a token lies in blocks and is found through the slot's block tables, as on a real
    device: a wrong token, position, slot, grant, reuse or order changes every later token, so that
    comparing token streams is a strong check. Build with :func:`hash_model`.

    Attributes:
        memory: of each cache group, by number.
        latest: int32 ``[slots]``, the token the slot's last forward sampled.
    """

    vocab_size: int
    memory: tuple[GroupMemory, ...]
    latest: Int32Array
    forwards: int = 0
    closed: bool = False

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[DeviceCacheOp, ...]) -> Landed:
        copied = [self.memory[copy.group].block(copy.source) for copy in plan.pages_to_copy]
        for copy, content in zip(plan.pages_to_copy, copied, strict=True):
            self.memory[copy.group].fill(copy.destination, content)
        for group in plan.pages_to_zero:
            for block in group.blocks:
                self.memory[group.group].clean(block)
        for grants in plan.grants:
            self.memory[grants.group].tables[grants.slots, grants.indices] = grants.blocks
        if plan.batch is None:
            return Landed(ForwardResult(tokens=[]))
        self.forwards += 1
        tokens = self._forward(plan.batch)
        return Landed(ForwardResult(tokens=tokens))

    def _forward(self, batch: ForwardBatch) -> list[int]:
        at, tokens = 0, []
        for i in range(len(batch.rows)):
            slot, start, count = int(batch.slots[i]), int(batch.starts[i]), int(batch.counts[i])
            ids = batch.input_ids[at : at + count].copy()
            at += count
            ids[ids == FROM_DEVICE] = self.latest[slot]
            value = sum(memory.take(slot, start, ids.tolist()) for memory in self.memory)
            if batch.samples[i]:
                self.latest[slot] = value % self.vocab_size
                tokens.append(int(self.latest[slot]))
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

    def release_memory(self, tags: tuple[str, ...]) -> str:
        return ""

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str:
        return ""

    def load_weights(self, source: WeightsSource) -> str:
        return ""

    def commit_weights(self, accept: bool) -> str:
        return ""

    def open_weights_group(self, group: WeightsGroup) -> str:
        return ""

    def close_weights_group(self, name: str) -> str:
        return ""

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
    return HashModelHandle(
        vocab_size=specs.vocab_size,
        memory=group_memory(specs),
        latest=np.full(specs.request_slots, NEVER_WRITTEN, dtype=np.int32),
    )


def hash_continuation(
    prompt: list[int], count: int, *, vocab_size: int, groups: tuple[CacheGroupSpec, ...] = (CacheGroupSpec(),)
) -> list[int]:
    """What a request with `prompt` must generate on a `HashModelHandle`, alone or in any company."""
    context = list(prompt)
    for _ in range(count):
        context.append(sum(value_of(group, context) for group in groups) % vocab_size)
    return context[len(prompt) :]
