"""YAML, environment and flags to settings: every fault at once, each where the operator wrote it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from attrs import validators as v

from tokenspeed.errors import SettingsError
from tokenspeed.settings.layers import Source, from_assignments, from_environment, parse_assignment
from tokenspeed.settings.load import load_settings, load_text, origins, read_file, resolve
from tokenspeed.settings.model import Policy, Settings
from tokenspeed.settings.structure import structure
from tokenspeed.settings.yaml_text import from_yaml

BAD = """\
model:
  source: 3
scheduler:
  policy: fcs
  max_num_seqs: "64"
  max_batched_tokens: 0
  chunk_tokens: 1e3
cache:
  prefix: yes
  prefix_reuse: false
sever:
  port: 1
server:
  port: 70000
  host: ""
"""


@attrs.frozen(kw_only=True)
class Pair:
    low: int = attrs.field(default=0, validator=v.ge(0))
    high: float = attrs.field(default=1.0, validator=[v.ge(0.0), v.le(1.0)])


@attrs.frozen(kw_only=True)
class Tree:
    pairs: tuple[Pair, ...] = ()


def told(text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_text(text, name="s.yaml")
    return str(caught.value).splitlines()


def test_every_fault_of_a_file_is_told_at_once_with_its_line() -> None:
    assert told(BAD) == [
        "s.yaml:2: model.source: expected text, got 3; put it in quotes",
        "s.yaml:4: scheduler.policy: expected one of fcfs, priority, lpm; got 'fcs'; did you mean fcfs?",
        "s.yaml:5: scheduler.max_num_seqs: expected a whole number, got '64'",
        "s.yaml:6: scheduler.max_batched_tokens: expected a whole number from 1 to 1048576, got 0",
        "s.yaml:7: scheduler.chunk_tokens: expected a whole number, got 1000.0; write 1000",
        "s.yaml:9: cache.prefix: expected true or false, got 'yes'; write true",
        "s.yaml:10: cache.prefix_reuse: unknown key; did you mean cache.prefix?",
        "s.yaml:11: sever: unknown key; did you mean server?",
        "s.yaml:14: server.port: expected a whole number from 0 to 65535, got 70000",
        "s.yaml:15: server.host: expected text, not empty; got ''",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cache: 3\n", "s.yaml:1: cache: expected keys below it, got 3"),
        ("- a\n", "s.yaml:1: settings: expected sections with keys, got ['a']"),
        ("server:\n  port: 1\n  port: 2\n", "s.yaml:3: server.port: given twice, first at s.yaml:2"),
        ("server:\n  port: 1\nserver: {}\n", "s.yaml:3: server: given twice, first at s.yaml:1"),
        ("1: 2\n", "s.yaml:1: 1: unknown key"),
        ("? [a]\n: 2\n", "s.yaml:1: settings: a key must be a plain word"),
        ("cache:\nprefix: true\n", "s.yaml:2: prefix: unknown key; did you mean cache.prefix?"),
        ("max_model_len: 4\n", "s.yaml:1: max_model_len: unknown key; did you mean model.max_len_tokens?"),
        (
            'server:\n  allowed_origins: ["*", "https://a.b/"]\n',
            (
                "s.yaml:2: server.allowed_origins: expected a list of origins as https://chat.example or"
                " http://localhost:3000, without a path and in small letters, or *; got 'https://a.b/'"
            ),
        ),
        (
            "model:\n  max-model-len: 4\n",
            "s.yaml:2: model.max-model-len: unknown key; did you mean model.max_len_tokens?",
        ),
        ("device: {memory_gib: .nan}\n", "s.yaml:1: device.memory_gib: expected a number, got nan"),
        ("device: {memory_gib: .inf}\n", "s.yaml:1: device.memory_gib: expected a number, got inf"),
        ("device: {memory_gib: 0}\n", "s.yaml:1: device.memory_gib: expected a number above 0, got 0.0"),
        ("server: {port: 010}\n", "s.yaml:1: server.port: expected a whole number, got '010'"),
        ("server: {port: true}\n", "s.yaml:1: server.port: expected a whole number, got true"),
        ("server: {port: null}\n", "s.yaml:1: server.port: expected a whole number, got null"),
        (
            "log: {level: loud}\n",
            "s.yaml:1: log.level: expected one of debug, info, warning, error; got 'loud'",
        ),
        ("server: {api_key: 12345}\n", "s.yaml:1: server.api_key: not usable (the value is not shown)"),
        (
            "server: &a {port: 1}\nlog: *a\n",
            "s.yaml:2: settings: aliases (*name) are not used in settings; write the value out",
        ),
        ("server:\n  port: 1\n   host: x\n", "s.yaml:3: settings: not YAML: mapping values are not allowed here"),
        ("server:\n\tport: 1\n", "s.yaml:2: settings: not YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "s.yaml:2: settings: not YAML: but found another document"),
        ("log: {level: !!python/name:os.system }\n", None),
        ("model:\n  source: [\n", None),
        ("a\x01b: 1\n", None),
    ],
)
def test_a_fault_is_told_in_the_words_of_the_file(text: str, line: str | None) -> None:
    got = told(text)
    assert len(got) == 1
    assert got[0].startswith("s.yaml:")
    if line is not None:
        assert got == [line]


@pytest.mark.parametrize("text", ["", "# nothing\n", "model:\n", "model:\n  # source: x\nserver: {}\n", "---\n"])
def test_a_file_without_values_is_the_defaults(text: str) -> None:
    assert load_text(text) == Settings()


def test_numbers_are_read_as_yaml_1_2_reads_them() -> None:
    got = load_text("device: {memory_gib: 1e3, threads: 0x10, kv_pool_tokens: 1_000}\nserver: {request_timeout_s: 5}\n")
    assert (got.device.memory_gib, got.device.threads, got.device.kv_pool_tokens) == (1000.0, 16, 1000)
    assert got.server.request_timeout_s == 5.0
    assert isinstance(got.server.request_timeout_s, float)


def test_text_that_other_loaders_convert_stays_text() -> None:
    assert load_text("model: {served_name: 2026-01-02}\n").model.served_name == "2026-01-02"
    assert load_text("model: {served_name: no}\n").model.served_name == "no"


def test_settings_are_frozen_and_equal_by_value() -> None:
    got = load_text("scheduler: {policy: priority}\n")
    assert got.scheduler.policy is Policy.PRIORITY
    assert got == load_text("scheduler:\n  policy: priority\n")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        got.server = Settings().server  # type: ignore[misc]


def test_several_validators_of_one_class_are_all_heard() -> None:
    assert structure({"pairs": [{"low": -1, "high": 2}, {"low": "x"}, 3]}, Tree) == (
        (("pairs", 0, "low"), "expected a whole number, at least 0; got -1"),
        (("pairs", 0, "high"), "expected a number from 0 to 1, got 2.0"),
        (("pairs", 1, "low"), "expected a whole number, got 'x'"),
        (("pairs", 2), "expected keys below it, got 3"),
    )
    assert structure({"pairs": [{"low": 2}]}, Tree) == Tree(pairs=(Pair(low=2),))


def test_flags_win_over_environment_over_file_over_defaults() -> None:
    layers = [
        from_yaml("server:\n  port: 1\n  host: a\n  max_choices: 3\n", Settings, name="f.yaml"),
        from_environment({"TOKENSPEED_SERVER__PORT": "2", "TOKENSPEED_SERVER__HOST": "b"}, Settings),
        from_assignments([parse_assignment("server.port=3", Settings)], Settings),
    ]
    loaded = resolve(layers)
    assert (loaded.settings.server.port, loaded.settings.server.host) == (3, "b")
    where = origins(loaded)
    assert where["server.port"].text == "--set server.port=3"
    assert where["server.host"].text == "TOKENSPEED_SERVER__HOST"
    assert where["server.max_choices"].text == "f.yaml:4"
    assert where["server.api_key"].source is Source.DEFAULT


def test_a_fault_names_the_variable_or_flag_that_made_it() -> None:
    layers = [
        from_yaml("cache: {page_tokens: 3}\n", Settings, name="f.yaml"),
        from_environment({"TOKENSPEED_SCHEDULER__MAX_SEQS": "2", "TOKENSPEED_LOG__FORMAT": "xml"}, Settings),
        from_assignments([parse_assignment(t, Settings) for t in ("scheduler.max_num_seqs=x", "nonsense")], Settings),
    ]
    with pytest.raises(SettingsError) as caught:
        resolve(layers)
    assert str(caught.value).splitlines() == [
        "f.yaml:1: cache.page_tokens: expected one of 8, 16, 32, 64, 128; got 3",
        "TOKENSPEED_LOG__FORMAT: log.format: expected one of text, json; got 'xml'",
        "TOKENSPEED_SCHEDULER__MAX_SEQS: scheduler.max_seqs: unknown key; did you mean scheduler.max_num_seqs?",
        "--set scheduler.max_num_seqs=x: scheduler.max_num_seqs: expected a whole number, got 'x'",
        "--set nonsense: settings: expected section.key=value",
    ]


def test_a_fault_is_told_although_a_later_layer_overrides_it() -> None:
    layers = [
        from_yaml("server: {port: seven}\n", Settings, name="f.yaml"),
        from_assignments([parse_assignment("server.port=7", Settings)], Settings),
    ]
    with pytest.raises(SettingsError, match=r"^f.yaml:1: server.port: expected a whole number, got 'seven'$"):
        resolve(layers)


def test_variables_without_a_section_are_not_settings() -> None:
    environ = {"TOKENSPEED_DATA_PLANE_SYNC_DEBUG": "error", "TOKENSPEED_PORT": "tcp://10.0.0.1:80", "HOME": "/"}
    assert from_environment(environ, Settings).given == ()


def test_one_key_set_to_two_values_by_flags_is_a_fault() -> None:
    twice = [parse_assignment(t, Settings) for t in ("server.port=1", "server.port=2")]
    with pytest.raises(SettingsError, match=r"given twice, also by --set server.port=1"):
        resolve([from_assignments(twice, Settings)])
    same = [parse_assignment(t, Settings) for t in ("server.port=1", "server.port=1")]
    assert resolve([from_assignments(same, Settings)]).settings.server.port == 1


def test_text_keys_take_any_text_from_flags_and_variables() -> None:
    layer = from_assignments(
        [parse_assignment(t, Settings) for t in ("server.api_key=12345", "model.served_name=null", "model.source=a=b")],
        Settings,
    )
    got = resolve([layer]).settings
    assert (got.server.api_key, got.model.served_name, got.model.source) == ("12345", None, "a=b")


def test_a_secret_is_shown_neither_in_origins_nor_in_faults() -> None:
    layer = from_assignments([parse_assignment("server.api_key=hunter2", Settings)], Settings)
    assert origins(resolve([layer]))["server.api_key"].text == "--set server.api_key=***"
    empty = from_environment({"TOKENSPEED_SERVER__API_KEY": ""}, Settings)
    with pytest.raises(SettingsError, match=r"^TOKENSPEED_SERVER__API_KEY: server.api_key: not usable"):
        resolve([empty])


def test_files_that_cannot_be_read_are_faults_with_a_name(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(SettingsError, match=r"none.yaml: settings: cannot be read: No such file"):
        load_settings(missing)
    with pytest.raises(SettingsError, match=r"cannot be read: Is a directory"):
        load_settings(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"model:\n  served_name: caf\xe9\n")
    with pytest.raises(SettingsError, match=r"latin.yaml:2: settings: not UTF-8"):
        load_settings(latin)
    bom = tmp_path / "bom.yaml"
    bom.write_bytes(b"\xef\xbb\xbfserver: {port: 9}\n")
    assert load_settings(bom).server.port == 9
    assert read_file(bom).faults == ()


def test_load_takes_assignments_and_reads_the_environment_only_when_given() -> None:
    assert load_settings(sets=["server.port=0"]).server.port == 0
    assert load_settings(environ={"TOKENSPEED_SERVER__PORT": "5"}).server.port == 5
