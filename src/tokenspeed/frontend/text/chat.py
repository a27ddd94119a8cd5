"""Messages to a prompt, by the model's own Jinja template.

A template is code from whoever published the model. It runs in Jinja's sandbox, which keeps it off
the interpreter, and under limits on loop turns and on the size of texts, which keep a mistake (or
simple malice) from holding a thread or filling memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.errors import ModelError, RequestError
from tokenspeed.frontend.text.messages import template_messages, with_tools_told

MAX_TURNS = 500_000
"""Loop turns of one rendering; a macro call, which takes longer, counts as ten."""

MAX_CHARS = 1 << 24
"""Characters of a prompt, and of a text put together on the way to it."""

# No template can write names with spaces.
_TURNS, _TURN, _JOINED = "turns left", "one turn", "joined within limits"


class _RefusedError(TemplateError):
    """The template called ``raise_exception``."""


class _LimitError(TemplateError):
    """The rendering is too long or too large."""


@attrs.define(eq=False)
class _Turns:
    """Counts loop turns of one rendering. One writer: that rendering."""

    left: int = MAX_TURNS

    def take(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise _LimitError(f"it loops more than {MAX_TURNS} times")


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what training computes a loss for; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it like this

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _within(len(left) + len(right))
        if operator == "*":
            _within(_size(left) * _size(right))
        if operator == "**" and (abs(left) > MAX_CHARS or abs(right) > 64):
            raise _LimitError(f"{left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


def _turn(context: Context, weight: int = 1) -> bool:
    """One turn of a loop begins, or one item of it is looked at; True."""
    context.parent[_TURNS].take(weight)
    return True


def _joined(*parts: object) -> str:
    """What ``~`` does, within limits."""
    texts = [str(part) for part in parts]
    _within(sum(map(len, texts)))
    return "".join(texts)


def _size(value: object) -> int:
    """What a value multiplies the size of the other by, or is multiplied by."""
    if isinstance(value, (str, list, tuple)):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _within(size: int) -> None:
    if size > MAX_CHARS:
        raise _LimitError(f"it makes a text or list of {size} characters or items; {MAX_CHARS} is the limit")


def _refuse(message: str) -> str:
    raise _RefusedError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@attrs.frozen(kw_only=True, eq=False)
class ChatTemplate:
    """A compiled template; may be used from several threads at once.

    Attributes:
        special_tokens: pairs of variable name and text: ``bos_token``, ``eos_token``, …
        shows_tools: the template has a place for tools; without one they are told in a system message.
        source: of the template.
    """

    template: Template
    special_tokens: tuple[tuple[str, str], ...]
    shows_tools: bool = True
    source: str = ""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages`; a BOS, if the template writes one, is part of it as text.

        Args:
            add_generation_prompt: end with what opens the assistant's answer.
            extra: further variables of the template (``chat_template_kwargs``).
        Raises:
            RequestError: 400: the messages are malformed, or the template refuses or cannot render them.
            ModelError: the template tried something the sandbox forbids.
        """
        ready = template_messages(messages)
        if tools and not self.shows_tools:
            ready = with_tools_told(ready, tools)
        variables: dict[str, object] = {
            **dict(self.special_tokens),
            **(extra or {}),
            "messages": ready,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _TURNS: _Turns(),
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self.template.generate(variables):
                size += len(piece)
                _within(size)
                pieces.append(piece)
        except _RefusedError as fault:
            raise RequestError(
                f"the model's chat template refuses these messages: {fault}", field="messages"
            ) from fault
        except SecurityError as fault:
            raise ModelError(f"the model's chat template does what the sandbox forbids: {fault}") from fault
        except _LimitError as fault:
            raise RequestError(f"the model's chat template is over a limit: {fault}", field="messages") from fault
        except (Exception, MemoryError) as fault:  # whatever a template can run into
            raise RequestError(
                f"the model's chat template cannot render these messages: {type(fault).__name__}: {fault}",
                field="messages",
            ) from fault
        return "".join(pieces)


def compile_template(
    source: str, *, special_tokens: Sequence[tuple[str, str]] = (), now: Callable[[], datetime] = datetime.now
) -> ChatTemplate:
    """Compile `source` with the functions and whitespace rules chat templates are written for.

    Args:
        now: local time, for templates that print the date.
    Raises: ModelError: `source` is no Jinja template.
    """

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters.update({"tojson": _tojson, _TURN: _turn, _JOINED: _joined})
    environment.globals.update({"raise_exception": _refuse, "strftime_now": strftime_now})
    try:
        tree = environment.parse(source)
        shows_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        template = environment.from_string(_Limited().visit(tree))
    except (TemplateSyntaxError, RecursionError) as fault:
        line = f", line {fault.lineno}" if isinstance(fault, TemplateSyntaxError) else ""
        raise ModelError(f"the chat template{line} cannot be understood: {fault}") from fault
    return ChatTemplate(template=template, special_tokens=tuple(special_tokens), shows_tools=shows_tools, source=source)


def chat_template(checkpoint: Checkpoint, *, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
    """The template of `checkpoint`, or None if it has none.

    Raises: ModelError.
    """
    if checkpoint.chat_template is None:
        return None
    try:
        return compile_template(checkpoint.chat_template, special_tokens=checkpoint.special_tokens, now=now)
    except ModelError as fault:
        raise ModelError(f"{checkpoint.path or checkpoint.name}: {fault}") from fault


class _Limited(NodeTransformer):
    """Counts every loop turn and macro call, and joins texts within limits."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the base class looks for this name
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - the base class looks for this name
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802 - the base class looks for this name
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the base class looks for this name
        self.generic_visit(node)
        return nodes.Filter(node.nodes[0], _JOINED, node.nodes[1:], [], None, None).set_lineno(node.lineno)

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        weight = nodes.Const(1 if isinstance(node, nodes.For) else 10)
        # A filter, because a call would pass through the sandbox, which costs more than most loop bodies.
        turn = nodes.Filter(nodes.ContextReference(), _TURN, [weight], [], None, None)
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(turn, node.test).set_lineno(node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        return node
