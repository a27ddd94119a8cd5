"""Host tier, images and the retraction chain as an operator writes them."""

from __future__ import annotations

import json

import pytest

from tokenspeed.errors import SettingsError
from tokenspeed.settings.load import load_settings, load_text
from tokenspeed.settings.model import Retraction, Settings, WritePolicy
from tokenspeed.settings.schema import plain, schema


def test_a_retraction_chain_is_a_list_of_words_in_a_file_and_on_the_command_line() -> None:
    chain = (Retraction.SNAPSHOT, Retraction.ABORT)
    assert load_text("scheduler:\n  retraction: [snapshot, abort]\n").scheduler.retraction == chain
    assert load_settings(sets=["scheduler.retraction=[snapshot, abort]"]).scheduler.retraction == chain
    assert Settings().scheduler.retraction == tuple(Retraction)


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ("[snapshot]", "must contain recompute or abort"),
        ("[]", "must contain recompute or abort"),
        ("[abort, abort]", "at most once"),
        ("abort", "expected a list"),
        ("[aborted]", "did you mean abort"),
    ],
)
def test_a_chain_that_leaves_a_request_without_a_way_out_is_refused(chain: str, why: str) -> None:
    with pytest.raises(SettingsError, match=rf"bad.yaml:2: scheduler.retraction.*{why}"):
        load_text(f"scheduler:\n  retraction: {chain}\n", name="bad.yaml")


@pytest.mark.contract("CT-2")
def test_the_write_policy_goes_with_a_host_tier() -> None:
    sets = ["cache.host_gib=1", "cache.write_policy=write_back"]
    assert load_settings(sets=sets).cache.write_policy is WritePolicy.WRITE_BACK
    with pytest.raises(SettingsError, match=r"cache\.write_policy.*set cache\.host_gib"):
        load_settings(sets=sets[1:])


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["cache.images=2"], r"cache\.images.*set cache\.host_gib"),
        (["cache.images=2", "cache.host_gib=1", "scheduler.retraction=[recompute]"], r"cache\.images.*snapshot"),
        (["cache.host_gib=1", "cache.prefix=false"], r"cache\.host_gib.*cache\.prefix"),
        (["cache.host_gib=-1"], r"cache\.host_gib"),
    ],
)
def test_a_tier_setting_without_an_effect_is_refused(sets: list[str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        load_settings(sets=sets)


def test_the_schema_and_the_printed_values_have_the_words_of_the_chain() -> None:
    words = ["snapshot", "recompute", "abort"]
    leaf = schema()["properties"]["scheduler"]["properties"]["retraction"]
    assert (leaf["type"], leaf["items"], leaf["default"]) == ("array", {"enum": words}, words)
    assert json.loads(json.dumps(plain(Settings())))["scheduler"]["retraction"] == words
