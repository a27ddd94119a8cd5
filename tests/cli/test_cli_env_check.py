"""`env` reports facts without secrets; `check` finds what would keep `serve` from starting."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenspeed.cli import check
from tokenspeed.cli.console import Console
from tokenspeed.cli.env import machine, variables
from tokenspeed.cli.main import main, parse
from tokenspeed.errors import ModelError, SettingsError

TINY = "random:tiny-llama"


def console() -> Console:
    return Console(stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), environ={})


def checked(*arguments: str, survey: object = None, engine: object = None) -> tuple[int, str]:
    talk = console()
    options = parse(["check", *arguments])
    keywords = {} if engine is None else {"engine": engine}
    status = check.run(options, talk, survey=survey or (lambda settings, checkpoint: ("fits",)), **keywords)  # type: ignore[arg-type]
    return status, talk.stdout.getvalue()  # type: ignore[attr-defined]


def test_env_names_machine_packages_and_variables() -> None:
    talk = console()
    assert main(["env", "--json"], talk) == 0
    facts = json.loads(talk.stdout.getvalue())  # type: ignore[attr-defined]
    assert list(facts) == ["tokenspeed", "python", "packages", "machine", "variables"]
    assert "processor" in facts["machine"]


def test_env_shows_our_variables_and_hides_secrets() -> None:
    environ = {"TOKENSPEED_SERVER__API_KEY": "hunter2", "OMP_NUM_THREADS": "2", "HOME": "/x", "HF_TOKEN": "t"}
    assert variables(environ) == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "2", "TOKENSPEED_SERVER__API_KEY": "***"}


def test_env_reads_limits_of_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Toy 9000\nflags\t\t: fpu avx2 fma\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    2097152 kB\n")
    facts = machine(tmp_path)
    assert facts["cgroup cpu.max"] == "150000 100000"
    assert facts["cgroup memory.max"] == "none"
    assert (facts["processor"], facts["instructions"]) == ("Toy 9000", "avx2 fma")
    assert facts["memory available"] == "2.00 GiB"


def test_check_says_what_would_run_and_succeeds() -> None:
    status, out = checked(
        TINY, "--port", "0", survey=lambda settings, checkpoint: ("memory: 1 MiB", "compute: 1 thread")
    )
    assert status == 0
    assert "problem" not in out
    for part in ("settings: valid", "layers", "memory: 1 MiB", "compute: 1 thread", "the kernel picks a port"):
        assert part in out


def test_check_fails_on_a_model_that_is_not_there() -> None:
    status, out = checked("./no-such-folder", "--port", "0")
    assert status == 1
    assert "problem  model:" in out
    assert "no-such-folder" in out


def test_a_model_that_would_be_downloaded_is_no_problem_unless_offline(tmp_path: Path) -> None:
    cold = ("pypi:some-model-package", "--port", "0", "--download-dir", str(tmp_path))
    status, out = checked(*cold)
    assert (status, "serve would download it" in out) == (0, True)
    assert checked(*cold, "--offline")[0] == 1


def test_check_fails_on_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out = checked(TINY, "--port", str(port))
    assert status == 1
    assert f"server.port {port}: Address already in use" in out


def test_check_fails_on_a_host_that_is_not_here() -> None:
    status, out = checked(TINY, "--host", "192.0.2.1", "--port", "0")
    assert status == 1
    assert "server.host 192.0.2.1" in out


def test_check_fails_if_memory_does_not_suffice() -> None:
    def survey(settings: object, checkpoint: object) -> tuple[str, ...]:
        raise SettingsError("device.memory_gib: too small")

    status, out = checked(TINY, "--port", "0", survey=survey)
    assert status == 1
    assert "problem  device: device.memory_gib: too small" in out


@pytest.mark.parametrize("good", [True, False])
def test_load_starts_the_whole_engine(good: bool) -> None:
    @contextmanager
    def engine(options: object, talk: object) -> Iterator[object]:
        if not good:
            raise ModelError("weights: truncated")
        choice = SimpleNamespace(text=" end")
        yield SimpleNamespace(generate=lambda prompts, sampling: [SimpleNamespace(choices=(choice,))])

    status, out = checked(TINY, "--port", "0", "--load", engine=engine)
    assert status == (0 if good else 1)
    assert ("continues 'The' with ' end'" if good else "problem  load: weights: truncated") in out
