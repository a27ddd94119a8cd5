"""Which parser reads a model's output, by family; and what constrains an answer that must be a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import attrs

from tokenspeed.frontend.text.output.calls import CLOSES, OPENS, JsonCalls, TaggedCalls
from tokenspeed.frontend.text.output.parts import OutputParser, PlainText
from tokenspeed.frontend.text.output.python_calls import PythonCalls
from tokenspeed.frontend.text.output.reasoning import REASONING, ReasoningTags, reasoning_parser

AUTO, NONE = "auto", "none"


class CallFormat(Protocol):
    """Makes a parser of calls for one sequence."""

    def __call__(self, names: frozenset[str], *, single: bool) -> OutputParser: ...


def _tagged(names: frozenset[str], *, single: bool) -> OutputParser:  # noqa: ARG001 - its tags say what is a call
    return TaggedCalls(single=single)


def _json(names: frozenset[str], *, single: bool) -> OutputParser:
    return JsonCalls(names=names, single=single)


def _python(names: frozenset[str], *, single: bool) -> OutputParser:
    return PythonCalls(names=names, single=single)


FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {"hermes": _tagged, "qwen": _tagged, "llama3_json": _json, "pythonic": _python, "gemma": _python}
)
"""By the name of the setting ``server.tool_parser``."""


@attrs.frozen(kw_only=True)
class CallPlan:
    """What calls one request allows.

    Attributes:
        names: functions that may be called.
        single: one call at most.
        constrained: the answer is held to be a call by a grammar in plain JSON, whatever the family.
    """

    names: frozenset[str]
    single: bool = False
    constrained: bool = False


@attrs.frozen(kw_only=True)
class Constraint:
    """A grammar for the whole output; one of the two is set. See `SamplingParams`."""

    json_schema: str | None = None
    structural_tag: str | None = None


@attrs.frozen(kw_only=True, eq=False)
class OutputFamily:
    """How one model writes reasoning and calls.

    Attributes:
        calls: a name of :data:`FORMATS`, or none.
    """

    calls: str = NONE
    reasoning: ReasoningTags | None = None

    def parser(self, plan: CallPlan | None, *, opened: bool) -> OutputParser:
        """For one sequence.

        Args:
            plan: None: calls are not looked for.
            opened: the prompt ended inside the reasoning.
        """
        inner: OutputParser = PlainText()
        if plan is not None:
            make = _json if plan.constrained and self.calls not in ("hermes", "qwen") else FORMATS.get(self.calls)
            inner = inner if make is None else make(plan.names, single=plan.single)
        if self.reasoning is None:
            return inner
        return reasoning_parser(self.reasoning, inner, opened=opened)

    def constraint(
        self, functions: Sequence[Mapping[str, object]], *, single: bool, opened: bool = False
    ) -> Constraint:
        """A grammar under which the answer is one or several calls of `functions`.

        It is a structural tag in the model's own format where that is tagged, else a schema of a list.

        Args:
            opened: the prompt ended inside the reasoning, which comes first then.
        """
        if self.calls in ("hermes", "qwen"):
            tags = [
                {
                    "begin": f'{OPENS}\n{{"name": {json.dumps(one["name"])}, "arguments": ',
                    "content": {"type": "json_schema", "json_schema": _schema(one)},
                    "end": f"}}\n{CLOSES}",
                }
                for one in functions
            ]
            form: dict[str, object] = {
                "type": "tags_with_separator",
                "tags": tags,
                "separator": "\n",
                "at_least_one": True,
                "stop_after_first": single,
            }
            whole = {"type": "structural_tag", "format": self._after_reasoning(form, opened=opened)}
            return Constraint(structural_tag=json.dumps(whole))
        one_of: list[dict[str, object]] = [
            {
                "type": "object",
                "properties": {"name": {"const": one["name"]}, "parameters": _schema(one)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for one in functions
        ]
        items = one_of[0] if len(one_of) == 1 else {"anyOf": one_of}
        schema: dict[str, object] = {"type": "array", "minItems": 1, "items": items}
        if single:
            schema["maxItems"] = 1
        return Constraint(json_schema=json.dumps(schema))

    def _after_reasoning(self, form: dict[str, object], *, opened: bool) -> dict[str, object]:
        if self.reasoning is None or not (opened or self.reasoning.implied):
            return form
        thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": self.reasoning.closes + "\n\n"}
        return {"type": "sequence", "elements": [thoughts, form]}


def _schema(function: Mapping[str, object]) -> object:
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def output_family(*, calls: str, reasoning: str, template: str | None) -> OutputFamily:
    """The family that the settings name, or with ``auto`` the one that the chat template shows."""
    source = template or ""
    if calls == AUTO:
        calls = _calls_of(source)
    if reasoning == AUTO:
        reasoning = next((name for name, tags in REASONING.items() if tags.closes in source), NONE)
    return OutputFamily(calls=calls, reasoning=REASONING.get(reasoning))


def _calls_of(template: str) -> str:
    marks = ((OPENS, "hermes"), ("python_tag", "llama3_json"), ("tool_code", "gemma"))
    return next((name for mark, name in marks if mark in template), "hermes")
