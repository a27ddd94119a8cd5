"""Reasoning, answers and tool calls are told apart the same way however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from tokenspeed.frontend.text.output.families import FORMATS, CallPlan, OutputFamily, output_family
from tokenspeed.frontend.text.output.parts import Part, PartKind
from tokenspeed.frontend.text.output.reasoning import REASONING

F = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
PLAN = CallPlan(names=frozenset({"f", "get_weather"}))

MARKS = """<tool_call> </tool_call> <think> </think> { } " \\ [ ] f ( ) = : , a 1 ' "name" "f" "arguments" """

Said = list[tuple[str, str]]
"""Merged parts: (kind, text); a call is (its name, its arguments)."""


def merged(parts: Sequence[Part]) -> Said:
    found: Said = []
    last = None
    for part in parts:
        assert part.text or part.kind is PartKind.CALL
        if part.kind is PartKind.ARGUMENTS:
            name, arguments = found[-1]
            found[-1] = (name, arguments + part.text)
        elif part.kind is last and part.kind is not PartKind.CALL:
            found[-1] = (part.kind.value, found[-1][1] + part.text)
        else:
            found.append((part.text, "") if part.kind is PartKind.CALL else (part.kind.value, part.text))
            last = part.kind
    return found


def read(family: OutputFamily, pieces: Sequence[str], *, plan: CallPlan | None = PLAN, opened: bool = False) -> Said:
    parser = family.parser(plan, opened=opened)
    return merged([part for piece in pieces for part in parser.push(piece)] + parser.flush())


HERMES, LLAMA, PYTHON = (OutputFamily(calls=name) for name in ("hermes", "llama3_json", "pythonic"))
THINK = OutputFamily(calls="hermes", reasoning=REASONING["think"])
R1 = OutputFamily(calls="none", reasoning=REASONING["deepseek_r1"])

CASES: list[tuple[OutputFamily, str, Said]] = [
    (HERMES, "Hello <b>you</b>.\n", [("text", "Hello <b>you</b>.\n")]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "f"}</tool_call>',
        [("f", '{"a": [1, {"b": "}"}]}')],
    ),
    (
        HERMES,
        'So:\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        [("text", "So:"), ("f", "{}"), ("g", "{}")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\" {"}}</tool_call>',
        [("f", '{"s": "</tool_call> \\" {"}')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "n": -1.5, "arguments": {"a": 2}, "x": true}</tool_call>', [("f", '{"a": 2}')]),
    (HERMES, "<tool_call>not json</tool_call>", [("text", "<tool_call>not json</tool_call>")]),
    (HERMES, '<tool_call>{"a": 1}</tool_call> b', [("text", '<tool_call>{"a": 1}</tool_call> b')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "f', [("text", '<tool_call>{"name": "f')]),
    (HERMES, "a < b <tool", [("text", "a < b <tool")]),
    (
        HERMES,
        '<tool_call>{"name": "f"}</tool_call> So it is\n done. <tool_call>{"name": "f"}</tool_call>\n\nYes. \n',
        [("f", "{}"), ("text", " So it is\n done."), ("f", "{}"), ("text", "\n\nYes.")],
    ),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (
        LLAMA,
        ' <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (
        LLAMA,
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "get_weather", "parameters": {}}]',
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    (LLAMA, '{"answer": 42}', [("text", '{"answer": 42}')]),
    (LLAMA, '{"name": "someone", "age": 3}', [("text", '{"name": "someone", "age": 3}')]),
    (LLAMA, "[1] says so", [("text", "[1] says so")]),
    (LLAMA, "Plain {text}", [("text", "Plain {text}")]),
    (LLAMA, "{", [("text", "{")]),
    (LLAMA, "", []),
    (
        PYTHON,
        "[f(a=1, s='x)]'), get_weather(city=\"Paris\", ok=true)]",
        [("f", '{"a": 1, "s": "x)]"}'), ("get_weather", '{"city": "Paris", "ok": true}')],
    ),
    (PYTHON, "x [f()]", [("text", "x [f()]")]),
    (PYTHON, "[f()]", [("f", "{}")]),
    (PYTHON, "[fine](http://x)", [("text", "[fine](http://x)")]),
    (PYTHON, "[f(__import__('os'))]", [("text", "[f(__import__('os'))]")]),
    (PYTHON, "[f(a=open)]", [("text", "[f(a=open)]")]),
    (PYTHON, "Use:\n```tool_code\nf(a=2)\n```", [("text", "Use:\n"), ("f", '{"a": 2}')]),
    (PYTHON, "f(x) is a function", [("text", "f(x) is a function")]),
    (THINK, "<think>\nHm <b>.\n</think>\n\nYes.", [("reasoning", "Hm <b>."), ("text", "Yes.")]),
    (THINK, "No <think> here.", [("text", "No <think> here.")]),
    (THINK, "<thin ice", [("text", "<thin ice")]),
    (THINK, "<think></think>x", [("text", "x")]),
    (THINK, "<think>cut off ", [("reasoning", "cut off")]),
    (THINK, '<think>a</think>\n<tool_call>{"name": "f"}</tool_call>', [("reasoning", "a"), ("f", "{}")]),
    (R1, "Because\n\nso.</think>Yes", [("reasoning", "Because\n\nso."), ("text", "Yes")]),
    (R1, "<think>Because</think> Yes", [("reasoning", "Because"), ("text", "Yes")]),
]


@pytest.mark.parametrize(("family", "text", "said"), CASES, ids=[case[1][:40] for case in CASES])
def test_the_same_text_has_the_same_parts_whole_by_character_and_cut_at_random(
    family: OutputFamily, text: str, said: Said
) -> None:
    assert read(family, [text]) == said
    assert read(family, list(text)) == said
    source = random.Random(text)
    for _ in range(20):
        cuts = sorted(source.choices(range(len(text) + 1), k=source.randrange(1, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(family, pieces) == said, pieces


@pytest.mark.parametrize("name", [*FORMATS, "none"])
def test_random_text_of_marks_loses_nothing_and_never_fails(name: str) -> None:
    family = OutputFamily(calls=name, reasoning=REASONING["think"])
    marks = MARKS.split()
    marks += ["```tool_code\n", "<|python_tag|>", "\n", " "]
    calls = ['<tool_call>{"name": "f"}</tool_call>', '{"name": "f", "parameters": {"a": 1}}', "[f(a=1)]"]
    marks += calls
    source = random.Random(name)
    for _ in range(400):
        pieces = source.choices(marks, k=source.randrange(1, 25))
        found = read(family, pieces)
        assert found == read(family, ["".join(pieces)])
        if not set(pieces) & {"<tool_call>", "<think>", "<|python_tag|>", "f", *calls}:
            assert "".join(text for _, text in found) == "".join(pieces)


def test_arguments_are_passed_on_before_the_call_is_complete() -> None:
    parser = HERMES.parser(PLAN, opened=False)
    assert parser.push('<tool_call>{"name": "f", ') == [Part(PartKind.CALL, "f")]
    assert parser.push('"arguments": {"a": "so') == [Part(PartKind.ARGUMENTS, '{"a": "so')]
    assert parser.push(' on"') == [Part(PartKind.ARGUMENTS, ' on"')]
    assert parser.push("}}") == [Part(PartKind.ARGUMENTS, "}")]


def test_text_is_held_back_only_while_it_may_become_a_tag() -> None:
    parser = HERMES.parser(PLAN, opened=False)
    assert parser.push("a <tool") == [Part(PartKind.TEXT, "a")]
    assert parser.push("box") == [Part(PartKind.TEXT, " <toolbox")]
    assert OutputFamily(calls="hermes").parser(None, opened=False).push("<tool_call>") == [
        Part(PartKind.TEXT, "<tool_call>")
    ]


@pytest.mark.parametrize("family", [HERMES, LLAMA, PYTHON], ids=lambda family: family.calls)
def test_calls_after_the_first_are_dropped_where_one_is_allowed(family: OutputFamily) -> None:
    texts = {
        "hermes": '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
        "llama3_json": '{"name": "f"}; {"name": "f"}',
        "pythonic": "[f(), f()]",
    }
    plan = CallPlan(names=PLAN.names, single=True)
    text = texts[family.calls]
    assert read(family, [text], plan=plan) == read(family, list(text), plan=plan) == [("f", "{}")]


def test_a_prompt_that_ends_in_an_open_tag_starts_inside() -> None:
    assert read(THINK, ["Hm.</think>Yes"], opened=True) == [("reasoning", "Hm."), ("text", "Yes")]


def test_the_family_is_read_off_the_template_unless_it_is_set() -> None:
    assert output_family(calls="auto", reasoning="auto", template="{% if tools %}<tool_call>").calls == "hermes"
    thinks = output_family(calls="auto", reasoning="auto", template="x<think>\n\n</think>")
    assert thinks.reasoning == REASONING["think"]
    assert output_family(calls="none", reasoning="none", template="<tool_call></think>").reasoning is None
    assert output_family(calls="auto", reasoning="auto", template='{"name": x, "parameters": y}').calls == "hermes"
    assert output_family(calls="auto", reasoning="auto", template="<|python_tag|>").calls == "llama3_json"
    assert output_family(calls="auto", reasoning="auto", template=None).calls == "hermes"


def test_a_call_that_must_be_made_is_held_to_the_format_its_parser_reads() -> None:
    tag = json.loads(HERMES.constraint([F], single=True).structural_tag or "")["format"]
    begin, end = tag["tags"][0]["begin"], tag["tags"][0]["end"]
    assert tag["tags"][0]["content"]["json_schema"] == F["parameters"]
    assert tag["at_least_one"]
    assert tag["stop_after_first"]
    assert read(HERMES, [begin, '{"a": 3}', end]) == [("f", '{"a": 3}')]
    schema = json.loads(LLAMA.constraint([F, {"name": "g"}], single=False).json_schema or "")
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["f", "g"]
    assert "maxItems" not in schema
    opened = json.loads(THINK.constraint([F], single=False, opened=True).structural_tag or "")["format"]
    assert opened["elements"][0]["end"].startswith("</think>")
    constrained = CallPlan(names=PLAN.names, constrained=True)
    assert read(PYTHON, ['[{"name": "f", "parameters": {"a": 1}}]'], plan=constrained) == [("f", '{"a": 1}')]
