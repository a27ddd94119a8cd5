"""The frontend process's wiring: tokenizer, generation service and HTTP server over engine links."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence

import attrs

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.frontend.calls import CallLines, NoCallLog
from tokenspeed.frontend.engine_client import connect_client
from tokenspeed.frontend.gate import refusing_gate
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.app import build_app
from tokenspeed.frontend.ports import SteadyClock
from tokenspeed.frontend.prompts import PromptMaker, prompt_maker
from tokenspeed.frontend.routing import LeastLoaded
from tokenspeed.frontend.server import serving
from tokenspeed.frontend.service import GenerationService
from tokenspeed.frontend.text.chat import chat_template
from tokenspeed.frontend.text.output.families import OutputFamily, output_family
from tokenspeed.frontend.text.tokenizer import load_tokenizer
from tokenspeed.frontend.tracing import JoinTrace
from tokenspeed.frontend.workers import text_workers
from tokenspeed.plane.ports import EngineLink
from tokenspeed.settings.model import Settings
from tokenspeed.telemetry.meters import PrometheusHttpMeter, load_gauges, prometheus_request_meter
from tokenspeed.telemetry.registry import new_registry
from tokenspeed.telemetry.tracing import open_tracer
from tokenspeed.version import __version__


@attrs.define(eq=False)
class StopSignal:
    """Writer: HttpFrontend. `loop` is there while it runs; `hurry` ends the requests that still do."""

    asked: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    event: asyncio.Event | None = None
    hurry: Callable[[], None] | None = None


@attrs.frozen(kw_only=True, eq=False)
class HttpFrontend:
    """The HTTP server of one deployment; `run` on the process's main thread, `stop` from any thread.

    Attributes:
        model_path: what other programs load the model by.
        sock: bound, not listening; closed at the end of `run`.
        on_ready: told the server's URL once it accepts connections.
        ranks_dir: where the ranks keep their metrics; None: they have none.
    """

    settings: Settings
    prompts: PromptMaker
    model_path: str
    family: OutputFamily
    links: tuple[EngineLink, ...]
    sock: socket.socket
    on_ready: Callable[[str], None]
    ranks_dir: str | None = None
    signal: StopSignal = attrs.field(factory=StopSignal)

    def run(self) -> None:
        """Serve until `stop`; requests then get ``server.shutdown_timeout_s`` to finish."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        """Drain and end; a second call ends running requests at once."""
        signal = self.signal
        hurried, signal.asked = signal.asked, True
        if signal.loop is None or signal.event is None or signal.loop.is_closed():
            return
        signal.loop.call_soon_threadsafe(signal.event.set)
        if hurried and signal.hurry is not None:
            signal.loop.call_soon_threadsafe(signal.hurry)

    async def _serve(self) -> None:
        signal = self.signal
        signal.event, signal.loop = asyncio.Event(), asyncio.get_running_loop()
        clock, infos = SteadyClock(), tuple(link.info for link in self.links)
        registry = new_registry(infos[0].model, ranks_dir=self.ranks_dir)
        loop = signal.loop
        registry.gauge("frontend_tasks").set_function(lambda: float(len(asyncio.all_tasks(loop))))
        registry.gauge("frontend_allocations").set_function(lambda: float(sys.getallocatedblocks()))
        # Unique over restarts too: an engine that outlives its frontend may still hold old ids.
        prefix = secrets.token_hex(4)
        engines = tuple(
            connect_client(link, clock=clock, meter=load_gauges(registry, link.info), rid_prefix=f"{prefix}{i}")
            for i, link in enumerate(self.links)
        )
        tracer = open_tracer(self.settings.tracing, service="frontend", model=infos[0].model)
        service = GenerationService(
            engines=engines,
            router=LeastLoaded(),
            tokenizer=self.prompts.tokenizer,
            gate=refusing_gate(infos),
            clock=clock,
            meter=prometheus_request_meter(registry),
            timeout_s=self.settings.server.request_timeout_s,
            tracer=tracer,
            calls=CallLines() if self.settings.log.requests else NoCallLog(),
        )
        signal.hurry = service.end_all
        api = Api(
            service=service,
            prompts=self.prompts,
            model_path=self.model_path,
            settings=self.settings.server,
            metrics=registry,
            meter=PrometheusHttpMeter(registry=registry),
            family=self.family,
            created=int(time.time()),
            version=__version__,
        )
        app = build_app(api, clock=clock)
        async with serving(JoinTrace(app=app) if tracer.active else app, api, self.sock) as server:
            self.on_ready(server.address)
            if not signal.asked:
                stopped = asyncio.ensure_future(signal.event.wait())
                ended = asyncio.ensure_future(server.closed())
                await asyncio.wait((stopped, ended), return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
        for engine in engines:
            engine.close()
        self.prompts.workers.close()
        tracer.close()


def serve_http(
    settings: Settings,
    resolved: ResolvedModel,
    connect: Callable[[], Sequence[EngineLink]],
    sock: socket.socket,
    *,
    on_ready: Callable[[str], None],
    ranks_dir: str | None = None,
) -> HttpFrontend:
    """The HTTP frontend; reads the tokenizer and the chat template, serves nothing yet.

    Args:
        connect: waits for the engines and gives the links to them; called last, so that what can be
            read is read while they load.
    Raises: ModelError: the checkpoint's tokenizer or chat template cannot be used.
    """
    checkpoint = open_checkpoint(resolved)
    tokenizer, chat = load_tokenizer(checkpoint), chat_template(checkpoint)
    family = output_family(
        calls=settings.server.tool_parser.value,
        reasoning=settings.server.reasoning_parser.value,
        template=checkpoint.chat_template,
    )
    links = connect()
    prompts = prompt_maker(
        tokenizer=tokenizer,
        chat=chat,
        workers=text_workers(threads=settings.server.text_threads, limit=settings.server.text_queue),
        max_model_len=links[0].info.max_model_len,
    )
    return HttpFrontend(
        settings=settings,
        prompts=prompts,
        model_path=resolved.model_path,
        family=family,
        links=tuple(links),
        sock=sock,
        on_ready=on_ready,
        ranks_dir=ranks_dir,
    )
