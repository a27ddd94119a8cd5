"""Tool calls written as Python calls: a list ``[f(a=1), g()]`` (Llama 4, Olmo), or a ``tool_code`` fence (Gemma)."""

from __future__ import annotations

import ast
import json

import attrs

from tokenspeed.frontend.text.output.parts import Part, PartKind, find_first, texts

FENCES = ("```tool_code\n", "```python\n")
WORDS = {"true": True, "false": False, "null": None}
MAX_CALL_CHARS = 1 << 16
"""A longer call is text: Python's parser reads it at once."""


@attrs.define(eq=False)
class PythonState:
    """Writer: PythonCalls.

    Attributes:
        kept: text that cannot be placed yet.
        began: text came that is no list: from here on only a fence has calls.
        opened: what opened a list or a fence, as it was written.
    """

    kept: str = ""
    began: bool = False
    opened: str = ""
    number: int = 0
    text: bool = False


@attrs.frozen(kw_only=True, eq=False)
class PythonCalls:
    """Calls of `names`, each passed on once it is closed; text that is no such call stays text.

    Attributes:
        single: calls after the first are dropped.
    """

    names: frozenset[str]
    single: bool = False
    state: PythonState = attrs.field(factory=PythonState)

    def push(self, text: str) -> list[Part]:
        state, parts = self.state, list[Part]()
        text, state.kept = state.kept + text, ""
        if state.text:
            return texts(text)
        if not state.opened:
            text = self._open(text, parts)
        if state.opened and not state.number:
            text = self._skip(text)
        while state.opened and (end := _closing(text)) is not None:
            call = _parsed(text[:end].lstrip(", \n"), self.names)
            if call is None:
                return [*parts, *self._give_up(text)]
            if not (self.single and state.number):
                name, arguments = call
                parts.append(Part(PartKind.CALL, name, state.number))
                parts.append(Part(PartKind.ARGUMENTS, arguments, state.number))
            state.number += 1
            text = text[end:]
        state.kept = text
        if len(text) > MAX_CALL_CHARS:
            return [*parts, *self._give_up(text)]
        return parts

    def flush(self) -> list[Part]:
        state = self.state
        kept, state.kept = state.kept, ""
        return [] if state.number or state.text else texts(state.opened + kept)

    def _open(self, text: str, parts: list[Part]) -> str:
        """Find the beginning of calls; what remains to be read, which without calls is kept."""
        state = self.state
        bare = text.lstrip()
        if not state.began and bare.startswith("["):
            after = bare[1:].lstrip()
            head, paren, _ = after.partition("(")
            if paren and head in self.names:
                state.opened = text[: len(text) - len(after)]
                return after
            if not paren and any(name.startswith(head) for name in self.names):
                return text
        if not state.began and not bare:
            return text
        state.began = True
        found = find_first(text, FENCES)
        parts += texts(found.before)
        state.opened = found.tag
        return found.rest

    def _skip(self, text: str) -> str:
        """Past a list's bracket behind a fence; it may come later than the fence."""
        after = text.lstrip("[ \n")
        self.state.opened += text[: len(text) - len(after)]
        return after

    def _give_up(self, text: str) -> list[Part]:
        state = self.state
        state.text = True
        return texts(text if state.number else state.opened + text)


def _closing(text: str) -> int | None:
    """Where the first call of `text` ends; None: not yet."""
    depth, quote, escaped = 0, "", False
    for place, sign in enumerate(text):
        if quote:
            if sign == quote and not escaped:
                quote = ""
            escaped = sign == "\\" and not escaped
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth == 0 and sign == ")":
                return place + 1
    return None


def _parsed(source: str, names: frozenset[str]) -> tuple[str, str] | None:
    """A call's name and arguments as JSON; None: it is none of `names`, or no call with literal keywords."""
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute) and not call.args:
            name = ast.unparse(call.func)
            if name in names:
                found = {word.arg or "": _literal(word.value) for word in call.keywords}
                return name, json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return None


def _literal(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    return ast.literal_eval(node)
