"""The host tier of a pool with several cache groups: geometry, and random traffic against a model of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import pytest
from device_doubles import TIMEOUT_S, CountingWakeup, cpu_backend

from tokenspeed.device.executors.ports import HostBytes
from tokenspeed.device.kv.grouped import GroupedPool, grouped_pool
from tokenspeed.device.kv.host_acks import Ended
from tokenspeed.device.kv.host_buffers import HostGroup, HostLayout, copy_blocks, host_buffers
from tokenspeed.device.kv.host_build import host_cache
from tokenspeed.device.kv.host_cache import HostCacheExecutor, LayerPlace, LoadWait
from tokenspeed.device.kv.layout import CacheGroup, cache_layout
from tokenspeed.device.on_stream import on_stream
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import (
    GroupBlocks,
    HostPages,
    LoadBackOp,
    RestoreOp,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.results import CacheAcks
from tokenspeed.plane.specs import DeviceSpecs

LAYOUT = cache_layout(
    (
        CacheGroup(name="full", block_tokens=16, layers=(0, 3), layer_bytes=48),
        CacheGroup(name="window", kind="window", block_tokens=16, layers=(1, 2, 4), layer_bytes=16, window_tokens=32),
        CacheGroup(name="state", kind="state", block_tokens=64, layers=(5,), layer_bytes=190),
    )
)
PLACES = tuple(
    LayerPlace(layer, group, index)
    for layer, group, index in ((0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 0, 1), (4, 1, 2), (5, 2, 0))
)
PARENTS, HOST_PARENTS, IMAGES, SLOTS = 7, 5, 3, 4
SPECS = DeviceSpecs(
    backend="cpu",
    model_name="groups",
    dtype="float32",
    vocab_size=1,
    max_model_len=64,
    num_pages=PARENTS,
    page_tokens=16,
    groups=LAYOUT.groups,
    host_parents=HOST_PARENTS,
    images=IMAGES,
    max_num_seqs=SLOTS,
    max_batched_tokens=1,
)


@attrs.define(eq=False)
class ByteStates:
    """`SlotStates` of three bytes a slot."""

    slots: HostBytes = attrs.field(factory=lambda: np.zeros((SLOTS, 3), dtype=np.uint8))
    expected: list[int] = attrs.field(factory=list)
    slot_bytes: int = 3

    def expect(self, slot: int) -> None:
        self.expected.append(slot)

    def export(self, slot: int, into: HostBytes) -> None:
        into[:] = self.slots[slot]

    def restore(self, slot: int, kept: HostBytes) -> None:
        self.slots[slot] = kept


@attrs.frozen(eq=False)
class GroupsRig:
    pool: GroupedPool
    states: ByteStates
    tier: HostCacheExecutor

    def device(self, group: int) -> np.ndarray:
        return self.pool.layer_bytes(group).numpy()

    def finish(self) -> CacheAcks:
        """Wait for all that is open, acknowledge it."""
        for copy in self.tier.open.state.copies:
            ended = Ended()
            copy.event.notify(ended)
            assert ended.wait(TIMEOUT_S)
        return self.tier.acks()


@contextmanager
def groups_rig() -> Iterator[GroupsRig]:
    with cpu_backend() as backend:
        pool, states = grouped_pool(LAYOUT, num_parents=PARENTS), ByteStates()

        def make() -> HostCacheExecutor:
            return host_cache(backend=backend, pool=pool, slots=states, specs=SPECS, placement=PLACES)

        yield GroupsRig(pool, states, on_stream(backend.exec_stream, make, "make"))


def test_the_groups_pack_several_blocks_into_a_parent() -> None:
    assert len({group.blocks_per_parent for group in LAYOUT.groups}) > 1
    with groups_rig() as rig:
        assert rig.tier.load_wait is LoadWait.LAYERS


def test_a_host_block_is_where_its_parent_and_sub_position_say() -> None:
    with groups_rig() as rig:
        layout, l2 = rig.tier.buffers.layout, rig.tier.buffers.l2
        for number, group in enumerate(layout.groups):
            each = layout.parent_bytes // group.blocks_per_parent
            for block in range(HOST_PARENTS * group.blocks_per_parent):
                l2[:] = 0
                rig.tier.buffers.blocks[number][block] = 255
                parent, place = divmod(block, group.blocks_per_parent)
                at = parent * layout.parent_bytes + place * each
                assert np.flatnonzero(l2).tolist() == list(range(at, at + group.block_bytes))


def test_images_and_their_groups_and_states_lie_beside_each_other() -> None:
    layout = HostLayout(
        groups=(
            HostGroup(blocks_per_parent=1, layers=2, layer_bytes=24, image_blocks=2),
            HostGroup(blocks_per_parent=3, layers=1, layer_bytes=16, image_blocks=1),
        ),
        parents=0,
        images=3,
        slot_bytes=8,
    )
    buffers = host_buffers(layout)
    assert len(buffers.l2) == 0
    for i, view in enumerate((*buffers.tails, buffers.states), start=1):
        np.add(view, i, out=view)
    values, counts = np.unique(buffers.images, return_counts=True)
    assert values.max() == 3  # no byte belongs to two
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {
        0: len(buffers.images) - 3 * (96 + 16 + 8),
        1: 3 * 96,
        2: 3 * 16,
        3: 3 * 8,
    }
    with pytest.raises(InvariantBroken, match="usable parent"):
        host_buffers(attrs.evolve(layout, parents=1))


def test_blocks_are_copied_one_by_one_or_in_runs_in_any_order() -> None:
    source = np.arange(40, dtype=np.uint8).reshape(10, 4)
    into = np.zeros_like(source)
    copy_blocks(into, (1, 2, 3, 7, 6), source, (5, 6, 7, 8, 1))
    expected = np.zeros_like(source)
    expected[[1, 2, 3, 7, 6]] = source[[5, 6, 7, 8, 1]]
    assert np.array_equal(into, expected)
    copy_blocks(into, (), source, ())
    assert np.array_equal(into, expected)


@pytest.mark.contract("RA-36")
def test_layers_of_groups_that_are_not_loaded_are_ready_at_once() -> None:
    with groups_rig() as rig:
        rig.tier.backend.load_stream.hold()
        ready = rig.tier.load((LoadBackOp(op_id=1, group=1, host_blocks=(5,), device_blocks=(9,)),))
        ready.wait_for(0)
        assert ready.count.value.value == 1
        rig.tier.backend.load_stream.release()
        ready.wait_for(5)
        assert rig.finish() == CacheAcks(load_backs=(1,))


def test_operations_of_several_groups_load_in_the_order_of_the_models_layers() -> None:
    with groups_rig() as rig:
        backend, order = rig.tier.backend, []

        @attrs.frozen(eq=False)
        class Counted(type(rig.tier.counters())):
            def publish(self, layers: int) -> None:
                order.append(layers)
                super().publish(layers)

        backend.load_stream.hold()
        tier = attrs.evolve(rig.tier, counters=Counted)
        ops = (
            LoadBackOp(op_id=1, group=2, host_blocks=(2,), device_blocks=(3,)),
            LoadBackOp(op_id=2, group=0, host_blocks=(3,), device_blocks=(4,)),
        )
        ready = tier.load(ops)
        assert order == []  # layer 0 is loaded, so that nothing is ready before
        backend.load_stream.release()
        ready.wait_for(5)
        assert order[:2] == [3, 5]
        assert rig.finish() == CacheAcks(load_backs=(1, 2))


def test_a_wakeup_is_told_once_for_each_load_however_many_operations_it_has() -> None:
    with groups_rig() as rig:
        wakeup = CountingWakeup()
        rig.tier.backend.load_stream.hold()
        ops = tuple(LoadBackOp(op_id=i, group=0, host_blocks=(1 + i,), device_blocks=(3 + i,)) for i in (1, 2))
        rig.tier.load(ops)
        rig.tier.notify(wakeup)
        rig.tier.notify(wakeup)
        rig.tier.backend.load_stream.release()
        assert wakeup.wait_for(1)
        assert rig.finish() == CacheAcks(load_backs=(1, 2))
        assert wakeup.count == 1


DEVICE_OF, HOST_OF = {0: (1, 2), 1: (3, 4), 2: (5, 6)}, {0: (1,), 1: (2, 3), 2: (4,)}
"""Parents of each group: groups that shared some would write over each other."""


def random_blocks(rng: random.Random, parents: tuple[int, ...], group: int, count: int) -> tuple[int, ...]:
    each = LAYOUT.groups[group].blocks_per_parent
    there = [parent * each + place for parent in parents for place in range(each)]
    return tuple(rng.sample(there, min(count, len(there))))


@attrs.define(eq=False)
class TrafficModel:
    """What every byte should be. Plans one operation at a time."""

    rng: random.Random
    device: list[np.ndarray]
    states: np.ndarray
    host: list[np.ndarray]
    images: dict[int, tuple[tuple[GroupBlocks, ...], list[np.ndarray], np.ndarray]] = attrs.field(factory=dict)

    def pages(self) -> HostPages:
        group = self.rng.randrange(len(self.host))
        host = random_blocks(self.rng, HOST_OF[group], group, self.rng.randint(0, 4))
        device = random_blocks(self.rng, DEVICE_OF[group], group, len(host))
        return HostPages(group=group, host_blocks=host[: len(device)], device_blocks=device)

    def write_back(self, op_id: int) -> WriteBackOp:
        pages = self.pages()
        self.host[pages.group][list(pages.host_blocks)] = self.device[pages.group][list(pages.device_blocks)]
        return WriteBackOp(
            op_id=op_id,
            group=pages.group,
            device_blocks=pages.device_blocks,
            host_blocks=pages.host_blocks,
            stream_ordered=self.rng.random() < 0.5,
        )

    def load_back(self, op_id: int) -> LoadBackOp:
        pages = self.pages()
        self._arrive(pages)
        return LoadBackOp(
            op_id=op_id, group=pages.group, host_blocks=pages.host_blocks, device_blocks=pages.device_blocks
        )

    def snapshot(self, op_id: int) -> SnapshotOp:
        image, slot = self.rng.randrange(IMAGES), self.rng.randrange(SLOTS)
        tail = tuple(
            GroupBlocks(
                group=group,
                blocks=random_blocks(self.rng, DEVICE_OF[group], group, self.rng.randint(0, room.image_blocks)),
            )
            for group, room in enumerate(LAYOUT.groups)
            if self.rng.random() < 0.8
        )
        copies = [self.device[blocks.group][list(blocks.blocks)] for blocks in tail]
        self.images[image] = tail, copies, self.states[slot].copy()
        return SnapshotOp(op_id=op_id, slot=slot, tail=tail, image=image)

    def restore(self, op_id: int) -> RestoreOp:
        image, slot, pages = self.rng.choice(sorted(self.images)), self.rng.randrange(SLOTS), self.pages()
        tail, copies, state = self.images[image]
        places = tuple(
            GroupBlocks(group=t.group, blocks=random_blocks(self.rng, DEVICE_OF[t.group], t.group, len(t.blocks)))
            for t in tail
        )
        self._arrive(pages)
        for place, copy in zip(places, copies, strict=True):
            self.device[place.group][list(place.blocks)] = copy
        self.states[slot] = state
        return RestoreOp(op_id=op_id, slot=slot, pages=(pages,), tail=places, image=image)

    def _arrive(self, pages: HostPages) -> None:
        self.device[pages.group][list(pages.device_blocks)] = self.host[pages.group][list(pages.host_blocks)]


@pytest.mark.contract("RA-39", "CT-12")
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_leaves_the_bytes_that_a_model_of_it_says(seed: int) -> None:
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    with groups_rig() as rig:
        groups = range(len(LAYOUT.groups))
        rig.pool.bytes.numpy()[:] = bits.integers(0, 256, len(rig.pool.bytes))
        rig.states.slots[:] = bits.integers(0, 256, (SLOTS, 3))
        model = TrafficModel(
            rng=rng,
            device=[rig.device(group).copy() for group in groups],
            states=rig.states.slots.copy(),
            host=[np.zeros_like(blocks) for blocks in rig.tier.buffers.blocks],
        )
        for op_id in range(200):
            kinds = [model.write_back, model.load_back, model.snapshot, *([model.restore] if model.images else [])]
            op = rng.choice(kinds)(op_id)
            if isinstance(op, WriteBackOp | SnapshotOp):
                rig.tier.store((op,))
            else:
                rig.tier.load((op,)).wait_for(5)
            acks = rig.finish()
            assert acks.write_backs + acks.load_backs + acks.snapshots + acks.restores == (op_id,)
            own = {group: random_blocks(rng, DEVICE_OF[group], group, 100) for group in groups}
            for group in groups:
                assert np.array_equal(rig.device(group)[list(own[group])], model.device[group][list(own[group])]), op
                mine = list(random_blocks(rng, HOST_OF[group], group, 100))
                assert np.array_equal(rig.tier.buffers.blocks[group][mine], model.host[group][mine]), op
            assert np.array_equal(rig.states.slots, model.states)
