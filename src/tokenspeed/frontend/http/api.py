"""What every endpoint works with, and the endpoint itself: one HTTP route as an ASGI application."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol, TypeVar

import attrs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.errors import RequestError
from tokenspeed.frontend.http.errors import CLIENT_CLOSED, CallFailed, ClientGone, failure
from tokenspeed.frontend.http.response_store import ResponseStore
from tokenspeed.frontend.http.tokens import TokenWords
from tokenspeed.frontend.prompts import PromptMaker
from tokenspeed.frontend.service import GenerationService
from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.settings.model import ServerSettings

T = TypeVar("T")

READING = 64
"""Requests that may be read and tokenized beyond those the gate lets generate."""


ID = re.compile(rb"[\x21-\x7e]{1,256}")
"""What may be echoed of a client's id."""

CLIENT_GONE = "client_gone"
"""The code in the line about a client that left before its request was read."""


class HttpMeter(Protocol):
    def answered(self, *, handler: str, method: str, status: int, seconds: float) -> None: ...


class Scraper(Protocol):
    def scrape(self) -> bytes:
        """The metrics in Prometheus' text format 0.0.4."""
        ...


@attrs.define(eq=False)
class ApiState:
    """Writer: Api. `busy` counts requests being worked on, `draining` refuses further ones."""

    busy: int = 0
    draining: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Api:
    """The collaborators of the endpoints.

    Attributes:
        family: how the model writes reasoning and tool calls.
        model_path: what other programs load the model by; default: its name.
        responses: those that can be asked for later.
        created: Unix time the model was made available at.
        version: of this package.
        wall_s: Unix time.
        new_id: a fresh id for an answer.
    """

    service: GenerationService
    prompts: PromptMaker
    settings: ServerSettings
    metrics: Scraper
    meter: HttpMeter
    created: int
    version: str
    family: OutputFamily = attrs.field(factory=lambda: OutputFamily(calls="hermes"))
    model_path: str = attrs.field(default=attrs.Factory(lambda self: self.service.info.model, takes_self=True))
    wall_s: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: secrets.token_hex(12)
    responses: ResponseStore = attrs.field(
        default=attrs.Factory(lambda self: ResponseStore(limit=self.settings.max_stored_responses), takes_self=True)
    )
    state: ApiState = attrs.field(factory=ApiState)

    @property
    def words(self) -> TokenWords:
        return TokenWords(tokenizer=self.prompts.tokenizer)

    @property
    def model(self) -> str:
        return self.service.info.model

    @property
    def admin_key(self) -> str | None:
        """What opens the control routes; None: they are off."""
        return self.settings.admin_key

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Origins of the web pages that are served; "*": every page's."""
        return self.settings.allowed_origins

    @property
    def max_body_bytes(self) -> int:
        return int(self.settings.max_body_mib * (1 << 20))

    def trouble(self) -> str:
        """Why new requests cannot be served, or ""."""
        if self.state.draining:
            return "the server is shutting down"
        return self.service.trouble(stall_s=self.settings.stall_timeout_s)

    def drain(self) -> None:
        """Refuse new work from here on; what runs goes on."""
        self.state.draining = True

    def enter(self) -> None:
        """Start work on a request.

        Raises: RequestError: 503 while draining; 429, too many requests are being worked on.
        """
        state, most = self.state, self.service.gate.limit + READING
        if state.draining:
            raise RequestError("the server is shutting down", status=503)
        if state.busy >= most:
            raise RequestError(f"{most} requests are being worked on; retry later", status=429)
        state.busy += 1

    def leave(self) -> None:
        self.state.busy -= 1


@attrs.frozen(kw_only=True, eq=False)
class Endpoint:
    """One route. Failures before a response starts are answered here.

    Attributes:
        name: the route's path; the metrics' handler.
        work: takes a place among the requests being worked on until its response is sent.
    """

    api: Api
    name: str
    handle: Callable[[Api, Request], Awaitable[Response]]
    work: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entered = False
        try:
            if self.work:
                self.api.enter()
                entered = True
            response = await self.handle(self.api, Request(scope, receive))
        except ClientGone as gone:
            if not gone.in_call:
                self._refused(scope, CLIENT_CLOSED, CLIENT_GONE, "")
            return
        except CallFailed as failed:
            response = failure(failed.why).response()
            response.raw_headers += echoed_id(scope)
        except Exception as exc:  # the edge: every failure becomes an answer
            found = failure(exc)
            error = found.body.error
            self._refused(scope, found.status, error.code or "", error.param or "")
            response = found.response()
            response.raw_headers += echoed_id(scope)
        else:
            await response(scope, receive, send)
            return
        finally:
            if entered:
                self.api.leave()
        await response(scope, receive, send)

    def _refused(self, scope: Scope, status: int, code: str, field: str) -> None:
        """Tell of a request that did not become a call."""
        if self.work:
            client = given_id(scope).decode("latin-1")
            self.api.service.calls.refused(client, path=self.name, status=status, code=code, field=field)


def given_id(scope: Scope) -> bytes:
    """The client's ``X-Request-Id``, whatever that holds; empty: there is none."""
    return next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")


def echoed_id(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The client's id as an error's header, if it is one."""
    value = given_id(scope)
    return [(b"x-request-id", value)] if ID.fullmatch(value) else []


async def unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, cancelled if the client closes its connection first.

    A client that shuts down its sending side only counts as gone: HTTP/1.1 clients keep it open.

    Args:
        work: a call of the service, which tells of its end.

    Raises: ClientGone; CallFailed: `work` raised.
    """
    watch = _Watch(task=asyncio.current_task())
    watcher = asyncio.ensure_future(_disconnected(receive))
    watcher.add_done_callback(watch.left)
    try:
        return await work
    except ClientGone:
        raise
    except asyncio.CancelledError:
        if watch.settled():
            raise ClientGone(in_call=True) from None
        raise
    except Exception as exc:
        raise CallFailed(exc) from exc
    finally:
        watch.task = None
        watcher.cancel()
        # A failure's traceback has this frame: with a task in it, the whole request would be a cycle.
        del watch, watcher


@attrs.define(eq=False)
class _Watch:
    """Cancels the work of a client that leaves. Writers: `unless_gone`, and the end of what it watches with.

    Attributes:
        task: does the work; None: it is over.
    """

    task: asyncio.Task[object] | None
    gone: bool = False

    def left(self, watcher: asyncio.Task[None]) -> None:
        # Not to have been told is to have lost the client, too.
        if self.task is not None and not watcher.cancelled():
            watcher.exception()
            self.gone = True
            self.task.cancel()

    def settled(self) -> bool:
        """Whether the client's leaving is all that the task was cancelled for."""
        return self.gone and self.task is not None and self.task.uncancel() == 0


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
