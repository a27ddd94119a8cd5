"""The contract documents, their markers and the report of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from contract_report import CONTRACT, TAGS, Statement, main, render, statements

from tokenspeed.plane import ports

pytest_plugins = ["pytester"]

PREFIXES = {
    "async-futures-executor.md": "AF",
    "cache-tiers.md": "CT",
    "collectives-and-groups.md": "CG",
    "control-pause-memory-weights.md": "CP",
    "data-plane.md": "DP",
    "depth-and-overlap.md": "DO",
    "epd-encode.md": "EE",
    "eplb.md": "EB",
    "extension-rules.md": "ER",
    "frontend-wire.md": "FW",
    "grammar.md": "GR",
    "history-seeds.md": "HS",
    "ingress-and-submission.md": "IS",
    "kv-events-and-metrics.md": "KM",
    "output-and-logprobs.md": "OL",
    "pd-disaggregation.md": "PD",
    "process-and-threads.md": "PT",
    "round-anatomy.md": "RA",
    "scheduler-and-plan.md": "SP",
    "startup-and-shutdown.md": "SS",
}


def test_every_statement_has_its_own_id_its_files_prefix_and_a_known_tag() -> None:
    known = statements()
    idents = [statement.ident for statement in known]
    assert len(idents) == len(set(idents)) == 680
    assert [s.ident for s in known if s.tag not in TAGS] == []
    assert [s.ident for s in known if s.ident.split("-")[0] != PREFIXES[s.file]] == []


@pytest.mark.parametrize("file", sorted(PREFIXES))
def test_the_ids_of_a_file_run_from_one_without_a_gap(file: str) -> None:
    numbers = [int(s.ident.split("-")[1]) for s in statements() if s.file == file]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_bullet_that_looks_like_a_statement_is_read_as_one() -> None:
    bold = [m for path in CONTRACT.glob("*.md") for m in re.findall(r"^- \*\*\S+", path.read_text(), re.MULTILINE)]
    assert len(bold) == len(statements())


def test_the_index_counts_the_statements_of_each_file() -> None:
    text = (CONTRACT / "INDEX.md").read_text()
    for file, prefix in PREFIXES.items():
        here = [s for s in statements() if s.file == file]
        counts = [sum(s.tag == tag for s in here) for tag in TAGS]
        assert f"| {file} | {prefix} | {len(here)} | {' | '.join(map(str, counts))} |" in text


def test_every_id_that_a_document_mentions_exists() -> None:
    idents = {s.ident for s in statements()}
    text = "".join(path.read_text() for path in sorted(CONTRACT.parent.rglob("*.md")))
    mentioned = set(re.findall(rf"\b(?:{'|'.join(PREFIXES.values())})-\d+\b", text))
    assert sorted(mentioned - idents) == []


def _listed(title: str) -> list[str]:
    text = (CONTRACT / "data-plane.md").read_text()
    section = text[text.index(f"### {title}\n") :].split("\n### ")[0]
    return re.findall(r"^- `(\w+)`", section, re.MULTILINE)


@pytest.mark.contract("DP-44", "DP-46")
@pytest.mark.parametrize("protocol", [ports.DataPlane, ports.DeviceHandle], ids=lambda p: p.__name__)
def test_the_document_lists_every_operation(protocol: type) -> None:
    methods = [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
    assert _listed(protocol.__name__) == methods


def test_the_report_counts_what_passed_and_lists_what_nothing_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = (
        Statement("AA-1", "core", "a.md", "one"),
        Statement("AA-2", "gpu", "a.md", "two"),
        Statement("AA-3", "core", "a.md", "three"),
    )
    text = render(known, {"AA-1"})
    assert "of 2 core statements 1 are shown" in text
    assert "a.md [core]: AA-3" in text
    assert "a.md [gpu]: AA-2" in text
    assert "a.md [core] AA-3: three" in render(known, {"AA-1"}, texts=True)
    report = tmp_path / "r.json"
    report.write_text(json.dumps({"passed": {"RA-7": ["t"]}, "named": {}}))
    assert main([str(report)]) == 0
    assert "RA-7 " not in capsys.readouterr().out.split("shown by none")[1]


def test_a_marker_counts_only_if_its_test_passed_and_an_unknown_id_stops_the_run(pytester: pytest.Pytester) -> None:
    root = Path(__file__).resolve().parents[2]
    pytester.makeini("[pytest]\nmarkers =\n    contract: x\n")
    conftest = (
        (root / "tests" / "conftest.py")
        .read_text()
        .replace("Path(__file__).resolve().parents[1]", f"Path({str(root)!r})")
    )
    pytester.makeconftest(conftest)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.contract("RA-1", "RA-2")
        def test_good(): pass

        @pytest.mark.contract("RA-2", "RA-3")
        def test_bad(): assert False

        @pytest.mark.contract("RA-4")
        def test_skipped(): pytest.skip("no")

        @pytest.fixture
        def late():
            yield
            raise ValueError

        @pytest.mark.contract("RA-5")
        def test_torn(late): pass
        """)
    pytester.runpytest_subprocess("--contract-report", "r.json", "-p", "no:cacheprovider")
    got = json.loads((pytester.path / "r.json").read_text())
    assert sorted(got["passed"]) == ["RA-1", "RA-2"]
    assert sorted(got["named"]) == ["RA-1", "RA-2", "RA-3", "RA-4", "RA-5"]
    pytester.makepyfile("import pytest\n\n@pytest.mark.contract('RA-999')\ndef test_x(): pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*RA-999*"])
