"""Tool calls in the formats of model families."""

from __future__ import annotations

import attrs

from tokenspeed.frontend.text.output.call_json import CallScanner, ScanStatus
from tokenspeed.frontend.text.output.parts import Part, PartKind, find_first, texts

OPENS, CLOSES = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@attrs.define(eq=False)
class CallState:
    """Writer: the parser it belongs to.

    Attributes:
        kept: text that cannot be placed yet.
        scanner: reads the call that is open.
        number: of the call that is open, or the next one.
        named: the open call's name was passed on.
        text: nothing but text comes from here on.
    """

    kept: str = ""
    scanner: CallScanner | None = None
    number: int = 0
    named: bool = False
    text: bool = False


@attrs.frozen(kw_only=True, eq=False)
class TaggedCalls:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, the format of Hermes and Qwen, between texts.

    What is tagged and is no such object is text.

    Attributes:
        single: calls after the first are dropped.
    """

    single: bool = False
    state: CallState = attrs.field(factory=CallState)

    def push(self, text: str) -> list[Part]:
        state, parts = self.state, list[Part]()
        text, state.kept = state.kept + text, ""
        while text:
            text = self._text(text, parts) if state.scanner is None else self._call(state.scanner, text, parts)
        return parts

    def flush(self) -> list[Part]:
        state = self.state
        kept, state.kept = state.kept, ""
        scanner, state.scanner = state.scanner, None
        if scanner is None:
            return texts(kept if not state.number else kept.rstrip())
        if state.named:
            state.number += 1
            return []
        return texts(OPENS + scanner.raw + kept) if scanner.status is not ScanStatus.DONE else []

    def _text(self, text: str, parts: list[Part]) -> str:
        """Text up to a call; what remains to be read."""
        state = self.state
        found = find_first(text, (OPENS,))
        if found.tag:
            parts += texts(found.before.rstrip())
            state.scanner, state.named = CallScanner(), False
            return found.rest
        bare = found.before.rstrip()  # white space before a call belongs to the tag
        parts += texts(bare)
        state.kept = found.before[len(bare) :] + found.rest
        return ""

    def _call(self, scanner: CallScanner, text: str, parts: list[Part]) -> str:
        state = self.state
        if scanner.status is ScanStatus.OPEN:
            text = text[scanner.feed(text) :]
            self._pass_on(scanner, parts)
            if scanner.status is ScanStatus.OPEN:
                return ""
        found = find_first(text, (CLOSES,))
        if scanner.status is ScanStatus.BROKEN and not state.named:
            parts += texts(OPENS + scanner.raw)
            state.scanner = None
            return text
        if not found.tag:
            state.kept = found.rest
            return ""
        state.scanner = None
        state.number += 1
        return found.rest

    def _pass_on(self, scanner: CallScanner, parts: list[Part]) -> None:
        state = self.state
        if self.single and state.number:
            state.named = state.named or scanner.name is not None
            return
        parts += passed_on(state, scanner)


def passed_on(state: CallState, scanner: CallScanner) -> list[Part]:
    """What became known of the open call."""
    parts = []
    if scanner.name and not state.named:
        state.named = True
        parts.append(Part(PartKind.CALL, scanner.name, state.number))
    if state.named and (fresh := scanner.take()):
        parts.append(Part(PartKind.ARGUMENTS, fresh, state.number))
    return parts


@attrs.frozen(kw_only=True, eq=False)
class JsonCalls:
    """Objects ``{"name": …, "parameters": {…}}``, alone, after ``;`` or in a list: the format of Llama 3.

    It is also what a constrained answer in plain JSON is. Only a text that is such calls from its
    beginning is taken for calls, and only calls of `names`: any other JSON is an answer.
    """

    names: frozenset[str]
    single: bool = False
    state: CallState = attrs.field(factory=CallState)

    def push(self, text: str) -> list[Part]:
        state, parts = self.state, list[Part]()
        text, state.kept = state.kept + text, ""
        while text and not state.text:
            scanner = state.scanner
            if scanner is None:
                text = self._between(text)
                continue
            text = text[scanner.feed(text) :]
            if scanner.name is not None and scanner.name not in self.names:
                scanner.status = ScanStatus.BROKEN
            if scanner.status is ScanStatus.BROKEN and not state.named:
                return [*parts, *self._give_up(scanner.raw + text)]
            if not (self.single and state.number):
                parts += passed_on(state, scanner)
            elif scanner.name is not None:
                state.named = True
            if scanner.status is not ScanStatus.OPEN:
                state.scanner, state.number = None, state.number + 1
        return [*parts, *texts(text if state.text else "")]

    def flush(self) -> list[Part]:
        state = self.state
        scanner, state.scanner = state.scanner, None
        kept, state.kept = state.kept, ""
        if scanner is not None and not state.named:
            return texts(kept + scanner.raw)
        return texts(kept) if not state.number and scanner is None else []

    def _between(self, text: str) -> str:
        """Skip what stands before an object; what remains to be read."""
        state = self.state
        rest = text.lstrip()
        skipped = ""
        if not state.number:
            if rest and PYTHON_TAG.startswith(rest[: len(PYTHON_TAG)]) and len(rest) < len(PYTHON_TAG):
                state.kept = text
                return ""
            rest = rest.removeprefix(PYTHON_TAG).lstrip()
            if rest.startswith("["):
                skipped, rest = rest, rest[1:].lstrip()
        else:
            rest = rest.lstrip(",;] \n\r\t")
        if rest.startswith("{"):
            state.scanner, state.named = CallScanner(), False
            return rest
        if not rest:
            state.kept = text if not state.number else ""
            return ""
        state.text = True
        return skipped or (text if not state.number else rest)

    def _give_up(self, text: str) -> list[Part]:
        self.state.scanner, self.state.text = None, True
        return texts(text)
