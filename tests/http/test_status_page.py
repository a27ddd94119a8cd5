"""The page at / shows what /metrics exports, and nothing from anywhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from frontend_rig import live_server

from tokenspeed.frontend.http.status_page import PAGE
from tokenspeed.settings.model import ServerSettings
from tokenspeed.telemetry.table import METRICS, Kind

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_page_is_open_and_may_load_nothing_from_elsewhere() -> None:
    with live_server(settings=ServerSettings(port=0, api_key="k")) as live:
        answer = httpx.get(f"{live.url}/", timeout=20)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(rb"https?://(?!www\.w3\.org/2000/svg)", PAGE)


def test_every_metric_it_reads_is_exported() -> None:
    text = PAGE.decode()
    read = set(re.findall(r'(?:sum|by)\((?:before\.)?at, "(\w+)"', text))
    read |= set(re.findall(r'(?:rate|of)\("(\w+)"\)', text))
    read |= set(re.findall(r'\["(?:ttft|itl)", "(\w+)"\]', text)) | set(re.findall(r"P \+ \"(\w+)\"", text))
    exported = {spec.name: spec.kind for spec in METRICS}
    assert len(read) >= 14
    assert read <= set(exported)
    for name in re.findall(r'rate\("(\w+)"\)', text):
        assert exported[name] is Kind.COUNTER


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_model_state_and_engines(tmp_path: Path) -> None:
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
    with live_server(settings=ServerSettings(port=0)) as live:
        model = httpx.get(f"{live.url}/v1/models", timeout=20).json()["data"][0]["id"]
        shown = subprocess.run(
            [
                *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet),
                *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000", "--dump-dom", f"{live.url}/"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
    assert f'<h1 id="model">{model}</h1>' in shown
    assert 'class="up">serving<' in shown
    assert shown.count("<polyline") >= 4
    assert re.search(r'id="engines">.*<td>0</td>', shown, re.DOTALL)
