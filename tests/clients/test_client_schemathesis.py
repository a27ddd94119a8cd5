"""Whatever the document of the API allows and forbids, the server answers as it says; no 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PHASES = os.environ.get("SCHEMATHESIS_PHASES", "fuzzing")
"""`coverage,fuzzing` tries every bound of every field as well, some 3,000 requests."""

EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "10")

pytest.importorskip("schemathesis", reason="schemathesis is only in the clients' environment")


@pytest.mark.timeout(300)
def test_no_generated_request_breaks_the_server_or_its_document(server_url: str, tmp_path: Path) -> None:
    # positive_data_acceptance: a prompt that fits the schema may still be too long for the model.
    checks = "positive_data_acceptance,unsupported_method"
    ran = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{server_url}/openapi.json"),
            *("--seed", "7", "--max-examples", EXAMPLES, "--phases", PHASES, "--no-color"),
            *("--exclude-checks", checks, "--exclude-path-regex", "^/(metrics|docs|get_|v1/tokenize|v1/detokenize)"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
