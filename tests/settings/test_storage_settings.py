"""The storage tier as an operator writes it."""

from __future__ import annotations

import pytest

from tokenspeed.errors import SettingsError
from tokenspeed.launch.serve import grace_for
from tokenspeed.settings.load import load_settings
from tokenspeed.settings.model import StorageKind

FILES = ["storage.backend=files", "storage.path=/somewhere", "cache.host_gib=1"]


def test_a_folder_is_a_backend_and_a_path_behind_a_host_tier() -> None:
    storage = load_settings(sets=[*FILES, "storage.max_gib=2", "storage.namespace=mine"]).storage
    assert (storage.backend, storage.path, storage.max_gib) == (StorageKind.FILES, "/somewhere", 2.0)


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (FILES[:2], r"storage\.backend.*set cache\.host_gib"),
        ([FILES[0], FILES[2]], r"storage\.path.*files need a folder"),
        ([*FILES, "device.backend=simulated"], r"storage\.backend.*simulated"),
        (["storage.path=/somewhere"], r"storage\.path.*for storage\.backend files, which is not in use"),
        (["storage.timeout_s=1"], r"storage\.timeout_s.*for storage\.backend files or mooncake or part, which"),
        ([*FILES, "storage.mooncake_master=h:1"], r"storage\.mooncake_master.*for storage\.backend mooncake, which"),
        ([*FILES, "storage.timeout_s=0"], r"storage\.timeout_s"),
    ],
)
def test_a_storage_setting_without_an_effect_is_refused(sets: list[str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        load_settings(sets=sets)


@pytest.mark.contract("CT-27")
def test_storage_with_more_than_one_pipeline_stage_is_refused_naming_both() -> None:
    with pytest.raises(SettingsError, match=r"storage\.backend: .*parallel\.pipeline"):
        load_settings(sets=[*FILES, "parallel.pipeline=2"])


def test_a_launcher_gives_ranks_the_time_to_finish_what_they_store() -> None:
    plain, storing = grace_for(load_settings()), grace_for(load_settings(sets=[*FILES, "storage.shutdown_s=30"]))
    assert storing.ranks_s == plain.ranks_s + 30
