"""Setting storage up: from host memory and plain facts, where there is no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from storage_rig import GROUPS, facts, storing

from tokenspeed.errors import InvariantBroken
from tokenspeed.storage.factory import group_schemas, host_regions
from tokenspeed.storage.identity import namespace_of, schema_of
from tokenspeed.testing.storage import MemoryStore

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from storage_rig import storing
from tokenspeed.testing.storage import MemoryStore
with storing(MemoryStore()) as rig:
    rig.fill(1, 7)
    assert rig.put(["a" * 16], [1]) == (True,)
    assert rig.get(["a" * 16], [2]) == (True,)
    assert rig.content(2) == {7}
    print(rig.workers.weights.namespace)
"""


@pytest.mark.contract("CT-25", "CT-26", "DP-48")
def test_the_factory_needs_no_torch_and_gives_the_same_namespace_everywhere() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, env=environ, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    with storing(MemoryStore()) as rig:
        assert run.stdout.strip() == rig.workers.weights.namespace == namespace_of(schema_of(facts()), "w")


def test_regions_are_the_tiers_own_memory_also_where_blocks_are_padded() -> None:
    parents = np.zeros(16 * 256, dtype=np.uint8)
    full = np.lib.stride_tricks.as_strided(parents, shape=(16, 3, 40), strides=(256, 40, 1))
    window = np.zeros((64, 2, 100), dtype=np.uint8)
    regions = host_regions(GROUPS, (full, window))
    regions[0].blocks[2] = 9
    assert parents[512:632].tolist() == [9] * 120
    assert parents[632:].tolist() == [0] * (len(parents) - 632)
    assert [(group.layers, group.layer_bytes) for group in group_schemas(GROUPS, (full, window))] == [(3, 40), (2, 100)]


def test_a_block_with_gaps_cannot_be_stored() -> None:
    gaps = np.zeros((16, 3, 50), dtype=np.uint8)[:, :, :40]
    with pytest.raises(InvariantBroken, match="gaps"):
        host_regions(GROUPS[:1], (gaps,))
