"""A frontend over a scripted engine: on the test's own loop, or behind a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

import attrs
from piece_tokenizer import piece_tokenizer
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine
from starlette.types import ASGIApp

from tokenspeed.frontend.calls import CallLog, NoCallLog
from tokenspeed.frontend.engine_client import EngineClient, connect_client
from tokenspeed.frontend.gate import SequenceGate, refusing_gate
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.app import build_app
from tokenspeed.frontend.ports import SteadyClock
from tokenspeed.frontend.prompts import prompt_maker
from tokenspeed.frontend.routing import LeastLoaded
from tokenspeed.frontend.server import HttpServer, bind_socket, serving
from tokenspeed.frontend.service import GenerationService
from tokenspeed.frontend.text.chat import compile_template
from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.frontend.text.tokenizer import TextTokenizer
from tokenspeed.frontend.workers import text_workers
from tokenspeed.plane.ports import Clock
from tokenspeed.plane.traces import NoTracer, Tracer
from tokenspeed.settings.model import ServerSettings
from tokenspeed.telemetry.meters import PrometheusHttpMeter, load_gauges, prometheus_request_meter
from tokenspeed.telemetry.registry import MetricRegistry, new_registry

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@attrs.frozen(kw_only=True, eq=False)
class FrontendRig:
    """The parts of one frontend."""

    engine: ScriptedEngine
    client: EngineClient
    service: GenerationService
    api: Api
    app: ASGIApp
    registry: MetricRegistry

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the metrics, by its name without prefix; 0 if it was never written."""
        return sample(self.registry.scrape().decode(), name, **labels)


def sample(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == f"tokenspeed:{name}" and labels.items() <= found.labels.items():
                return found.value
    return 0.0


@contextlib.asynccontextmanager
async def frontend(
    engine: ScriptedEngine | None = None,
    *,
    settings: ServerSettings | None = None,
    tokenizer: TextTokenizer | None = None,
    gate: SequenceGate | None = None,
    clock: Clock | None = None,
    chat: bool = True,
    family: OutputFamily | None = None,
    template: str = TEMPLATE,
    calls: CallLog | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[FrontendRig]:
    """A frontend on the running loop. The engine is stepped by the test unless it was started."""
    engine = engine or ScriptedEngine()
    settings = settings or ServerSettings(port=0)
    tokenizer = tokenizer or piece_tokenizer()
    clock = clock or SteadyClock()
    registry = new_registry(engine.info.model, process=False)
    client = connect_client(engine, clock=clock, meter=load_gauges(registry, engine.info), rid_prefix="t")
    service = GenerationService(
        engines=(client,),
        router=LeastLoaded(),
        tokenizer=tokenizer,
        gate=gate or refusing_gate((engine.info,)),
        clock=clock,
        meter=prometheus_request_meter(registry),
        timeout_s=settings.request_timeout_s,
        calls=calls or NoCallLog(),
        tracer=tracer or NoTracer(),
    )
    workers = text_workers()
    api = Api(
        service=service,
        prompts=prompt_maker(
            tokenizer,
            compile_template(template) if chat else None,
            workers,
            max_model_len=engine.info.max_model_len,
        ),
        settings=settings,
        metrics=registry,
        meter=PrometheusHttpMeter(registry=registry),
        family=family or OutputFamily(calls="hermes"),
        created=1,
        version="test",
    )
    try:
        yield FrontendRig(
            engine=engine, client=client, service=service, api=api, app=build_app(api, clock=clock), registry=registry
        )
    finally:
        client.close()
        workers.close()
        engine.stop()


@attrs.define(eq=False)
class LiveServer:
    """A real server on a thread; `rig` lives on that thread's loop."""

    url: str
    rig: FrontendRig
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    ended: threading.Event = attrs.field(factory=threading.Event)

    @property
    def engine(self) -> ScriptedEngine:
        return self.rig.engine

    def on_loop(self, job: Callable[[], object]) -> object:
        """The result of `job`, run on the server's loop."""
        done: Future[object] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(job()))
        return done.result(10)

    def in_flight(self) -> int:
        found = self.on_loop(lambda: self.rig.service.in_flight)
        assert isinstance(found, int)
        return found


@contextlib.contextmanager
def live_server(engine: ScriptedEngine | None = None, **options: object) -> Iterator[LiveServer]:
    """A frontend behind uvicorn on a loopback port, over an engine that runs on its own thread.

    Args:
        options: for `frontend`.
    """
    engine = engine or ScriptedEngine()
    ready: Future[LiveServer] = Future()
    stop = asyncio.Event()

    async def main() -> None:
        async with frontend(engine, **options) as rig:  # type: ignore[arg-type]
            sock = bind_socket("127.0.0.1", 0, stalled_s=rig.api.settings.request_timeout_s)
            async with serving(rig.app, rig.api, sock) as server:
                live = LiveServer(url=server.address, rig=rig, server=server, loop=asyncio.get_running_loop())
                ready.set_result(live)
                await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as exc:
            if not ready.done():
                ready.set_exception(exc)
            raise

    engine.start()
    thread = threading.Thread(target=run, name="test-frontend")
    thread.start()
    live = ready.result(10)
    try:
        yield live
    finally:
        with contextlib.suppress(RuntimeError):  # the test stopped the server itself
            live.loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
