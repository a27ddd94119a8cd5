"""The surface between control and device: named operations, plain values."""

from __future__ import annotations

import collections.abc
import inspect
import typing

import attrs
import pytest

import tokenspeed
from tokenspeed.plane import ports
from tokenspeed.plane.ports import DataPlane, DeviceHandle
from tokenspeed.settings import model

NOT_QUEUED = {"commit", "landed"}
"""Operations of the plane that end at the landing object and have no method of the handle."""


def operations(protocol: type) -> dict[str, typing.Any]:
    return {name: value for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")}


@pytest.mark.contract("ER-3", "DP-44")
def test_each_operation_of_the_plane_is_one_of_the_handle() -> None:
    assert set(operations(DataPlane)) - NOT_QUEUED == set(operations(DeviceHandle)) - {"close"}


@pytest.mark.contract("ER-3", "DP-33")
def test_nothing_is_set_on_plane_or_handle_after_the_build() -> None:
    names = [*operations(DataPlane), *operations(DeviceHandle)]
    assert [
        name for name in names if name.startswith(("set_", "bind", "attach", "register", "configure", "wire"))
    ] == []


@pytest.mark.contract("DP-45")
@pytest.mark.parametrize("protocol", [DataPlane, DeviceHandle], ids=lambda p: p.__name__)
def test_no_operation_takes_a_callable(protocol: type) -> None:
    for name, method in operations(protocol).items():
        hints = typing.get_type_hints(method)
        taken = {key: hint for key, hint in hints.items() if key != "return"}
        bad = [key for key, hint in taken.items() if typing.get_origin(hint) is collections.abc.Callable]
        assert bad == [], name
        kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name


@pytest.mark.contract("DP-9")
def test_the_completion_queries_are_these() -> None:
    marked = {name for name, method in operations(DataPlane).items() if getattr(method, "__completion_query__", False)}
    assert marked == {"landed", "poll_cache_results"}


def test_every_protocol_of_the_seam_is_exported_and_can_be_asked_for_at_run_time() -> None:
    found = {
        name
        for name, value in vars(ports).items()
        if inspect.isclass(value) and getattr(value, "_is_protocol", False) and value.__module__ == ports.__name__
    }
    assert found <= set(ports.__all__)
    assert [name for name in found if not getattr(vars(ports)[name], "_is_runtime_protocol", False)] == []


def test_every_section_of_the_settings_is_exported_beside_them() -> None:
    sections = {field.type.__name__ for field in attrs.fields(attrs.resolve_types(model.Settings))}
    assert sections <= set(model.__all__)


def test_what_the_package_exports_is_there_and_listed_before_it_is_loaded() -> None:
    assert set(tokenspeed.__all__) <= set(dir(tokenspeed))
    assert [name for name in tokenspeed.__all__ if not hasattr(tokenspeed, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = tokenspeed.Enigne  # type: ignore[attr-defined]
