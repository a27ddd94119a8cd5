"""From the ways in which clients ask for a constrained answer to the one grammar of a request.

Known forms: OpenAI's ``response_format``; vLLM's ``structured_outputs`` with the older ``guided_*``;
SGLang's and llama.cpp's plain fields. Only types and combinations are looked at here: what a grammar
says is checked where it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from tokenspeed.errors import RequestError
from tokenspeed.frontend.text.tokenizer import TextTokenizer
from tokenspeed.plane.checks import fault
from tokenspeed.plane.grammar import GRAMMAR_KINDS
from tokenspeed.plane.messages import SamplingParams

ANY_OBJECT = '{"type": "object"}'
MAX_CHOICES = 4096

FLAT_FIELDS: tuple[str, ...] = ("json_schema", "regex", "ebnf", "grammar", "structural_tag")
GUIDED_FIELDS: tuple[str, ...] = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
)
CONSTRAINT_FIELDS: tuple[str, ...] = ("response_format", "structured_outputs", *FLAT_FIELDS, *GUIDED_FIELDS)
"""Request fields that `constraint_of` reads."""

_STRUCTURED: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
_STRUCTURED_OPTIONS = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)


@attrs.frozen(kw_only=True)
class Constraint:
    """A grammar as `SamplingParams` names it: the field, and its text."""

    kind: str
    text: str = attrs.field(repr=False)

    def into(self, sampling: SamplingParams) -> SamplingParams:
        changes: dict[str, Any] = {self.kind: self.text}
        return attrs.evolve(sampling, **changes)


def constraint_of(fields: Mapping[str, object]) -> Constraint | None:
    """The grammar that a request's fields ask for; None: none.

    Args:
        fields: decoded JSON by name; names other than :data:`CONSTRAINT_FIELDS` are passed over.
    Raises: RequestError: 400 naming the field, its value and what is allowed; also for two grammars.
    """
    found: list[tuple[str, Constraint]] = []
    for field in CONSTRAINT_FIELDS:
        value = fields.get(field)
        if value is None:
            continue
        one = _read(field, value)
        if one is not None:
            found.append((field, one))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise _fault(names, "a value for each", "at most one grammar in a request")
    return found[0][1] if found else None


def _read(field: str, value: object) -> Constraint | None:
    match field:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured(value)
        case "json_schema" | "guided_json":
            return _schema(field, value)
        case "regex" | "guided_regex":
            return Constraint(kind="regex", text=_text(field, value))
        case "ebnf" | "grammar" | "guided_grammar":
            return Constraint(kind="ebnf", text=_text(field, value))
        case "guided_choice":
            return _choice(field, value)
        case "guided_json_object":
            return _json_object(field, value)
        case _:
            return _tag(field, value)


def _response_format(value: object) -> Constraint | None:
    kinds = '{"type": one of text, json_object, json_schema, structural_tag}'
    if not isinstance(value, dict):
        raise _fault("response_format", value, kinds)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            # Some servers let this form carry a schema.
            return _schema("response_format.schema", value["schema"]) if value.get("schema") else _any_object()
        case "json_schema":
            inner = value.get("json_schema", value)  # the responses API has its parts beside the type
            if not isinstance(inner, dict) or ("schema" not in inner and "json_schema" not in value):
                raise _fault("response_format.json_schema", inner, 'an object with "schema"')
            if inner.get("schema") is None:
                raise _fault("response_format.json_schema.schema", None, "a JSON schema")
            return _schema("response_format.json_schema.schema", inner["schema"])
        case "structural_tag":
            return Constraint(kind="structural_tag", text=json.dumps(value))
        case other:
            raise _fault("response_format.type", other, "text, json_object, json_schema or structural_tag")


def _structured(value: object) -> Constraint | None:
    if not isinstance(value, dict):
        raise _fault("structured_outputs", value, f"an object with one of {', '.join(_STRUCTURED)}")
    for name, item in value.items():
        if name in _STRUCTURED or item is None or item is False:
            continue
        if name in _STRUCTURED_OPTIONS:
            raise _fault(f"structured_outputs.{name}", item, "it to be left out: this is not supported")
        raise _fault(f"structured_outputs.{name}", item, f"one of {', '.join(_STRUCTURED)}")
    given = [name for name in _STRUCTURED if value.get(name) is not None]
    if len(given) > 1:
        raise _fault(f"structured_outputs.{' and '.join(given)}", "a value for each", "exactly one of them")
    if not given:
        raise _fault("structured_outputs", value, f"a value for one of {', '.join(_STRUCTURED)}")
    field, item = f"structured_outputs.{given[0]}", value[given[0]]
    match given[0]:
        case "json":
            return _schema(field, item)
        case "choice":
            return _choice(field, item)
        case "json_object":
            return _json_object(field, item)
        case "structural_tag":
            return _tag(field, item)
        case name:
            return Constraint(kind=_STRUCTURED[name], text=_text(field, item))


def _schema(field: str, value: object) -> Constraint:
    """A schema as an object, or as JSON text; ``true`` is one, too."""
    if isinstance(value, str):
        return Constraint(kind="json_schema", text=_text(field, value))
    if value is True or isinstance(value, dict):
        return Constraint(kind="json_schema", text=json.dumps(value, ensure_ascii=False))
    raise _fault(field, value, "a JSON schema: an object, or its JSON text")


def _json_object(field: str, value: object) -> Constraint | None:
    if value is True:
        return _any_object()
    raise _fault(field, value, "true, or to be left out")


def _any_object() -> Constraint:
    return Constraint(kind="json_schema", text=ANY_OBJECT)


def _choice(field: str, value: object) -> Constraint:
    """One of several texts, as an EBNF rule."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not 0 < len(value) <= MAX_CHOICES:
        raise _fault(field, value, f"a list of 1 to {MAX_CHOICES} texts")
    for at, one in enumerate(value):
        if not isinstance(one, str) or not one:
            raise _fault(f"{field}[{at}]", one, "a text that is not empty")
    return Constraint(kind="ebnf", text="root ::= " + " | ".join(_quoted(value)))


def _quoted(texts: Iterable[str]) -> Iterable[str]:
    return (json.dumps(text) if text.isascii() else _escaped(text) for text in dict.fromkeys(texts))


def _escaped(text: str) -> str:
    """An EBNF string: characters outside ASCII by their code points."""
    signs = (json.dumps(one)[1:-1] if one.isascii() else f"\\U{ord(one):08x}" for one in text)
    return '"' + "".join(signs) + '"'


def _tag(field: str, value: object) -> Constraint:
    if isinstance(value, str):
        return Constraint(kind="structural_tag", text=_text(field, value))
    if isinstance(value, dict):
        return Constraint(kind="structural_tag", text=json.dumps(value, ensure_ascii=False))
    raise _fault(field, value, "a structural tag: an object, or its JSON text")


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _fault(field, value, "a text that is not empty")
    return value


def _fault(field: str, value: object, allowed: str) -> RequestError:
    return RequestError(str(fault(field, value, allowed)), status=400, field=field)


def grammar_kinds(sampling: SamplingParams) -> tuple[str, ...]:
    """Names of the grammars that are set."""
    return tuple(kind for kind in GRAMMAR_KINDS if getattr(sampling, kind) is not None)


def bad_word_ids(tokenizer: TextTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and behind a space, as it is written."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelled in (word, f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(spelled, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)
