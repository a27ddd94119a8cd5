"""The schema says what the loader does."""

from __future__ import annotations

import json

import pytest

from tokenspeed.settings.flags import FLAGS, familiar_names
from tokenspeed.settings.keys import keys, nearest
from tokenspeed.settings.load import load_settings
from tokenspeed.settings.model import ServerSettings, Settings
from tokenspeed.settings.schema import plain, plain_value, schema, unit_of


def leaf(dotted: str) -> dict[str, object]:
    node: object = schema()
    for step in dotted.split("."):
        assert isinstance(node, dict)
        node = node["properties"][step]
    assert isinstance(node, dict)
    return node


def test_the_schema_is_json_and_has_every_key() -> None:
    tree = json.loads(json.dumps(schema()))
    found = {f"{section}.{name}" for section, body in tree["properties"].items() for name in body["properties"]}
    assert found == {key.dotted for key in keys(Settings)}


def test_a_key_carries_type_bounds_default_help_and_unit() -> None:
    assert leaf("server.port") == {
        "type": "integer",
        "minimum": 0,
        "maximum": 65535,
        "default": 8000,
        "description": "0: the kernel picks; the address is printed",
    }
    assert leaf("device.backend")["enum"] == ["cpu", "cuda", "simulated"]
    assert leaf("device.memory_gib")["type"] == ["number", "null"]
    assert leaf("device.memory_gib")["exclusiveMinimum"] == 0.0
    assert leaf("device.memory_gib")["x-unit"] == "GiB"
    assert leaf("cache.page_tokens")["enum"] == [8, 16, 32, 64, 128]
    assert leaf("wire.handshake")["pattern"] == r"(tcp|ipc)://.+"
    assert leaf("model.source")["minLength"] == 1


def test_every_key_says_what_it_is_for() -> None:
    assert [key.dotted for key in keys(Settings) if not key.help] == []


def test_every_number_with_a_unit_has_it_in_its_name() -> None:
    assert unit_of("request_timeout_s") == "seconds"
    assert unit_of("port") is None
    seconds = [key.dotted for key in keys(Settings) if "seconds" in key.help and not key.dotted.endswith("_s")]
    assert seconds == []


@pytest.mark.parametrize("key", list(keys(Settings)), ids=lambda key: key.dotted)
def test_every_default_is_what_the_schema_says_and_loads_back(key: object) -> None:
    value = plain_value(Settings(), key)  # type: ignore[arg-type]
    assert leaf(key.dotted)["default"] == value  # type: ignore[attr-defined]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    assert load_settings(sets=[f"{key.dotted}={text}"]) == Settings()  # type: ignore[attr-defined]


def test_a_secret_is_hidden_in_plain_values() -> None:
    assert plain(Settings(server=ServerSettings(api_key="hunter2")))["server"]["api_key"] == "***"
    assert plain(Settings())["server"]["api_key"] is None


def test_every_flag_sets_a_key_that_exists_and_no_spelling_is_used_twice() -> None:
    known = {key.dotted for key in keys(Settings)}
    assert [flag.key for flag in FLAGS if flag.key not in known] == []
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("path", "near"),
    [
        (("server", "prot"), "server.port"),
        (("modle",), "model"),
        (("page_tokens",), "cache.page_tokens"),
        (("gpu_memory_utilization",), "device.memory_fraction"),
        (("zzzz",), None),
    ],
)
def test_the_nearest_key_is_looked_for_beside_then_elsewhere(path: tuple[str, ...], near: str | None) -> None:
    assert nearest(Settings, path, familiar_names()) == near
