"""`tokenspeed.Engine`: a whole engine inside the caller's process.

The same rank as in a deployment (`rank_engine`) on a control thread named ``ts-control``, the same
generation service as the HTTP server's on a thread named ``ts-frontend``, and the in-memory wire
between them. Nothing process-wide is touched: no signals, no garbage-collection settings.

    with tokenspeed.Engine() as engine:
        for done in engine.generate(["The capital of France is"], SamplingOptions(max_tokens=8)):
            print(done.text)
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import attrs

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress, Progress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.compose.delta_pull import DeltaPull
from tokenspeed.compose.engine import RankEngine, rank_engine
from tokenspeed.compose.loop_calls import result_of
from tokenspeed.compose.offline_inputs import InputReader, Message, Prompt
from tokenspeed.compose.parts import check_parts
from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.frontend.engine_client import EngineClient, connect_client
from tokenspeed.frontend.gate import waiting_gate
from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult, GenerationInput
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.frontend.ports import QuietMeter, SteadyClock
from tokenspeed.frontend.routing import LeastLoaded
from tokenspeed.frontend.service import GenerationService
from tokenspeed.frontend.text.chat import chat_template
from tokenspeed.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from tokenspeed.plane.messages import AbortRequest, ControlOp, ControlReply, EngineInfo
from tokenspeed.plane.ports import EngineLink, FrontendLink, Wakeup
from tokenspeed.settings.load import load_settings
from tokenspeed.settings.model import Settings
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.memory import MemoryFrontendLink, memory_pair
from tokenspeed.wire.operations import operation_of

log = logging.getLogger("tokenspeed.engine")
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Completion:
    """What became of one prompt.

    Attributes:
        choices: by index; one unless `SamplingOptions.n` says more.
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceResult, ...]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Of the first choice: stop, length or abort."""
        return self.choices[0].finish_reason


@attrs.define(eq=False)
class Ends:
    """Writer: the opener. Both ends of the in-memory wire, and why the control thread died."""

    engine: MemoryFrontendLink | None = None
    link: EngineLink | None = None
    failure: BaseException | None = None


class Engine:
    """Generate from Python. Open with ``with``, or call `close` when done.

    Args:
        settings: a `Settings`, the path of a YAML file, or None for the defaults.
        progress: told of downloads, loading and warm-up.
        parts: replacements, see `tokenspeed.compose.parts`.
    Raises: SettingsError, ModelError: nothing stays open.

    All methods may be called from several threads at once. The async ones run on any event loop.
    """

    def __init__(
        self,
        settings: Settings | str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        **parts: object,
    ) -> None:
        check_parts(parts)  # ahead of downloads; also keeps this module's own arguments of `rank_engine` its own
        watch = progress or NoProgress()
        chosen = settings if isinstance(settings, Settings) else load_settings(settings)
        self._lifetime = ExitStack()
        self._ends = Ends()
        with ExitStack() as opening:
            resolved = resolve_model(chosen.model, watch)
            checkpoint = open_checkpoint(resolved)
            rank = opening.enter_context(
                rank_engine(
                    chosen,
                    connect=self._connect,
                    resolved=resolved,
                    progress=watch,
                    **cast("dict[str, Any]", parts),
                )
            )
            self._settings = chosen
            self._rank = rank
            self._reader = InputReader(
                info=rank.info,
                tokenizer=load_tokenizer(checkpoint),
                chat=chat_template(checkpoint),
                max_choices=chosen.server.max_choices,
            )
            self._control = threading.Thread(target=self._run_rank, name="ts-control", daemon=True)
            self._control.start()
            opening.callback(self._stop_rank)
            self._loop = asyncio.new_event_loop()
            self._frontend = threading.Thread(target=self._loop.run_forever, name="ts-frontend", daemon=True)
            self._frontend.start()
            opening.callback(self._stop_loop)
            self._service = self._on_loop(self._open_service())
            self._lifetime = opening.pop_all()

    # ---- what callers use ---------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What this engine serves: model, context length, vocabulary, limits."""
        return self._rank.info

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._reader.tokenizer

    @property
    def rank(self) -> RankEngine:
        """The rank behind this engine, for tests and instruments."""
        return self._rank

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling: SamplingOptions | None = None) -> list[Completion]:
        """Complete all `prompts` (texts or token ids), batched; results in their order. Ctrl-C ends them all.

        Raises: RequestError: a prompt or the sampling is invalid, before anything runs. EngineDead.
        """
        return self._on_loop(self._generate(self._inputs(prompts, sampling)))

    def stream(self, prompt: Prompt, sampling: SamplingOptions | None = None) -> Generator[ChoiceDelta, None, None]:
        """Deltas of one prompt as they come; closing the generator cancels the request."""
        (inp,) = self._inputs([prompt], sampling)
        yield from self._stream(inp)

    def chat(self, messages: Sequence[Message], sampling: SamplingOptions | None = None) -> Completion:
        """Answer a conversation through the model's chat template."""
        return self.generate([self.chat_prompt(messages)], sampling)[0]

    def chat_stream(
        self, messages: Sequence[Message], sampling: SamplingOptions | None = None
    ) -> Generator[ChoiceDelta, None, None]:
        """As `chat`, as it comes."""
        yield from self.stream(self.chat_prompt(messages), sampling)

    async def generate_async(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingOptions | None = None
    ) -> list[Completion]:
        """As `generate`, awaitable from any event loop."""
        with self._blaming():
            return await asyncio.wrap_future(self._submit(self._generate(self._inputs(prompts, sampling))))

    async def stream_async(
        self, prompt: Prompt, sampling: SamplingOptions | None = None
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """As `stream`, for ``async for`` on any event loop."""
        (inp,) = self._inputs([prompt], sampling)
        pull = DeltaPull(deltas=self._service.stream(inp))
        try:
            while (delta := await self._next_async(pull)) is not None:
                yield delta
        finally:
            if not self._loop.is_closed():
                await asyncio.wrap_future(self._submit(pull.close()))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises: RequestError: the model has no chat template, or it refuses these messages.
        """
        return self._reader.chat_prompt(messages)

    def close(self) -> None:
        """Stop the engine; running requests end with EngineDead. A second call does nothing."""
        self._lifetime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def control(self, method: str, **arguments: object) -> str:
        """Carry out an operation by the name of its route, as ``control("sleep", level=1)``; blocks until it is done.

        Requests of other threads go on meanwhile, as the operation lets them. Returns what the operation
        tells: a recording's file, the JSON of a question, or "".

        Raises: RequestError: the engine refuses, or there is no such operation or argument.
        """
        try:
            op = operation_of(0, method, arguments)
        except WireError as fault:
            raise RequestError(str(fault), field=fault.field) from fault
        if isinstance(op, AbortRequest):
            raise RequestError("abort_request: stop iterating over a stream, or cancel its task", field="method")
        reply: ControlReply = self._on_loop(self._called(op))
        if not reply.success:
            raise RequestError(reply.message)
        return reply.message

    # ---- the two threads ----------------------------------------------------------------------

    def _connect(self, info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
        self._ends.engine, self._ends.link = memory_pair(info, wakeup)
        return self._ends.engine

    def _run_rank(self) -> None:
        try:
            self._rank.run()
        except BaseException as error:
            # The edge of the control thread: told to everyone who waits, as the cause of their EngineDead.
            self._ends.failure = error
            log.exception("the engine failed", exc_info=error)
            if self._ends.engine is not None:
                self._ends.engine.announce_death()
                self._ends.engine.close()

    def _stop_rank(self) -> None:
        self._rank.stop()
        self._control.join()

    def _stop_loop(self) -> None:
        self._on_loop(self._close_service())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._frontend.join()
        self._loop.close()

    async def _open_service(self) -> GenerationService:
        if self._ends.link is None:
            raise EngineDead("the engine did not connect")
        quiet, clock = QuietMeter(), SteadyClock()
        client: EngineClient = connect_client(self._ends.link, clock=clock, meter=quiet, rid_prefix="py")
        return GenerationService(
            engines=(client,),
            router=LeastLoaded(),
            tokenizer=self._reader.tokenizer,
            gate=waiting_gate((self._rank.info,)),
            clock=clock,
            meter=quiet,
            timeout_s=self._settings.server.request_timeout_s,
        )

    async def _called(self, op: ControlOp) -> ControlReply:
        (engine,) = self._service.engines
        limit_s = self._settings.server.request_timeout_s
        return await engine.call(lambda call_id: attrs.evolve(op, call_id=call_id), timeout_s=limit_s)

    async def _close_service(self) -> None:
        for engine in self._service.engines:
            engine.close("the engine was closed")

    # ---- helpers ------------------------------------------------------------------------------

    def _inputs(self, prompts: Prompt | Sequence[Prompt], sampling: SamplingOptions | None) -> list[GenerationInput]:
        self._alive()
        return self._reader.inputs(prompts, sampling)

    async def _generate(self, inputs: list[GenerationInput]) -> list[Completion]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._service.run(inp)) for inp in inputs]
        except BaseExceptionGroup as several:
            # The first failure is the cause; the others were cancelled because of it.
            raise several.exceptions[0] from None
        return [
            Completion(prompt_token_ids=tuple(inp.prompt_ids.tolist()), choices=tuple(task.result()))
            for inp, task in zip(inputs, tasks, strict=True)
        ]

    def _stream(self, inp: GenerationInput) -> Generator[ChoiceDelta, None, None]:
        pull = DeltaPull(deltas=self._service.stream(inp))
        try:
            while (delta := self._on_loop(pull.next())) is not None:
                yield delta
        finally:
            self._drop(pull)

    def _drop(self, pull: DeltaPull) -> None:
        """End a stream that is not wanted any longer; the engine's end has ended it already.

        A generator that nobody holds is closed by whichever thread collects it, the loop's own among them.
        """
        if not self._loop.is_closed():
            on_it = threading.current_thread() is self._frontend
            (self._submit if on_it else self._on_loop)(pull.close())

    def _alive(self) -> asyncio.AbstractEventLoop:
        if self._loop.is_closed():
            raise EngineDead("the engine was closed")
        return self._loop

    def _loop_for(self, work: Coroutine[Any, Any, T]) -> asyncio.AbstractEventLoop:
        try:
            return self._alive()
        except EngineDead:
            work.close()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop_for(work))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        with self._blaming():
            return result_of(self._loop_for(work), work)

    async def _next_async(self, pull: DeltaPull) -> ChoiceDelta | None:
        with self._blaming():
            return await asyncio.wrap_future(self._submit(pull.next()))

    @contextmanager
    def _blaming(self) -> Generator[None, None, None]:
        """An EngineDead has what ended the control thread as its cause."""
        try:
            yield
        except EngineDead as dead:
            raise dead from self._ends.failure


__all__ = ["Completion", "Engine", "SamplingOptions"]
