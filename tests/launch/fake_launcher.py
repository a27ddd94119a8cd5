"""`serve` over the fake processes: called by tests, and run as a script by tests that send it signals."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, TextIO

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.sources import CheckpointKind, ResolvedModel
from tokenspeed.launch.serve import serve
from tokenspeed.launch.starter import Programs
from tokenspeed.launch.supervisor import GracePeriods
from tokenspeed.settings.model import (
    ModelSettings,
    ParallelSettings,
    ServerSettings,
    Settings,
    WireSettings,
)

HERE = Path(__file__).parent
PROGRAMS = Programs(
    rank=(sys.executable, "-P", str(HERE / "fake_rank.py")),
    frontend=(sys.executable, "-P", str(HERE / "fake_frontend.py")),
)
GRACE = GracePeriods(frontend_s=20.0, ranks_s=20.0, second_signal_s=0.5)


@attrs.frozen
class Lines:
    """Progress as lines that a test can wait for."""

    out: TextIO

    def step(self, what: str, done: int, total: int) -> None:
        self.out.write(f"progress {what} {done}/{total}\n")
        self.out.flush()


def resolve(settings: ModelSettings, progress: Progress) -> ResolvedModel:
    name = settings.served_name or "ok"
    progress.step("resolving", 1, 1)
    return ResolvedModel(kind=CheckpointKind.RANDOM, path=None, name="toy", served_name=name, origin=settings.source)


def toy_settings(scratch: Path, *, ranks: str = "ok", frontend: str = "ok", handshake: str | None = None) -> Settings:
    return Settings(
        model=ModelSettings(source=f"random:{ranks}", served_name=frontend, cache_dir=str(scratch)),
        parallel=ParallelSettings(data=len(ranks.split(","))),
        server=ServerSettings(port=0, shutdown_timeout_s=20.0),
        wire=WireSettings(handshake=handshake, handshake_timeout_s=20.0),
    )


def toy_serve(settings: Settings, *, out: TextIO, err: TextIO, **options: Any) -> int:
    fields: dict[str, Any] = {"grace": GRACE, "programs": PROGRAMS, "resolve": resolve, **options}
    return serve(settings, progress=Lines(out), out=out, err=err, **fields)


def main(scratch: str, ranks: str, frontend: str) -> int:
    settings = toy_settings(Path(scratch), ranks=ranks, frontend=frontend)
    status = toy_serve(settings, out=sys.stdout, err=sys.stderr)
    assert "torch" not in sys.modules
    return status


if __name__ == "__main__":
    # A test run in the background may have inherited an ignored SIGINT, which the launcher respects.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(*sys.argv[1:]))
