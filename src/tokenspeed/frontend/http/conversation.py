"""A conversation with a model, whichever API it came by: made ready, and its output read by meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import msgspec

from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult, GenerationInput
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.common import check_inputs, cut_to, input_of, sampling_of
from tokenspeed.frontend.http.errors import faulty
from tokenspeed.frontend.http.messages import template_ready
from tokenspeed.frontend.http.schema import ChatRequest, NamedTool
from tokenspeed.frontend.text.constraints import grammar_kinds
from tokenspeed.frontend.text.output.families import CallPlan, OutputFamily
from tokenspeed.frontend.text.output.parts import OutputParser, Part, PartKind
from tokenspeed.frontend.text.output.reasoning import reasoning_tokens
from tokenspeed.plane.checks import Fault, fault, int_fault

TAIL_TOKENS = 16
"""Tokens at a prompt's end that may hold the tag which opens the reasoning."""


@attrs.define(eq=False)
class ReaderState:
    """Writer: OutputReader. By choice: its parser; the choices that called a function."""

    parsers: dict[int, OutputParser] = attrs.field(factory=dict[int, OutputParser])
    called: set[int] = attrs.field(factory=set[int])


@attrs.frozen(kw_only=True, eq=False)
class OutputReader:
    """Reads the output of one conversation's choices.

    Attributes:
        plan: None: no calls are looked for.
        opened: the prompt ended inside the model's reasoning.
        reasoning: reasoning is passed on.
    """

    family: OutputFamily
    plan: CallPlan | None
    opened: bool
    reasoning: bool
    state: ReaderState = attrs.field(factory=ReaderState)

    def read(self, delta: ChoiceDelta | ChoiceResult) -> list[Part]:
        """The parts in a delta's text, or in a whole result's."""
        state = self.state
        parser = state.parsers.get(delta.index)
        if parser is None:
            parser = state.parsers[delta.index] = self.family.parser(self.plan, opened=self.opened)
        parts = parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts += parser.flush()
        if any(part.kind is PartKind.CALL for part in parts):
            state.called.add(delta.index)
        return [part for part in parts if self.reasoning or part.kind is not PartKind.REASONING]

    def thought(self, pieces: Sequence[bytes]) -> int:
        """How many of an output's tokens, whose bytes are `pieces`, are reasoning."""
        tags = self.family.reasoning
        return 0 if tags is None else reasoning_tokens(pieces, tags, opened=self.opened)

    def finish_reason(self, delta: ChoiceDelta | ChoiceResult) -> str | None:
        """The engine's reason, or that the choice ended by calling."""
        calls = delta.finish_reason == "stop" and delta.index in self.state.called
        return "tool_calls" if calls else delta.finish_reason


@attrs.frozen(kw_only=True, eq=False)
class Conversation:
    """One call, ready to run; nothing was sent to the engine."""

    inp: GenerationInput
    reader: OutputReader


async def prepare_conversation(api: Api, fields: ChatRequest, *, field: str = "messages") -> Conversation:
    """Validate, template and tokenize.

    Args:
        field: what the caller calls the messages.

    Raises: RequestError: 400 naming every fault.
    """
    messages, faults = template_ready(fields.messages)
    faults += (*_logprob_faults(api, fields), *_choice_faults(fields))
    most = api.service.info.max_model_len
    if len(messages) > most:
        faults += (fault(field, f"{len(messages)} messages", f"at most {most}, the tokens of the context"),)
    if faults:
        raise faulty(faults)
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    sampling = sampling_of(fields, max_tokens, api.prompts.tokenizer)
    tools = () if fields.tool_choice == "none" else tuple(tool_object(tool) for tool in fields.tools)
    effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
    ids = await api.prompts.from_messages(
        messages,
        add_generation_prompt=fields.add_generation_prompt,
        extra={**effort, **fields.chat_template_kwargs},
        tools=tools,
        add_special_tokens=fields.add_special_tokens,
        any_length=fields.truncate_prompt_tokens is not None,
    )
    opened = _opened(api, ids)
    plan = _plan(fields)
    if plan is not None and plan.constrained:
        if grammar_kinds(sampling):
            raise faulty([fault("tool_choice", fields.tool_choice, "auto or none where a grammar holds the answer")])
        functions = [msgspec.to_builtins(tool.function) for tool in fields.tools if tool.function.name in plan.names]
        held = api.family.constraint(functions, single=plan.single, opened=opened)
        sampling = attrs.evolve(sampling, json_schema=held.json_schema, structural_tag=held.structural_tag)
    inp = attrs.evolve(
        input_of(
            fields,
            cut_to(fields, ids, max_tokens=max_tokens, most=most),
            sampling=sampling,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
        ),
        continues_text=False,
    )
    check_inputs(api, [inp], field=field)
    reader = OutputReader(family=api.family, plan=plan, opened=opened, reasoning=fields.include_reasoning)
    return Conversation(inp=inp, reader=reader)


def tool_object(tool: msgspec.Struct) -> dict[str, object]:
    """A tool as templates print it: without what was not given."""
    found: dict[str, object] = _without_none(msgspec.to_builtins(tool))
    return found


def _without_none(value: dict[str, object]) -> dict[str, object]:
    return {
        name: _without_none(item) if name == "function" and isinstance(item, dict) else item
        for name, item in value.items()
        if item is not None
    }


def _plan(fields: ChatRequest) -> CallPlan | None:
    choice = fields.tool_choice
    if not fields.tools or choice == "none":
        return None
    single = not fields.parallel_tool_calls
    if isinstance(choice, NamedTool):
        return CallPlan(names=frozenset({choice.function.name}), single=True, constrained=True)
    names = frozenset(tool.function.name for tool in fields.tools)
    return CallPlan(names=names, single=single, constrained=choice == "required")


def _opened(api: Api, ids: list[int]) -> bool:
    tags = api.family.reasoning
    if tags is None:
        return False
    tail = api.prompts.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(tags.opens)


def _choice_faults(fields: ChatRequest) -> Iterable[Fault]:
    names = [tool.function.name for tool in fields.tools]
    choice = fields.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        yield fault("tool_choice.function.name", choice.function.name, "the name of one of the tools")
    if choice == "required" and not names:
        yield fault("tool_choice", choice, "tools to choose from")
    for at, name in enumerate(names):
        if name in names[:at]:
            yield fault(f"tools[{at}].function.name", name, "a name that no other tool has")


def _logprob_faults(api: Api, fields: ChatRequest) -> Iterable[Fault]:
    if fields.stream and fields.prompt_logprobs is not None:
        yield fault("prompt_logprobs", fields.prompt_logprobs, "it to be left out of a streamed chat")
    if fields.top_logprobs is None:
        return
    info = api.service.info
    yield from int_fault("top_logprobs", fields.top_logprobs, 0, min(info.max_logprobs, info.vocab_size))
    if not fields.logprobs:
        yield fault("top_logprobs", fields.top_logprobs, "logprobs to be true as well")
