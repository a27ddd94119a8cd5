"""The host tier of a whole build: its size, what is printed and refused, and what a simulated device makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from device_doubles import TINY_CONFIG, batch, checkpoint, granted, seat
from sim_rig import hand_device
from toy_rig import toy_rig

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.backends.simulated_copies import LinkCost
from tokenspeed.device.backends.simulated_model import SimulatedLogprobs, SimulatedModel, SimulatedSampler
from tokenspeed.device.backends.simulated_roofline import ACCELERATORS, FixedStep
from tokenspeed.device.build import DeviceBuild, build_device_side
from tokenspeed.device.executors.slot_states import TokensOnHost
from tokenspeed.device.executors.slots import slot_state
from tokenspeed.device.executors.streams import stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import NoHostTier, StreamDeviceHandle, cache_ops_from_plan
from tokenspeed.device.kv.host_build import HostPlan, host_cache, plan_host
from tokenspeed.device.kv.host_cache import LoadWait
from tokenspeed.device.machine import Machine
from tokenspeed.device.memory import GIB, MIB
from tokenspeed.device.parts import DeviceParts
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.survey import survey
from tokenspeed.device.toy import ToyModel, ToySampler
from tokenspeed.errors import SettingsError
from tokenspeed.plane.plan import Dispatch, ExecutionPlan, GroupBlocks, LoadBackOp, WriteBackOp
from tokenspeed.plane.results import CacheAcks
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs
from tokenspeed.settings.model import (
    Accelerator,
    Backend,
    CacheSettings,
    DeviceSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
)
from tokenspeed.testing import hash_continuation

GROUPS = (
    CacheGroupSpec(name="full", bytes_per_block=MIB, blocks_per_parent=1),
    CacheGroupSpec(name="window", bytes_per_block=MIB // 4, blocks_per_parent=4),
)
MACHINE = Machine(available_bytes=GIB, memory_source="a test", cpus=1, cpu_source="a test")


def planned(host_gib: float, *, images: int = 0, taken: int = 0, available: int | None = 2 * GIB) -> HostPlan:
    cache = CacheSettings(host_gib=host_gib, images=images)
    return plan_host(cache, GROUPS, taken=taken, available=available, source="a test")


def test_host_memory_is_cut_into_the_parents_of_the_device_pool() -> None:
    plan = planned(0.5, images=3)
    assert plan == HostPlan(parents=512, parent_bytes=MIB, images=3, image_bytes=2 * MIB + MIB // 2)
    assert plan.nbytes == 512 * MIB + 3 * (2 * MIB + MIB // 2)
    assert plan.lines() == ("host tier: 511 pages = 512.0 MiB; 3 retraction images = 7.5 MiB, taken as it fills",)


def test_without_a_host_tier_nothing_is_taken_and_nothing_said() -> None:
    assert planned(0.0) == HostPlan()
    assert planned(0.0).lines() == ()
    assert planned(0.25).lines() == ("host tier: 255 pages = 256.0 MiB, taken as it fills",)


def test_a_host_tier_that_does_not_fit_the_machine_is_refused_with_the_numbers() -> None:
    planned(1.5, taken=GIB // 2)
    with pytest.raises(
        SettingsError, match=r"cache.host_gib: .*1,536.0 MiB .*513.0 MiB .*2,048.0 MiB available \(a test"
    ):
        planned(1.5, taken=GIB // 2 + MIB)
    with pytest.raises(SettingsError, match=r"cache.images or device.memory_gib"):
        planned(1.5, images=1, taken=GIB // 2)
    assert planned(100, available=None).parents == 102_400


def test_a_host_tier_of_less_than_a_page_is_refused_with_what_is_enough() -> None:
    with pytest.raises(SettingsError, match=r"cache.host_gib: 0.001 GiB hold no page .*at least 0.01"):
        planned(0.001)


def toy_sampler(*, slots: int, vocab_size: int) -> ToySampler:
    return ToySampler()


@contextmanager
def built(**cache: object) -> Iterator[DeviceBuild]:
    settings = Settings(
        device=DeviceSettings(kv_pool_tokens=512, memory_gib=0.25),
        scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=64),
        cache=CacheSettings(**cache),
    )
    given = DeviceParts(model=ToyModel(vocab_size=TINY_CONFIG.vocab_size), sampler=toy_sampler, machine=MACHINE)
    made = build_device_side(settings, checkpoint(), given)
    try:
        yield made
    finally:
        made.handle.close()


def test_a_build_announces_its_host_tier_and_moves_blocks_through_it() -> None:
    with built(host_gib=0.01, images=2) as made:
        specs = made.specs
        assert specs.images == 2
        assert specs.host_parents == int(0.01 * GIB) // specs.groups[0].bytes_per_block
        assert (made.host_cache.host_parents, made.host_cache.images) == (specs.host_parents, 2)
        run_through_the_tier(made.handle, specs)


def test_a_check_of_the_settings_prints_the_host_tier() -> None:
    settings = Settings(
        device=DeviceSettings(memory_gib=0.25, kv_pool_tokens=512), cache=CacheSettings(host_gib=0.01, images=2)
    )
    line = survey(settings, open_random_checkpoint("tiny-llama", served_name="tiny"))[-1]
    assert line.startswith("host tier: ")
    assert "2 retraction images" in line


def test_memory_that_the_system_does_not_give_is_a_fault_of_the_setting() -> None:
    with toy_rig() as rig:
        specs = DeviceSpecs(
            backend="cpu",
            model_name="toy",
            dtype="float32",
            vocab_size=97,
            max_model_len=64,
            num_pages=33,
            page_tokens=8,
            host_parents=1 << 56,
            max_num_seqs=4,
            max_batched_tokens=64,
        )
        with pytest.raises(SettingsError, match=r"cache\.host_gib: the system does not give"):
            host_cache(
                backend=rig.backend,
                pool=rig.bound.pool,
                slots=rig.executor.slot_states,
                specs=specs,
                placement=(),
            )


def test_a_build_without_a_host_tier_has_none() -> None:
    with built() as made:
        assert (made.specs.host_parents, made.specs.images) == (0, 0)
        assert isinstance(made.handle.host_tier, NoHostTier)


def test_a_build_refuses_a_host_tier_that_does_not_fit() -> None:
    with pytest.raises(SettingsError, match=r"cache\.host_gib"):
        with built(host_gib=2.0):
            pass


def run_through_the_tier(handle: StreamDeviceHandle, specs: DeviceSpecs) -> list[int]:
    """A prompt's first page goes to the host, is wiped and loaded elsewhere; returns the tokens of both runs."""
    page = specs.page_tokens
    prompt = [token % specs.vocab_size for token in range(7, 7 + page + 3)]

    def execute(plan: ExecutionPlan, slot: int = 0) -> list[int]:
        dispatch = Dispatch(seats=(seat(slot, prompt_len=len(prompt)),) if plan.batch is not None else ())
        return handle.execute(plan, dispatch, cache_ops_from_plan(plan).device).result().tokens

    first = execute(ExecutionPlan(round_id=1, batch=batch((0, 0, prompt)), grants=granted((0, 0, 1), (0, 1, 2))))
    store = WriteBackOp(op_id=1, group=0, device_blocks=(1,), host_blocks=(4,), stream_ordered=True)
    execute(ExecutionPlan(round_id=2, cache=(store,), pages_to_zero=(GroupBlocks(blocks=(1,)),)))
    load = LoadBackOp(op_id=2, group=0, host_blocks=(4,), device_blocks=(5,))
    second = execute(
        ExecutionPlan(
            round_id=3,
            batch=batch((1, page, prompt[page:])),
            grants=granted((1, 0, 5), (1, 1, 6)),
            cache=(load,),
        ),
        slot=1,
    )
    assert first == second
    assert handle.poll_cache_results() == CacheAcks(write_backs=(1,), load_backs=(2,))
    return [*first, *second]


# ---- the simulated device ------------------------------------------------------------------------


def simulated(host_gib: float, **changes: object) -> Settings:
    return Settings(
        model=ModelSettings(source="random:llama-8b", max_len_tokens=4096),
        device=DeviceSettings(backend=Backend.SIMULATED),
        cache=CacheSettings(host_gib=host_gib),
        **changes,
    )


def test_a_simulated_build_has_the_host_tier_of_the_model_and_the_tokens_of_its_hash() -> None:
    opened = open_random_checkpoint("llama-8b", served_name="8b")
    made = build_device_side(simulated(512.0), opened)
    try:
        assert made.specs.host_parents == 512 * GIB // made.specs.groups[0].bytes_per_block
        assert made.handle.host_tier.load_wait is LoadWait.WHOLE
        tokens = run_through_the_tier(made.handle, made.specs)
        prompt = list(range(7, 7 + made.specs.page_tokens + 3))
        assert tokens[:1] == hash_continuation(prompt, 1, vocab_size=made.specs.vocab_size)
    finally:
        made.handle.close()
    assert survey(simulated(512.0), opened)[-1].startswith("host tier: ")


def test_simulated_copies_take_their_bytes_over_the_link_and_the_forward_waits_for_the_load() -> None:
    spec = CacheGroupSpec(block_tokens=8, layers=4, bytes_per_block=8_000_000)
    specs = DeviceSpecs(
        backend="simulated",
        model_name="sim",
        dtype="float16",
        vocab_size=97,
        max_model_len=64,
        num_pages=17,
        page_tokens=8,
        groups=(spec,),
        host_parents=9,
        images=1,
        max_num_seqs=4,
        max_batched_tokens=64,
    )
    with hand_device() as device:
        model = SimulatedModel(
            work=device.work, time=FixedStep(0.25), weight_bytes=0, vocab_size=97, seed=0, max_tokens=64
        )
        backend = device.backend

        def make() -> StreamDeviceHandle:
            bound = model.bind(None, num_pages=17, page_tokens=8)
            executor = stream_executor(
                backend=backend,
                step=bound.step,
                pool=bound.pool,
                sampler=SimulatedSampler(),
                logprobs=SimulatedLogprobs(vocab_size=97),
                request_slots=4,
                max_model_len=64,
                num_pages=17,
                groups=(spec,),
            )
            tier = host_cache(
                backend=backend,
                pool=bound.pool,
                slots=executor.slot_states,
                specs=specs,
                placement=(),
                cost=LinkCost(device.work, 64e6, (spec,)),
            )
            return StreamDeviceHandle(
                backend=backend,
                executor=executor,
                profiler=TraceProfiler(stream=backend.exec_stream),
                rounds=AutomaticCollection(),
                host_tier=tier,
            )

        handle = on_stream_now(device, make)
        load = LoadBackOp(op_id=2, group=0, host_blocks=(4, 5), device_blocks=(5, 6))
        plan = ExecutionPlan(
            round_id=1, batch=batch((1, 16, [3])), grants=granted((1, 0, 5), (1, 1, 6), (1, 2, 7)), cache=(load,)
        )
        landing = handle.execute(plan, Dispatch(seats=(seat(1),)), cache_ops_from_plan(plan).device)
        # Two blocks of 8 MB over 64 MB/s; then the forward.
        assert device.log.of("load layer 0") == [(0.0, 0.25)]
        assert device.log.of("batch") == [(0.25, 0.5)]
        assert not handle.poll_cache_results()
        device.advance_to(0.25)
        assert handle.poll_cache_results() == CacheAcks(load_backs=(2,))
        assert not landing.landed()
        device.advance_to_end()
        assert landing.landed()


def on_stream_now(device: object, make: object) -> StreamDeviceHandle:
    """Run `make` as a job; the simulated device runs it when it is submitted."""
    made: list[StreamDeviceHandle] = []
    device.backend.exec_stream.submit(lambda: made.append(make()), "make")
    return made[0]


def test_every_accelerator_has_a_link() -> None:
    assert all(ACCELERATORS[name].link_bytes_per_s > 1e9 for name in Accelerator)


def test_an_executor_whose_tokens_are_on_the_host_keeps_nothing_in_an_image() -> None:
    slots = slot_state(slots=2, max_model_len=16, num_pages=4, groups=(CacheGroupSpec(),))
    states = TokensOnHost(slots=slots)
    assert states.slot_bytes == 0
    states.expect(1)
    assert slots.sampled.tolist() == [False, True]
