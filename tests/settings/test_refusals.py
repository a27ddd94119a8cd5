"""Keys whose feature this build does not have are refused where they were set."""

from __future__ import annotations

import pytest

from tokenspeed.errors import SettingsError
from tokenspeed.settings.keys import keys
from tokenspeed.settings.load import load_text
from tokenspeed.settings.model import ParallelSettings, Settings, SimulatedSettings
from tokenspeed.settings.refusals import REFUSALS, refuse


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("parallel:\n  tensor: 2\n", "s.yaml:2: parallel.tensor: this build serves one rank"),
        ("parallel:\n\n  pipeline: 4\n", "s.yaml:3: parallel.pipeline: this build serves one rank"),
        ("parallel: {data: 8}\n", "s.yaml:1: parallel.data: this build serves one rank"),
        ("simulated: {seed: 3}\n", "s.yaml:1: simulated.seed: it describes the simulated device"),
        ("wire: {transport: memory}\n", "s.yaml:1: wire.transport: the processes of a deployment speak zmq"),
    ],
)
def test_a_refused_value_names_its_line(text: str, start: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_text(text, name="s.yaml")
    assert str(caught.value).startswith(start)


def test_all_refused_values_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load_text("parallel: {tensor: 2, data: 2}\nsimulated: {seed: 3}\n")
    assert len(str(caught.value).splitlines()) == 3


def test_the_same_rules_hold_for_settings_built_in_python() -> None:
    refuse(Settings())
    with pytest.raises(SettingsError, match=r"settings: parallel.tensor: .*\n.*simulated.seed"):
        refuse(Settings(parallel=ParallelSettings(tensor=2), simulated=SimulatedSettings(seed=3)))


def test_every_refusal_names_a_key_of_the_tree() -> None:
    paths = {key.path for key in keys(Settings)}
    assert [refusal.path for refusal in REFUSALS if refusal.path not in paths] == []


def test_a_rank_is_not_built_from_refused_settings() -> None:
    from tokenspeed.compose.engine import rank_engine

    settings = Settings(parallel=ParallelSettings(tensor=2))
    with pytest.raises(SettingsError, match=r"settings: parallel.tensor: this build serves one rank"):
        with rank_engine(settings, connect=lambda info, wakeup: None):  # type: ignore[arg-type,return-value]
            pass
