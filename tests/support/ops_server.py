"""A whole server in the test's process: HTTP on loopback, the memory wire, and a rank on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import httpx
from ops_rig import tiny_settings

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.compose.engine import RankEngine, rank_engine
from tokenspeed.compose.serving import HttpFrontend, serve_http
from tokenspeed.frontend.server import bind_socket
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import EngineLink, FrontendLink, Wakeup
from tokenspeed.settings.model import Settings
from tokenspeed.wire.memory import memory_pair

ADMIN = {"Authorization": "Bearer admin"}
TIMEOUT_S = 30.0


@attrs.define(eq=False)
class OpsServer:
    """`admin` holds the admin key, `user` no key."""

    url: str
    admin: httpx.Client
    user: httpx.Client
    frontend: HttpFrontend
    engine: RankEngine
    served: threading.Thread
    ran: threading.Thread

    def generate(self, **body: object) -> dict:
        answer = self.user.post("/generate", json=body)
        answer.raise_for_status()
        found: dict = answer.json()
        return found

    def call(self, name: str, **body: object) -> dict:
        """Carry out a control route, which must succeed."""
        answer = self.admin.post(f"/{name}", json=body)
        assert answer.status_code == 200, answer.text
        found: dict = answer.json()
        return found


@contextmanager
def ops_server(settings: Settings | None = None) -> Iterator[OpsServer]:
    chosen = settings or tiny_settings()
    chosen = attrs.evolve(chosen, server=attrs.evolve(chosen.server, port=0, admin_key="admin"))
    ends: list[EngineLink] = []
    ready: list[str] = []
    up = threading.Event()

    def connect(info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
        engine, link = memory_pair(info, wakeup)
        ends.append(link)
        return engine

    def on_ready(url: str) -> None:
        ready.append(url)
        up.set()

    resolved = resolve_model(chosen.model, NoProgress())
    open_checkpoint(resolved)
    with rank_engine(chosen, connect=connect, resolved=resolved) as engine:
        engine.serving.sync_debug.arm()  # as in a rank's own process: what waits in a round is found
        ran = threading.Thread(target=engine.run, name="ts-control")
        ran.start()
        sock = bind_socket("127.0.0.1", 0, stalled_s=30)
        frontend = serve_http(chosen, resolved, lambda: tuple(ends), sock, on_ready=on_ready)
        served = threading.Thread(target=frontend.run, name="ts-http")
        served.start()
        try:
            assert up.wait(TIMEOUT_S)
            with (
                httpx.Client(base_url=ready[0], headers=ADMIN, timeout=TIMEOUT_S) as admin,
                httpx.Client(base_url=ready[0], timeout=TIMEOUT_S) as user,
            ):
                yield OpsServer(
                    url=ready[0], admin=admin, user=user, frontend=frontend, engine=engine, served=served, ran=ran
                )
        finally:
            frontend.stop()
            frontend.stop()
            served.join(TIMEOUT_S)
            engine.stop()
            ran.join(TIMEOUT_S)
