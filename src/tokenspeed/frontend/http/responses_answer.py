"""The answer of POST /v1/responses: items that grow, as events or as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from tokenspeed.frontend.generation import ChoiceDelta
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.blocks import Block, BlockRow, Step, StepKind
from tokenspeed.frontend.http.conversation import OutputReader
from tokenspeed.frontend.http.errors import Failure
from tokenspeed.frontend.http.response_store import Kept
from tokenspeed.frontend.http.responses_chat import said
from tokenspeed.frontend.http.responses_schema import (
    InputDetails,
    OutputDetails,
    ResponseError,
    ResponseReasoning,
    ResponseReply,
    ResponsesRequest,
    ResponseText,
    ResponseUsage,
)
from tokenspeed.frontend.text.output.parts import PartKind

NAMES = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text"}
PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs"}


@attrs.define(eq=False)
class ResponseState:
    """Writer: ResponseAnswer. `number`: of the next event; `ids`: of the output."""

    row: BlockRow = attrs.field(factory=BlockRow)
    number: int = 0
    ids: list[int] = attrs.field(factory=list[int])


@attrs.frozen(kw_only=True, eq=False)
class ResponseAnswer:
    """Builds one response, delta by delta; `kept.reply` is always what is known."""

    api: Api
    reader: OutputReader
    kept: Kept
    prompt_tokens: int
    state: ResponseState = attrs.field(factory=ResponseState)

    def events(self, delta: ChoiceDelta) -> Iterable[object]:
        """The events of a delta; the response begins with the first."""
        reply, state = self.kept.reply, self.state
        if reply.status != "in_progress" or not state.number:
            reply.status = "in_progress"
            yield self._event("response.created", response=reply)
            yield self._event("response.in_progress", response=reply)
        state.ids += delta.token_ids
        for part in self.reader.read(delta):
            kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
            for step in state.row.take(part, f"{PREFIXES.get(kind, 'fc')}_{self.api.new_id()}"):
                yield from self._step(step)
        if delta.finish_reason is not None:
            reply.usage = self._usage(delta)
            for step in state.row.close():
                yield from self._step(step)
            self._end(delta.finish_reason)

    def last(self) -> Iterable[object]:
        """The event that ends the response."""
        yield self._event(f"response.{self.kept.reply.status}", response=self.kept.reply)

    def failed(self, found: Failure) -> object:
        """The one event that tells a failure."""
        self.fail(found)
        error = found.body.error
        return self._event("error", code=error.code, message=error.message, param=error.param, error=error)

    def fail(self, found: Failure) -> None:
        error = found.body.error
        self.kept.reply.status = "failed"
        self.kept.reply.error = ResponseError(code=error.code or "server_error", message=error.message)

    def _end(self, reason: str) -> None:
        reply, row = self.kept.reply, self.state.row
        reply.output = [_item(block, done=True) for block in row.blocks]
        reply.status = "completed"
        if reason in ("length", "abort"):
            reply.status = "incomplete"
            reply.incomplete_details = {"reason": "max_output_tokens" if reason == "length" else "aborted"}
        self.kept.messages += said(reply.output)

    def _usage(self, delta: ChoiceDelta) -> ResponseUsage:
        token_bytes = self.api.prompts.tokenizer.token_bytes
        thought = self.reader.thought([token_bytes(token) for token in self.state.ids])
        return ResponseUsage(
            input_tokens=self.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=delta.cached_tokens),
            output_tokens=delta.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=thought),
            total_tokens=self.prompt_tokens + delta.completion_tokens,
        )

    def _event(self, kind: str, **values: object) -> dict[str, object]:
        number = self.state.number
        self.state.number += 1
        return {"type": kind, "sequence_number": number, **values}

    def _step(self, step: Step) -> Iterator[object]:
        block = step.block
        place = {"item_id": block.ident, "output_index": block.index}
        call = block.kind is PartKind.CALL
        name = NAMES.get(block.kind, "function_call_arguments")
        inner: dict[str, object] = place if call else {**place, "content_index": 0}
        extra: dict[str, object] = {"logprobs": []} if block.kind is PartKind.TEXT else {}
        match step.kind:
            case StepKind.OPEN:
                item = _item(block, done=False)
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if not call:
                    yield self._event("response.content_part.added", **inner, part=_part(block.kind, ""))
            case StepKind.GROW:
                yield self._event(f"response.{name}.delta", **inner, delta=step.text, **extra)
            case StepKind.CLOSE if call:
                yield self._event(f"response.{name}.done", **inner, name=block.name, arguments=block.text or "{}")
                yield self._closed(block)
            case StepKind.CLOSE:
                yield self._event(f"response.{name}.done", **inner, text=block.text, **extra)
                yield self._event("response.content_part.done", **inner, part=_part(block.kind, block.text))
                yield self._closed(block)

    def _closed(self, block: Block) -> object:
        return self._event("response.output_item.done", output_index=block.index, item=_item(block, done=True))


def _part(kind: PartKind, text: str) -> dict[str, object]:
    if kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, *, done: bool) -> dict[str, object]:
    """An output item; without its text where it begins in a stream."""
    status = "completed" if done else "in_progress"
    if block.kind is PartKind.CALL:
        return {
            "type": "function_call",
            "id": block.ident,
            "call_id": "call" + block.ident.removeprefix("fc"),
            "name": block.name,
            "arguments": (block.text or "{}") if done else "",
            "status": status,
        }
    content = [_part(block.kind, block.text)] if done else []
    if block.kind is PartKind.REASONING:
        return {"type": "reasoning", "id": block.ident, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": block.ident, "role": "assistant", "content": content, "status": status}


def new_reply(api: Api, fields: ResponsesRequest) -> ResponseReply:
    """A response that has only begun."""
    return ResponseReply(
        id=f"resp_{api.new_id()}",
        created_at=int(api.wall_s()),
        status="queued" if fields.background else "in_progress",
        background=fields.background,
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        model=api.model,
        output=[],
        parallel_tool_calls=fields.parallel_tool_calls,
        previous_response_id=fields.previous_response_id,
        reasoning=fields.reasoning or ResponseReasoning(),
        store=fields.store,
        temperature=fields.temperature,
        text=fields.text or ResponseText(format={"type": "text"}),
        tool_choice=fields.tool_choice or "auto",
        tools=fields.tools,
        top_p=fields.top_p,
        truncation=fields.truncation or "disabled",
        user=fields.user,
        metadata=fields.metadata or {},
    )
