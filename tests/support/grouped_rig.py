"""A model with several cache groups under a real executor, driven by plans made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
from device_doubles import cpu_backend
from toy_rig import EXECUTORS

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.device.backends.cpu import CpuBackend
from tokenspeed.device.defaults import ModelFromWeights
from tokenspeed.device.executors.ports import BlockPool
from tokenspeed.device.handle import Executor
from tokenspeed.device.kv.layout import STATE, CacheLayout, cache_layout
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.sampling.base import logprobs
from tokenspeed.device.step import AllReady
from tokenspeed.device.toy import ToySampler
from tokenspeed.plane.plan import BlockCopy, BlockGrants, Dispatch, ForwardBatch, GroupBlocks, Sampling, Seat, int32

PARENTS, PAGE_TOKENS, SLOTS, MAX_LEN = 96, 16, 6, 512


@attrs.define(eq=False)
class Resident:
    """A request in its slot: its tokens, how many are computed, and its blocks by group."""

    slot: int
    tokens: list[int]
    computed: int = 0
    blocks: list[list[int]] = attrs.field(factory=list)
    out: list[int] = attrs.field(factory=list)


@attrs.define(eq=False)
class GroupedRig:
    """Takes parents from the pool's end, one group each, and cuts them into blocks."""

    backend: CpuBackend
    executor: Executor
    pool: BlockPool
    layout: CacheLayout
    next_parent: int = PARENTS - 1
    loose: dict[int, list[int]] = attrs.field(factory=dict)
    seated: list[Seat] = attrs.field(factory=list)
    grants: list[BlockGrants] = attrs.field(factory=list)
    slots: int = 0

    def block(self, group: int) -> int:
        """A block that nobody has; as dirty as it comes."""
        free = self.loose.setdefault(group, [])
        if not free:
            count = self.layout.groups[group].blocks_per_parent
            free.extend(range(self.next_parent * count, (self.next_parent + 1) * count))
            self.next_parent -= 1
        return free.pop()

    def sit(self, tokens: list[int]) -> Resident:
        """A request in a slot, without a block."""
        resident = Resident(slot=self.slots % SLOTS, tokens=list(tokens), blocks=[[] for _ in self.layout.groups])
        self.slots += 1
        self.seated.append(
            Seat(
                slot=resident.slot,
                row=resident.slot,
                rid=f"r{self.slots}",
                sampling=Sampling(),
                prompt_len=len(tokens),
            )
        )
        return resident

    def new(self, tokens: list[int]) -> Resident:
        """A request from its start: its state block arrives clean."""
        resident = self.sit(tokens)
        for group, spec in enumerate(self.layout.groups):
            if spec.kind == STATE:
                self.give(resident, group, 0, block := self.block(group))
                self.executor.zero_blocks((GroupBlocks(group=group, blocks=(block,)),))
        return resident

    def give(self, resident: Resident, group: int, index: int, block: int) -> None:
        own = resident.blocks[group]
        own[index : index + 1] = [block]
        self.grants.append(
            BlockGrants(group=group, slots=int32([resident.slot]), indices=int32([index]), blocks=int32([block]))
        )

    def copy(self, *copies: BlockCopy) -> None:
        self.executor.copy_blocks(copies)

    def step(self, *work: tuple[Resident, int]) -> None:
        """One forward over residents and how many of their next tokens; samples where the tokens end."""
        samples = []
        for resident, count in work:
            end = resident.computed + count
            for group, spec in enumerate(self.layout.groups):
                while spec.kind != STATE and len(resident.blocks[group]) * spec.block_tokens < end:
                    self.give(resident, group, len(resident.blocks[group]), self.block(group))
            samples.append(end == len(resident.tokens))
        batch = ForwardBatch(
            rows=int32([resident.slot for resident, _ in work]),
            slots=int32([resident.slot for resident, _ in work]),
            starts=int32([resident.computed for resident, _ in work]),
            counts=int32([count for _, count in work]),
            samples=int32(samples).astype(bool),
            input_ids=int32([t for resident, count in work for t in resident.tokens[resident.computed :][:count]]),
        )
        dispatch, grants = Dispatch(seats=tuple(self.seated)), tuple(self.grants)
        self.seated.clear()
        self.grants.clear()
        tokens = iter(self.executor.forward(batch, grants, dispatch, AllReady()).result().tokens)
        for (resident, count), sampled in zip(work, samples, strict=True):
            resident.computed += count
            if sampled:
                resident.out.append(next(tokens))
                resident.tokens.append(resident.out[-1])

    def decode(self, *residents: Resident, count: int) -> None:
        for _ in range(count):
            self.step(*((resident, 1) for resident in residents))


@contextmanager
def grouped_rig(checkpoint: Checkpoint, *, executor: str = "streams", **options: object) -> Iterator[GroupedRig]:
    factory = ModelFromWeights()
    layout = cache_layout(factory.cache_groups(checkpoint.config, PAGE_TOKENS))
    with cpu_backend() as backend:

        def make() -> GroupedRig:
            weights = factory.load(checkpoint, NoProgress())
            bound = factory.bind(weights, num_pages=PARENTS, page_tokens=PAGE_TOKENS)
            made = EXECUTORS[executor](
                backend=backend,
                step=bound.step,
                pool=bound.pool,
                sampler=ToySampler(),
                logprobs=logprobs,
                request_slots=SLOTS,
                max_model_len=MAX_LEN,
                num_pages=PARENTS,
                groups=layout.groups,
                **options,
            )
            return GroupedRig(backend=backend, executor=made, pool=bound.pool, layout=layout)

        rig = on_stream(backend.exec_stream, make, "make")
        try:
            yield rig
        finally:
            backend.close()
            rig.executor.close()
