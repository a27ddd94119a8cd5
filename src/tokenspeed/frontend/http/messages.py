"""What the API allows in chat messages; their content is the text room's business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenspeed.plane.checks import Fault, fault

ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN = frozenset({"content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
CALL = "an object with type function and a function with name and arguments"


def template_ready(given: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], tuple[Fault, ...]]:
    """Messages as templates know them, and what is wrong with the rest of `given`; other fields are left out."""
    if not given:
        return [], (fault("messages", given, "at least one message"),)
    messages: list[dict[str, object]] = []
    faults: list[Fault] = []
    for at, message in enumerate(given):
        role = message.get("role")
        if role not in ROLES:
            faults.append(fault(f"messages[{at}].role", role, f"one of {', '.join(ROLES)}"))
        faults += _call_faults(message, f"messages[{at}]")
        known_as = "system" if role == "developer" else role  # what templates call it
        kept = {name: value for name, value in message.items() if name in SHOWN and value is not None}
        if not kept.get("tool_calls"):
            kept.pop("tool_calls", None)
        messages.append({"role": known_as, **kept})
    return messages, tuple(faults)


def _call_faults(message: Mapping[str, object], where: str) -> Iterator[Fault]:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        yield fault(f"{where}.tool_calls", calls, "a list of calls")
    for at, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", "") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str | dict):
            yield fault(f"{where}.tool_calls[{at}]", call, CALL)
    for name in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(message.get(name) or "", str):
            yield fault(f"{where}.{name}", message.get(name), "a string")
