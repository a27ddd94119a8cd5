"""The device side of a model with several cache groups: specs, placement, choice of the forward."""

from __future__ import annotations

import attrs
import pytest
from device_doubles import DECODE, CountingWakeup, batch, seat

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.attention_build import LayerPlacement, attention_build
from tokenspeed.device.build import build_device_side
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.defaults import ModelFromWeights
from tokenspeed.device.machine import Machine
from tokenspeed.device.memory import GIB, memory_budget
from tokenspeed.device.model_choice import model_factory
from tokenspeed.device.parts import DeviceParts
from tokenspeed.device.survey import memory_of, survey
from tokenspeed.device.toy import ToyBound, ToyModel
from tokenspeed.errors import InvariantBroken, NotSupported, SettingsError
from tokenspeed.plane.plan import BlockGrants, Dispatch, ExecutionPlan, GroupBlocks, int32
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.settings.model import DeviceSettings, Executor, Forward, SchedulerSettings, Settings, WeightsMode

HYBRID = open_random_checkpoint("tiny-hybrid", served_name="tiny")
MACHINE = Machine(available_bytes=GIB, memory_source="a test", cpus=1, cpu_source="a test")
SETTINGS = Settings(
    device=DeviceSettings(kv_pool_tokens=256, memory_gib=0.25),
    scheduler=SchedulerSettings(max_num_seqs=2, max_batched_tokens=64),
)


@pytest.mark.contract("DP-27", "SP-51", "SP-39")
@pytest.mark.parametrize("executor", list(Executor))
def test_a_hybrid_model_is_built_warm_and_tells_its_groups(executor: Executor) -> None:
    settings = attrs.evolve(SETTINGS, device=attrs.evolve(SETTINGS.device, executor=executor))
    made = build_device_side(settings, HYBRID, DeviceParts(machine=MACHINE))
    plane = open_data_plane(made.handle, CountingWakeup(), Strict())
    try:
        full, state = made.specs.groups
        assert full == CacheGroupSpec(block_tokens=16, layers=2, bytes_per_block=8192, blocks_per_parent=2)
        assert state == CacheGroupSpec(
            name="state",
            kind="state",
            block_tokens=64,
            layers=2,
            bytes_per_block=16384,
            zero_new_blocks=True,
            image_blocks=1,
        )
        assert (made.specs.page_tokens, made.specs.num_pages) == (16, 1 + 8 + 4)
        assert made.specs.kv_pool_bytes == 13 * 16384
        assert set(made.host_cache.groups) == {"full", "state"}
        # The warm-up used parents 1 to 3: what it left would be seen in the tokens.
        found = []
        for parent, kept in ((1, 3), (8, 9)):
            grants = (
                BlockGrants(slots=int32([0]), indices=int32([0]), blocks=int32([2 * parent])),
                BlockGrants(group=1, slots=int32([0]), indices=int32([0]), blocks=int32([kept])),
            )
            first = ExecutionPlan(round_id=1, batch=batch((0, 0, [1, 2, 3])), seated=(0,), grants=grants)
            tickets = [plane.execute(first, Dispatch(seats=(seat(0),)))]
            tickets.append(plane.execute(ExecutionPlan(round_id=2, batch=batch((0, 3, DECODE))), Dispatch()))
            found.append([plane.commit(ticket).tokens for ticket in tickets])
            plane.execute(ExecutionPlan(round_id=3, pages_to_zero=(GroupBlocks(group=1, blocks=(kept,)),)), Dispatch())
        assert found[0] == found[1]
    finally:
        plane.close()


@pytest.mark.contract("DP-36")
def test_layers_are_placed_in_their_groups() -> None:
    factory, budget = ModelFromWeights(), memory_budget(SETTINGS.device, MACHINE)
    memory = memory_of(SETTINGS, HYBRID.config, factory, budget, weights_bytes=0)
    toy = ToyModel(vocab_size=9).bind(None, num_pages=2, page_tokens=16)
    record = attention_build(
        ToyBound(step=toy.step, pool=toy.pool), memory, factory.cache_groups(HYBRID.config, page_tokens=16)
    )
    assert record.placement == (
        LayerPlacement(layer=0, group="state", index=0),
        LayerPlacement(layer=1, group="full", index=0),
        LayerPlacement(layer=2, group="state", index=1),
        LayerPlacement(layer=3, group="full", index=1),
    )


def test_the_survey_names_the_groups_of_a_page() -> None:
    lines = survey(SETTINGS, HYBRID)
    assert any("each for tokens of one group (2 x 16 full, 1 x 64 state)" in line for line in lines)


def test_linear_attention_is_computed_by_torch_and_refused_to_the_native_forward() -> None:
    assert isinstance(model_factory(DeviceSettings(), HYBRID.config), ModelFromWeights)
    assert isinstance(model_factory(DeviceSettings(forward=Forward.TORCH), HYBRID.config), ModelFromWeights)
    with pytest.raises(NotSupported, match=r"device.forward: native computes no linear attention"):
        model_factory(DeviceSettings(forward=Forward.NATIVE), HYBRID.config)
    with pytest.raises(SettingsError, match=r"device.weights"):
        model_factory(DeviceSettings(weights=WeightsMode.INT8G32), HYBRID.config)


def test_a_plan_for_a_group_that_the_model_does_not_have_ends_the_rank() -> None:
    made = build_device_side(SETTINGS, HYBRID, DeviceParts(machine=MACHINE))
    plane = open_data_plane(made.handle, CountingWakeup(), Strict())
    grants = (BlockGrants(group=2, slots=int32([0]), indices=int32([0]), blocks=int32([4])),)
    ticket = plane.execute(
        ExecutionPlan(round_id=1, batch=batch((0, 0, [1])), grants=grants), Dispatch(seats=(seat(0),))
    )
    with pytest.raises(InvariantBroken, match="cache group"):
        plane.commit(ticket)
    plane.close()
