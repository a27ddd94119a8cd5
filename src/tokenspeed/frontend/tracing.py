"""The frontend's span of a call, within the caller's trace and around the engine's spans."""

from __future__ import annotations

from contextvars import ContextVar

import attrs
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.plane.traces import Attribute, Begun, SpanValue, TraceEntry, Tracer

CALLER_TRACE: ContextVar[str] = ContextVar("CALLER_TRACE", default="")
"""The ``traceparent`` of the HTTP request that the running task answers."""

MAX_TRACEPARENT = 256


@attrs.frozen(kw_only=True, eq=False)
class JoinTrace:
    """Lets every route's generation belong to the trace that its caller named."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
            CALLER_TRACE.set(given[:MAX_TRACEPARENT].decode("latin-1"))
        await self.app(scope, receive, send)


@attrs.define(eq=False)
class CallSpan:
    """Writer: GenerationService. One call to it: its choices' sums.

    Attributes:
        trace: the caller's ``traceparent``, or "".
        begun: None: this call is not among those sampled.
    """

    tracer: Tracer
    rid: str
    trace: str
    begun: Begun | None
    choices: int
    first_s: float | None = None
    prompt_tokens: dict[int, int] = attrs.field(factory=dict[int, int])

    @property
    def handed_on(self) -> str:
        """What the engine is told to put its spans under."""
        return self.trace if self.begun is None else self.begun.trace

    def answered(self, *, prompt_index: int, prompt_tokens: int, now_s: float) -> None:
        """A prompt's first token came."""
        self.first_s = now_s if self.first_s is None else self.first_s
        self.prompt_tokens[prompt_index] = prompt_tokens

    def end(self, *, began_s: float, now_s: float, wall_s: float, output_tokens: int, reason: str) -> None:
        """`wall_s`: seconds since the epoch at `now_s`."""
        if self.begun is None:
            return
        attributes: list[tuple[str, Attribute]] = [
            ("gen_ai.request.n", self.choices),
            ("gen_ai.usage.prompt_tokens", sum(self.prompt_tokens.values())),
            ("gen_ai.usage.completion_tokens", output_tokens),
            ("gen_ai.latency.e2e", now_s - began_s),
            ("tokenspeed.ended", reason),
        ]
        if self.first_s is not None:
            attributes.append(("gen_ai.latency.time_to_first_token", self.first_s - began_s))
        span = SpanValue(
            name="llm_request", start_s=wall_s - (now_s - began_s), end_s=wall_s, attributes=tuple(attributes)
        )
        self.tracer.add(TraceEntry(rid=self.rid, span_id=self.begun.span_id, spans=(span,), trace=self.trace))


def begin_call(tracer: Tracer, rid: str, choices: int) -> CallSpan:
    """The span of a call whose first choice has the id `rid`."""
    trace = CALLER_TRACE.get()
    begun = tracer.begin(rid, trace) if tracer.active else None
    return CallSpan(tracer=tracer, rid=rid, trace=trace, begun=begun, choices=choices)
