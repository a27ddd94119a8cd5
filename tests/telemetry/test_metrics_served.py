"""Metrics of a whole deployment: ranks, relay and frontend in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from pathlib import Path

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families
from source_tree import ROOT

SETTINGS = """
model: {{source: "random:tiny-llama"}}
device: {{threads: 1, memory_gib: 0.25}}
scheduler: {{max_num_seqs: 4}}
server: {{port: 0}}
metrics:
  port: 0
  outputs:
    - jsonl={scratch}/metrics.jsonl
    - slow_metric_output:HeldOutput={scratch}
"""


@attrs.frozen(kw_only=True)
class Served:
    process: subprocess.Popen[str]
    url: str
    ranks_url: str
    scratch: Path


@pytest.fixture
def served(tmp_path: Path) -> Generator[Served, None, None]:
    """A deployment whose second output holds its first message until `release` is written to."""
    os.mkfifo(tmp_path / "release")
    (tmp_path / "s.yaml").write_text(SETTINGS.format(scratch=tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenspeed", "serve", str(tmp_path / "s.yaml")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'telemetry'}"},
    )
    assert process.stdout is not None
    ranks_url = ""
    try:
        for line in process.stdout:
            if found := re.search(r"metrics of the ranks at (\S+)", line):
                ranks_url = found[1]
            if found := re.search(r"serving \S+ at (\S+)", line):
                yield Served(process=process, url=found[1], ranks_url=ranks_url, scratch=tmp_path)
                break
        else:
            pytest.fail("the deployment did not come up")
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.stdout.close()
        process.wait(60.0)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60.0) as answer:
        return str(answer.read().decode())


def complete(url: str, tokens: int) -> None:
    body = {"model": "tiny-llama", "prompt": "hi", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + ("{engine=0}" if sample.labels.get("engine") == "0" else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.contract("KM-25", "KM-27")
def test_ranks_numbers_are_on_metrics_and_a_held_output_delays_no_round(served: Served) -> None:
    complete(served.url, 6)
    complete(served.url, 6)
    # The output holds the relay at its first message all this time.
    for text in (get(f"{served.url}/metrics"), get(served.ranks_url)):
        now = samples(text)
        assert now["tokenspeed:decode_tokens_total{engine=0}"] == 10  # the first token of each comes out of prefill
        assert now["tokenspeed:request_queue_time_seconds_count{engine=0}"] == 2
        assert now["tokenspeed:request_inference_time_seconds_count{engine=0}"] == 2
    frontend, ranks = samples(get(f"{served.url}/metrics")), samples(get(served.ranks_url))
    assert frontend["tokenspeed:generation_tokens_total"] == 12
    assert "tokenspeed:generation_tokens_total" not in ranks
    assert ranks["tokenspeed:num_requests_running{engine=0}"] == 0
    assert (served.scratch / "made_in").exists()
    assert not (served.scratch / "batches").exists()

    (served.scratch / "release").write_text("go on")  # a named pipe: until the output reads
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60.0) == 0
    assert int((served.scratch / "batches").read_text()) > 1
    made_in = int((served.scratch / "made_in").read_text())
    assert made_in != os.getpid()
    lines = [json.loads(line) for line in (served.scratch / "metrics.jsonl").read_text().splitlines()]
    decoded = sum(e[2] for line in lines for e in line["events"] if e[0] == "decode_tokens_total")
    assert decoded == 10
    assert {line["dropped"] for line in lines} == {0}
    # Only the relay imported the output's module.
    assert (served.scratch / "imported_by").read_text().split() == [str(made_in)]
