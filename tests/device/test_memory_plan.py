"""Budget, pool size and longest request; what the machine's files say."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from device_doubles import TINY_CONFIG, one_group

from tokenspeed.device.kv.layout import FULL, STATE, WINDOW, CacheGroup, cache_layout
from tokenspeed.device.machine import Machine, read_machine, scheduling_mask
from tokenspeed.device.memory import (
    GIB,
    MIB,
    Budget,
    ModelNeeds,
    check_weights_fit,
    longest_wanted,
    memory_budget,
    plan_memory,
    working_bytes,
)
from tokenspeed.errors import SettingsError
from tokenspeed.settings.model import CacheSettings, DeviceSettings, ModelSettings, SchedulerSettings, Settings

MACHINE = Machine(available_bytes=8 * GIB, memory_source="a test", cpus=2, cpu_source="a test")
NEEDS = ModelNeeds(weights_bytes=100 * MIB, layout=one_group(MIB), scratch_per_page=0, max_positions=2048)
WORKING = 50 * MIB


def budget(mib: float) -> Budget:
    return Budget(total_bytes=int(mib * MIB), why="a test")


def settings(
    *, max_len: int | None = None, kv_tokens: int | None = None, seqs: int = 64, page_tokens: int = 16
) -> Settings:
    return Settings(
        model=ModelSettings(max_len_tokens=max_len),
        device=DeviceSettings(kv_pool_tokens=kv_tokens),
        scheduler=SchedulerSettings(max_num_seqs=seqs),
        cache=CacheSettings(page_tokens=page_tokens),
    )


def test_the_budget_is_a_share_of_what_is_available_or_an_amount() -> None:
    assert memory_budget(DeviceSettings(memory_fraction=0.25), MACHINE).total_bytes == 2 * GIB
    assert memory_budget(DeviceSettings(memory_gib=1.5), MACHINE).total_bytes == int(1.5 * GIB)


def test_an_amount_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(SettingsError, match=r"device.memory_gib: 9 GiB are not there; at most 8.00 GiB .*a test"):
        memory_budget(DeviceSettings(memory_gib=9), MACHINE)


def test_where_nothing_tells_the_memory_an_amount_must_be_set() -> None:
    unknown = attrs.evolve(MACHINE, available_bytes=None)
    with pytest.raises(SettingsError, match=r"device.memory_gib: must be set"):
        memory_budget(DeviceSettings(), unknown)
    assert memory_budget(DeviceSettings(memory_gib=1), unknown).total_bytes == GIB


def test_the_pool_gets_what_the_budget_leaves() -> None:
    plan = plan_memory(settings(), budget(350.9), NEEDS, WORKING)
    assert (plan.num_pages, plan.max_model_len) == (200, 2048)
    assert plan.pool_bytes == 200 * MIB
    assert plan.lines()[1] == "KV pool: 199 pages x 16 tokens = 200.0 MiB; longest request 2,048 tokens"


def test_the_pool_is_no_larger_than_all_slots_can_use() -> None:
    plan = plan_memory(settings(seqs=2, max_len=100), budget(100_000), NEEDS, WORKING)
    assert plan.num_pages == 2 * 7 + 1


def test_scratch_that_goes_with_pages_leaves_fewer_of_them() -> None:
    plan = plan_memory(settings(), budget(350), attrs.evolve(NEEDS, scratch_per_page=MIB), WORKING)
    assert plan.num_pages == 100


def test_the_longest_request_is_bounded_by_the_pool() -> None:
    plan = plan_memory(settings(), budget(161), NEEDS, WORKING)
    assert (plan.num_pages, plan.max_model_len) == (11, 160)


def test_a_pool_that_was_asked_for_is_made_or_refused_with_the_numbers() -> None:
    plan = plan_memory(settings(kv_tokens=100), budget(10_000), NEEDS, WORKING)
    assert (plan.num_pages, plan.max_model_len) == (8, 112)
    with pytest.raises(
        SettingsError, match=r"a pool of 100,000 tokens needs 6,401\.0 MiB.*6,251 pages.*Raise device.mem"
    ):
        plan_memory(settings(kv_tokens=100_000), budget(5_000), NEEDS, WORKING)


def test_a_budget_without_room_for_a_page_is_refused_with_the_way_out() -> None:
    with pytest.raises(SettingsError, match=r"the smallest KV pool needs 152\.0 MiB: weights 100\.0 MiB") as caught:
        plan_memory(settings(), budget(151), NEEDS, WORKING)
    for way_out in ("device.memory_gib to 0.15", "scheduler.max_batched_tokens", "the budget is 151.0 MiB (a test)"):
        assert way_out in str(caught.value)


def test_a_longest_request_that_was_asked_for_must_fit_model_and_pool() -> None:
    with pytest.raises(SettingsError, match=r"model.max_len_tokens: 4,000 is more than the 2,048 positions"):
        plan_memory(settings(max_len=4000), budget(10_000), NEEDS, WORKING)
    with pytest.raises(SettingsError, match=r"one request of model.max_len_tokens 1,000 needs 214\.0 MiB"):
        plan_memory(settings(max_len=1000), budget(200), NEEDS, WORKING)
    with pytest.raises(
        SettingsError, match=r"model.max_len_tokens: 1,000 does not fit .*kv_pool_tokens 64; at most 64"
    ):
        plan_memory(settings(max_len=1000, kv_tokens=64), budget(10_000), NEEDS, WORKING)
    assert plan_memory(settings(max_len=1000), budget(10_000), NEEDS, WORKING).max_model_len == 1000
    assert longest_wanted(settings(), 77) == 77


def test_weights_that_cannot_fit_are_refused_before_they_are_read() -> None:
    expected = 5 * GIB
    check_weights_fit(Budget(total_bytes=expected, why=""), expected)
    with pytest.raises(SettingsError, match="take a smaller model"):
        check_weights_fit(Budget(total_bytes=expected - 1, why=""), expected)


def test_working_memory_grows_with_what_a_forward_may_hold() -> None:
    small = SchedulerSettings(max_batched_tokens=64, max_num_seqs=4)
    base = working_bytes(TINY_CONFIG, small, 128)
    assert working_bytes(TINY_CONFIG, attrs.evolve(small, max_batched_tokens=128), 128) > base
    assert working_bytes(TINY_CONFIG, attrs.evolve(small, max_num_seqs=8), 128) > base
    assert working_bytes(TINY_CONFIG, small, 256) > base


GROUPS = cache_layout(
    (
        CacheGroup(name="full", kind=FULL, block_tokens=16, layers=(1,), layer_bytes=MIB),
        CacheGroup(name="window", kind=WINDOW, block_tokens=16, layers=(0,), layer_bytes=MIB, window_tokens=40),
        CacheGroup(name="state", kind=STATE, block_tokens=64, layers=(2,), layer_bytes=2 * MIB),
    )
)
SEVERAL = attrs.evolve(NEEDS, layout=GROUPS)


def several(*, chunk: int = 24, **asked: int) -> Settings:
    chosen = settings(**asked)
    return attrs.evolve(chosen, scheduler=attrs.evolve(chosen.scheduler, chunk_tokens=chunk, overlap=False))


@pytest.mark.contract("SP-51")
def test_a_pool_of_several_groups_is_counted_in_parents() -> None:
    plan = plan_memory(several(), budget(350.9), SEVERAL, WORKING)
    assert (plan.num_pages, plan.pool_bytes) == (100, 200 * MIB)
    # 99 parents: 2 of states, 3 of a window with one chunk, and 94 with two blocks of 16 tokens each.
    assert plan.max_model_len == 2048
    assert plan_memory(several(), budget(280), SEVERAL, WORKING).max_model_len == (64 - 2 - 3) * 2 * 16
    assert plan.lines()[1].startswith(
        "KV pool: 99 pages of 2,097,152 bytes, each for tokens of one group (2 x 16 full, 2 x 16 window, 1 x 64 state)"
    )


def test_a_pool_for_tokens_has_room_for_them_among_all_slots() -> None:
    plan = plan_memory(several(kv_tokens=100, seqs=1), budget(10_000), SEVERAL, WORKING)
    assert (plan.num_pages, plan.max_model_len) == (1 + 4 + 3 + 2, 128)
    shared = plan_memory(several(kv_tokens=100, seqs=8), budget(10_000), SEVERAL, WORKING)
    assert shared.num_pages == 1 + 4 + 4 + 16  # each may need a state and a window of its own


def test_a_pool_without_room_for_a_block_of_every_group_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"the smallest KV pool needs 160\.0 MiB.*5 pages"):
        plan_memory(several(), budget(159), SEVERAL, WORKING)
    assert plan_memory(several(), budget(160), SEVERAL, WORKING).max_model_len == 32


# ---- the machine -------------------------------------------------------------------------------


def lay_out(root: Path, files: dict[str, str]) -> Path:
    """A machine's files below `root`; free memory is 4 GiB unless given."""
    for name, text in ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {4 * GIB // 1024} kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


V2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory\n"}


def test_without_control_groups_it_is_free_memory_and_the_scheduling_mask(tmp_path: Path) -> None:
    machine = read_machine(lay_out(tmp_path, {}), mask=6)
    assert (machine.available_bytes, machine.cpus) == (4 * GIB, 6)
    assert read_machine(tmp_path).cpus == scheduling_mask()


def test_a_version_2_limit_counts_less_what_is_in_use_and_cannot_be_taken_back(tmp_path: Path) -> None:
    group = {
        "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
    }
    machine = read_machine(lay_out(tmp_path, V2 | group), mask=1)
    assert machine.available_bytes == 2 * GIB - (GIB - GIB // 4)
    assert "a/b" in machine.memory_source


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "0\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/a/memory.current": "0\n",
        "sys/fs/cgroup/a/cpu.max": "350000 100000\n",
    }
    machine = read_machine(lay_out(tmp_path, V2 | groups), mask=8)
    assert (machine.available_bytes, machine.cpus) == (GIB, 3)
    assert "3.5 processors" in machine.cpu_source


def test_a_container_finds_its_own_group_at_the_top_of_its_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../docker/123\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    machine = read_machine(lay_out(tmp_path, files), mask=4)
    assert (machine.available_bytes, machine.cpus) == (GIB, 1)


def test_version_1_limits_are_read_from_each_controllers_own_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/j\n4:memory:/j\n0::/\n",
        "sys/fs/cgroup/memory/j/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/j/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/j/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/j/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu,cpuacct/j/cpu.cfs_period_us": "100000\n",
    }
    machine = read_machine(lay_out(tmp_path, files), mask=4)
    assert (machine.available_bytes, machine.cpus) == (3 * GIB, 2)


def test_no_limit_in_version_1_is_a_very_large_number_and_a_quota_of_minus_one(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/\n4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    machine = read_machine(lay_out(tmp_path, files), mask=4)
    assert (machine.available_bytes, machine.cpus) == (4 * GIB, 4)


def test_a_machine_that_tells_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, mask=4)
    assert (machine.available_bytes, machine.cpus) == (None, 4)


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.available_bytes is None or machine.available_bytes > 0
    assert 1 <= machine.cpus <= scheduling_mask()
