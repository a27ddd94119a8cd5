"""The grammar of a call that must be made accepts what its parser reads, and nothing else."""

from __future__ import annotations

import pytest

from tokenspeed.frontend.text.output.families import CallPlan, OutputFamily
from tokenspeed.frontend.text.output.parts import PartKind
from tokenspeed.frontend.text.output.reasoning import REASONING
from tokenspeed.grammar.backend import XgrammarBackend, load_backend
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource

END = 256
BYTES = Vocabulary(tokens=(*(bytes([one]) for one in range(256)), b""), stops=(END,))
F = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = [{"name": "f", "parameters": F}, {"name": "g"}]
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
HERMES = OutputFamily(calls="hermes")
THINKS = OutputFamily(calls="hermes", reasoning=REASONING["think"])
LLAMA = OutputFamily(calls="llama3_json")


@pytest.fixture(scope="module")
def backend() -> XgrammarBackend:
    return load_backend(BYTES, whitespace=2)


def accepts(backend: XgrammarBackend, family: OutputFamily, text: str, *, single: bool, opened: bool = False) -> bool:
    held = family.constraint(FUNCTIONS, single=single, opened=opened)
    kind = "json_schema" if held.structural_tag is None else "structural_tag"
    matcher = backend.compile(GrammarSource(kind=kind, text=held.structural_tag or held.json_schema or "")).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(END) and matcher.ended()


LIST = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
CASES: list[tuple[OutputFamily, bool, str, list[str] | None, list[str] | None]] = [
    # family, the prompt ended inside reasoning, text, calls where several are allowed and where one is; None: refused
    (HERMES, False, CALL_F, ["f"], ["f"]),
    (HERMES, False, f"{CALL_F}\n{CALL_G}", ["f", "g"], None),
    (HERMES, False, "Well.", None, None),
    (HERMES, False, CALL_F.replace("1}", '"x"}'), None, None),
    (HERMES, False, CALL_F.replace('"f"', '"h"'), None, None),
    (THINKS, True, f"Hm.</think>\n\n{CALL_G}", ["g"], ["g"]),
    (THINKS, True, "Hm.</think>\n\nWell.", None, None),
    (LLAMA, False, LIST, ["f", "g"], None),
    (LLAMA, False, '[{"name": "g", "parameters": {}}]', ["g"], ["g"]),
    (LLAMA, False, "[]", None, None),
    (LLAMA, False, '[{"name": "f", "parameters": {}}]', None, None),
]


@pytest.mark.parametrize(("family", "opened", "text", "several", "one"), CASES, ids=[case[2][:30] for case in CASES])
def test_a_forced_call_is_what_its_parser_reads(
    backend: XgrammarBackend,
    family: OutputFamily,
    text: str,
    several: list[str] | None,
    one: list[str] | None,
    *,
    opened: bool,
) -> None:
    for single, wanted in ((False, several), (True, one)):
        assert accepts(backend, family, text, single=single, opened=opened) is (wanted is not None)
        if wanted is not None:
            plan = CallPlan(names=frozenset({"f", "g"}), single=single, constrained=True)
            parser = family.parser(plan, opened=opened)
            parts = [*parser.push(text), *parser.flush()]
            assert [part.text for part in parts if part.kind is PartKind.CALL] == wanted
