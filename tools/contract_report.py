"""Which statements of docs/contract a passing test shows.

::

    pytest --contract-report build/contract.json
    python tools/contract_report.py build/contract.json

Several reports may be given: a statement shown in one is shown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

CONTRACT = Path(__file__).resolve().parents[1] / "docs" / "contract"
TAGS = ("core", "multi", "opt", "gpu")
STATEMENT = re.compile(r"^- \*\*([A-Z]{2}-\d+)\*\* \[(\w+)\] (.+)$", re.MULTILINE)


class Statement(NamedTuple):
    """One numbered statement: where it stands and what tag it has."""

    ident: str
    tag: str
    file: str
    text: str


def statements(folder: Path = CONTRACT) -> tuple[Statement, ...]:
    """Every statement, by file in the order of its text."""
    found = []
    for path in sorted(folder.glob("*.md")):
        found += [Statement(m[1], m[2], path.name, m[3]) for m in STATEMENT.finditer(path.read_text(encoding="utf-8"))]
    return tuple(found)


def render(known: tuple[Statement, ...], shown: set[str], *, texts: bool = False) -> str:
    """The report: a table by file, then the statements that nothing shows."""
    lines = [f"{'file':36} {'statements':>10} {'shown':>6} {'none':>6} {'gpu':>5}"]
    missing: list[str] = []
    for file in dict.fromkeys(statement.file for statement in known):
        here = [statement for statement in known if statement.file == file]
        seen = [s for s in here if s.ident in shown]
        none = [s for s in here if s.ident not in shown]
        gpu = sum(s.tag == "gpu" for s in here)
        lines.append(f"{file:36} {len(here):10} {len(seen):6} {len(none):6} {gpu:5}")
        for tag in TAGS:
            idents = [s for s in none if s.tag == tag]
            if idents and texts:
                missing += [f"  {file} [{tag}] {s.ident}: {s.text}" for s in idents]
            elif idents:
                missing.append(f"  {file} [{tag}]: {' '.join(s.ident for s in idents)}")
    total = sum(s.ident in shown for s in known)
    lines.append(
        f"{'total':36} {len(known):10} {total:6} {len(known) - total:6} {sum(s.tag == 'gpu' for s in known):5}"
    )
    core = [s for s in known if s.tag == "core"]
    lines.append(f"\nof {len(core)} core statements {sum(s.ident in shown for s in core)} are shown by a passing test")
    lines += ["\nshown by none:", *missing]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="statements of docs/contract, and which of them a passing test shows")
    parser.add_argument("reports", nargs="+", type=Path, help="files that pytest --contract-report wrote")
    parser.add_argument("--texts", action="store_true", help="print the statements that nothing shows in full")
    options = parser.parse_args(arguments)
    shown: set[str] = set()
    for path in options.reports:
        shown.update(json.loads(path.read_text(encoding="utf-8"))["passed"])
    sys.stdout.write(render(statements(), shown, texts=options.texts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
