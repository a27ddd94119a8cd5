"""What is decided before a gateway is started."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import attrs
import pytest
from fake_launcher import PROGRAMS, toy_serve, toy_settings

from tokenspeed.errors import SettingsError
from tokenspeed.launch.gateway_main import gateway_arguments, model_name, reserved_port
from tokenspeed.settings.choices import Gateway
from tokenspeed.settings.model import ServerSettings, Settings

SMG = ServerSettings(port=0, gateway=Gateway.SMG)


def serve(settings: Settings, *, package: str, headless: bool = False) -> int:
    programs = attrs.evolve(PROGRAMS, gateway_package=package)
    return toy_serve(settings, out=io.StringIO(), err=io.StringIO(), programs=programs, headless=headless)


def test_a_gateway_that_is_not_installed_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    settings = attrs.evolve(toy_settings(tmp_path), server=SMG)
    with pytest.raises(
        SettingsError, match=r"server.gateway: smg is not installed here.*pip install 'tokenspeed-py\[smg\]'"
    ):
        serve(settings, package="no_such_package")
    assert not list(tmp_path.glob("*.pid"))


def test_a_headless_engine_takes_no_gateway_of_its_own(tmp_path: Path) -> None:
    settings = attrs.evolve(toy_settings(tmp_path, handshake="tcp://127.0.0.1:9"), server=SMG)
    with pytest.raises(SettingsError, match=r"server\.gateway: a headless"):
        serve(settings, package="json", headless=True)


@pytest.mark.parametrize(
    ("served", "name"),
    [("smollm2", "smollm2"), ("org/name", "org/name"), ("/models/a", "model"), ("../a", "model"), ("", "model")],
)
def test_the_model_keeps_its_name_where_a_folder_below_can_have_it(served: str, name: str) -> None:
    assert model_name(served) == name


def test_arguments_of_the_operators_come_last() -> None:
    server = attrs.evolve(SMG, gateway_args=("--policy", "round_robin"), shutdown_timeout_s=2.5, max_body_mib=1.0)
    arguments = gateway_arguments(Settings(server=server), model="m", port=8, wire="tcp://127.0.0.1:9", metrics_port=10)
    assert arguments[-2:] == ["--policy", "round_robin"]
    assert arguments[arguments.index("--shutdown-grace-period-secs") + 1] == "3"
    assert arguments[arguments.index("--max-payload-size") + 1] == str(1 << 20)


def test_a_reserved_port_goes_to_nobody_who_asks_for_any_and_can_be_listened_on() -> None:
    with reserved_port() as port:
        taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(50)]
        assert port not in {one.getsockname()[1] for one in taken}
        for one in taken:
            one.close()
        with socket.create_server(("127.0.0.1", port)) as server, reserved_port() as other:
            assert server.getsockname()[1] == port != other
            with pytest.raises(OSError, match="in use"), reserved_port(port=port):
                pass
