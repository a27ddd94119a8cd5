"""A rank that is alone makes the same calls as one of many."""

from __future__ import annotations

import threading

import pytest

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.plane.ports import Mesh


@pytest.mark.contract("CG-4")
def test_a_mesh_of_one_returns_the_value_itself_without_a_thread() -> None:
    before = threading.active_count()
    mesh = SoloMesh()
    assert isinstance(mesh, Mesh)
    value = [1]
    assert (mesh.size, mesh.rank) == (1, 0)
    assert mesh.share(value) is value
    assert mesh.gather(value) == (value,)
    assert threading.active_count() == before
    mesh.close()
