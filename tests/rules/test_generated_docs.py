"""What scripts write in the documents is what they write today, and agrees with what the loader says."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import regions
from source_tree import ROOT

from tokenspeed.errors import SettingsError
from tokenspeed.settings.expected import bounds, expected
from tokenspeed.settings.flags import FLAGS
from tokenspeed.settings.keys import Key, keys
from tokenspeed.settings.layers import from_environment
from tokenspeed.settings.load import load_settings, load_text, resolve
from tokenspeed.settings.model import Settings
from tokenspeed.settings.refusals import REFUSALS
from tokenspeed.settings.yaml_text import from_yaml

CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
KEYS = tuple(keys(Settings))


@pytest.mark.parametrize("script", ["make_configuration", "make_metrics", "make_dashboard"])
def test_a_generated_file_is_what_its_script_writes(script: str) -> None:
    made: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / f"{script}.py"))
    assert made["FILE"].read_text(encoding="utf-8") == made["text"](), "out of date: run make docs"


def row(key: Key) -> list[str]:
    reference = CONFIGURATION[: CONFIGURATION.index("## Values that are refused")]
    (line,) = [line for line in reference.splitlines() if line.startswith(f"| `{key.dotted}` | ")]
    return [cell.strip().replace("\\|", "|") for cell in line.removesuffix(" |").split(" | ")]


def written(default: str) -> str:
    """The default as an operator would write it behind ``--set key=``."""
    return default.strip("`").replace('""', "")


def test_the_reference_has_a_row_with_everything_about_each_key() -> None:
    defaults = []
    for key in KEYS:
        _, takes, default, meaning, flags = row(key)
        assert takes.startswith(expected(key.kind, key.validator))
        assert takes.endswith(", or null") is key.nullable
        defaults.append(f"{key.dotted}={written(default)}")
        assert key.help in meaning
        for flag in FLAGS:
            assert all((f"`{name}`" in flags) is (flag.key == key.dotted) for name in flag.names), key.dotted
    assert load_settings(sets=defaults) == Settings()


def out_of_range(key: Key) -> list[str]:
    """YAML of the right type that the key does not take."""
    limits = bounds(key.validator)
    wrong = {
        "minimum": lambda least: least - 1,
        "exclusiveMinimum": lambda limit: limit,
        "maximum": lambda most: most + 1,
        "minLength": lambda _: '""',
        "pattern": lambda _: '"***"',
        "enum": lambda words: "999" if isinstance(words[0], int) else "neither",
    }
    return [str(make(limits[name])) for name, make in wrong.items() if name in limits]


def faults(values: dict[str, str]) -> dict[str, str]:
    """What is said of a file with these values, by key."""
    text = "".join(
        f"{section}:\n" + "".join(f"  {name}: {values[key.dotted]}\n" for name, key in inside)
        for section in dict.fromkeys(key.path[0] for key in KEYS)
        if (inside := [(k.path[1], k) for k in KEYS if k.path[0] == section and k.dotted in values])
    )
    with pytest.raises(SettingsError) as caught:
        load_text(text, name="s.yaml")
    parts = (line.split(": ", 2) for line in str(caught.value).splitlines())
    return {key: said for _, key, said in parts}


def test_a_value_of_another_type_is_refused_with_what_the_reference_says_the_key_takes() -> None:
    said = faults({key.dotted: "{}" for key in KEYS})
    for key in KEYS:
        if key.secret:
            assert said[key.dotted] == "not usable (the value is not shown)"
        elif "enum" not in bounds(key.validator):
            kind = said[key.dotted].removeprefix("expected ").split(" got ")[0].rstrip(",;")
            assert expected(key.kind, key.validator).startswith(kind), said[key.dotted]


def test_a_value_out_of_range_is_refused_in_the_words_of_the_reference() -> None:
    open_keys = [key for key in KEYS if not key.secret]
    for at in range(2):
        wrong = {key.dotted: out_of_range(key)[at] for key in open_keys if len(out_of_range(key)) > at}
        said = faults(wrong)
        for key in open_keys:
            if key.dotted in wrong:
                assert said[key.dotted].startswith(f"expected {expected(key.kind, key.validator)}"), key.dotted
    assert all(len(out_of_range(key)) <= 2 for key in KEYS)


def test_the_faults_that_the_document_shows_are_told_in_these_words() -> None:
    text = "# mine.yaml\nmodel: {source: x}\nscheduler:\n  max_num_seqs: 0\ncache:\n  page_token: 16\n"
    layers = [
        from_yaml(text, Settings, name="mine.yaml"),
        from_environment({"TOKENSPEED_LOG__LEVEL": "loud"}, Settings),
    ]
    with pytest.raises(SettingsError) as caught:
        resolve(layers)
    assert f"```text\n{caught.value}\n```" in CONFIGURATION


def test_every_refusal_is_in_the_document_with_its_reason() -> None:
    section = CONFIGURATION[CONFIGURATION.index("## Values that are refused") :]
    for refusal in REFUSALS:
        (line,) = [line for line in section.splitlines() if refusal.reason in line]
        assert f"`{'.'.join(refusal.path)}`" in line


def test_a_region_that_is_missing_or_left_over_stops_the_script() -> None:
    text = "<!-- begin a: by b -->\nold\n<!-- end a -->\n"
    assert regions.filled(text, {"a": "new"}) == "<!-- begin a: by b -->\n\nnew\n\n<!-- end a -->\n"
    for names in ({}, {"a": "", "b": ""}):
        with pytest.raises(ValueError, match="has the regions"):
            regions.filled(text, names)
