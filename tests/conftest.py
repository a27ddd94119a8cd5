"""What all tests share: the contract marker and its report."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

for switch in ("TOKENSPEED_DATA_PLANE_SYNC_DEBUG", "TOKENSPEED_JIT_COMPILE_CHECK"):
    os.environ.setdefault(switch, "error")  # a stall or a late compilation fails the test that causes it (ER-8)

# Compute threads that spin at barriers make a step ten times slower when anything else wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported
os.environ.setdefault("TOKENSPEED_CAPTURE_CHECK", "1")  # a mutable argument crossing to the device fails (DP-49)

# A server of a test's that lives for more than seconds need not load what the test does not use.
os.environ.setdefault("TOKENSPEED_GRAMMAR__PRELOAD", "false")

from contract_report import statements  # noqa: E402 - the path is set above


class ContractReport:
    """Collects which statements the tests of this run name, and which of these tests passed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.named: dict[str, list[str]] = {}
        self.outcome: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        idents = dict(report.user_properties).get("contract", ())
        for ident in idents:
            tests = self.named.setdefault(str(ident), [])
            if report.nodeid not in tests:
                tests.append(report.nodeid)
        if report.when == "call":
            self.outcome[report.nodeid] = report.passed
        elif report.failed:
            self.outcome[report.nodeid] = False

    def pytest_sessionfinish(self) -> None:
        if self.path is None:
            return
        passed = {
            ident: tests
            for ident, tests in sorted(self.named.items())
            if any(self.outcome.get(test, False) for test in tests)
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"passed": passed, "named": self.named}, indent=1) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-report", type=Path, default=None, metavar="FILE", help="write which contract statements passed here"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # under xdist the controller collects
        config.pluginmanager.register(ContractReport(config.getoption("--contract-report")), "contract-report")


END_S = 60.0
"""Between the last test and the end of the process."""


def pytest_unconfigure() -> None:
    """What keeps the process from ending, such as a thread that a failed test has left, is named; it ends all the same.

    No test's time limit applies any more, and the interpreter waits for threads for ever.
    """
    faulthandler.dump_traceback_later(END_S, exit=True, file=sys.__stderr__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = {statement.ident for statement in statements()}
    wrong = []
    for item in items:
        idents = tuple(str(ident) for marker in item.iter_markers("contract") for ident in marker.args)
        wrong += [f"{item.nodeid}: {ident}" for ident in idents if ident not in known]
        if idents:
            item.user_properties.append(("contract", idents))
    if wrong:
        raise pytest.UsageError("contract marker with an id that docs/contract does not have:\n  " + "\n  ".join(wrong))
