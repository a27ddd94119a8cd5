"""Plants one fault at a time in a copy of the control plane, and expects a test to catch it.

::

    python tools/planted_faults.py              # every fault, a few seconds to a minute each
    python tools/planted_faults.py --only salt --seconds 60
    python tools/planted_faults.py --texts      # only whether each fault can still be planted

The faults are in ``tools/faults.py``. The copy lies in a temporary folder, and the tree is left alone. A fault whose
text is not in its file any more is an error: bring it up to date. Faults of the scheduler meet the random lives of
``tests/scheduler/model_world.py``, by seed; one that outlives them, and those of other rooms, must be caught by a
scenario test of `SCENARIOS`. Prints what caught each fault; fails if one lived.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
FAILED_LIFE, FAILED_TEST = 3, 1
"""Exit statuses of `DRIVER` and of pytest; any other is no catch: the package does not import, or the like."""

DRIVER = """
import sys, time, traceback
from model_seen import Seen
from model_world import run_trace

end, seed = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    try:
        run_trace(seed, steps=50, seen=Seen())
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).split(chr(10))[0][:70] or frame.line[:90]
        print(f"seed {seed}: {type(error).__name__} in {frame.name}: {said}")
        sys.exit(3)
    seed += 1
print(f"{seed} lives")
"""

SCENARIOS = {
    "scheduler": (
        *(
            f"scheduler/test_scheduler_{name}.py"
            for name in (
                "waiting",
                "planning",
                "pressure",
                "ends",
                "kv_events",
                "host_blocks",
                "host_tier",
                "pending_copies",
                "images",
                "groups",
                "prefix",
                "storage",
                "model",
            )
        ),
        "scheduler/test_storage_transactions.py",
        "scheduler/test_remote_streams.py",
        "scheduler/test_remote_admission.py",
    ),
    "control": tuple(f"control/{path.name}" for path in sorted((ROOT / "tests" / "control").glob("test_*.py"))),
}
"""By room, below ``tests``: files for moments that random lives seldom come to."""


def altered(fault: Fault) -> tuple[Path, str]:
    """The fault's file below the package, and its text with the fault. Raises: LookupError: it cannot be planted."""
    path = Path(fault.room, fault.file)
    text = (ROOT / "src" / "tokenspeed" / path).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise LookupError(f"its text is {text.count(fault.old)} times in {path}")
    return path, text.replace(fault.old, fault.new)


def copied(folder: Path) -> Path:
    package = folder / "tokenspeed"
    shutil.copytree(ROOT / "src" / "tokenspeed", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def _environment(folder: Path) -> dict[str, str]:
    paths = [folder, *(ROOT / "tests" / part for part in ("scheduler", "control", "support"))]
    path = os.pathsep.join(map(str, paths))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def caught_by_life(folder: Path, seconds: float) -> tuple[bool, str]:
    """Whether a life failed, and how."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, this file's own text
            [sys.executable, "-c", DRIVER, str(seconds)],
            env=_environment(folder),
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True, "a life that does not end"
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.returncode == FAILED_LIFE, said[-1] if said else "nothing said"


def caught_by_scenario(folder: Path, room: str, *, first: str = "") -> tuple[bool, str]:
    """Whether a scenario test failed, and which; files with `first` in their name are tried before others."""
    files = [str(ROOT / "tests" / name) for name in sorted(SCENARIOS[room], key=lambda name: first not in name)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, this tree's tests
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                "-k",
                "not leave_nothing_out",
                *files,
            ],
            cwd=ROOT,
            env=_environment(folder),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True, "a scenario that does not end"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return done.returncode == FAILED_TEST, failed[0][:160] if failed else "and no scenario fails"


def caught_by(fault: Fault, seconds: float) -> tuple[bool, str]:
    try:
        path, text = altered(fault)
    except LookupError as wrong:
        return False, str(wrong)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (copied(folder) / path).write_text(text, encoding="utf-8")
        if fault.room == "scheduler":
            caught, how = caught_by_life(folder, seconds)
            if caught:
                return caught, how
        return caught_by_scenario(folder, fault.room, first=Path(fault.file).stem.split("_")[0])


def unplanted(room: str) -> str:
    """The scenario that fails without any fault, and so would seem to catch every one."""
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        failed, how = caught_by_scenario(Path(name), room)
        return how if failed else ""


def cannot_be_planted() -> list[str]:
    found = []
    for fault in FAULTS:
        try:
            altered(fault)
        except LookupError as wrong:
            found.append(f"{fault.name}: {wrong}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults in copies of the control plane and see them caught.")
    parser.add_argument("--only", default="", help="a regular expression; faults whose names it finds")
    parser.add_argument("--seconds", type=float, default=20.0, help="of random lives for each fault, at most")
    parser.add_argument("--texts", action="store_true", help="only say which faults cannot be planted any more")
    wanted = parser.parse_args()
    if wanted.texts:
        found = cannot_be_planted()
        print("\n".join(found) or f"{len(FAULTS)} faults can be planted")  # noqa: T201 - a script
        return 1 if found else 0
    faults = [fault for fault in FAULTS if re.search(wanted.only, fault.name)]
    for room in dict.fromkeys(fault.room for fault in faults):
        if failing := unplanted(room):
            print(f"without a fault: {failing}")  # noqa: T201
            return 1
    lived = 0
    for fault in faults:
        caught, how = caught_by(fault, wanted.seconds)
        lived += not caught
        print(f"{'caught' if caught else 'LIVED '}  {fault.name}\n        {how}", flush=True)  # noqa: T201
    print(f"{len(faults) - lived} of {len(faults)} caught")  # noqa: T201
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
