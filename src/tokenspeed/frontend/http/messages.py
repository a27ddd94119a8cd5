"""What the API allows in chat messages; their content is the text room's business."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.plane.checks import Fault, fault

ROLES = ("system", "developer", "user", "assistant")
SHOWN = frozenset({"content", "name"})
IGNORED = frozenset({"role", "refusal", "annotations", "reasoning_content"})
NEUTRAL: tuple[object, ...] = (None, [], {}, "")


def template_ready(given: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], tuple[Fault, ...]]:
    """Messages with role, content and name, and what is wrong with the rest of `given`."""
    if not given:
        return [], (fault("messages", given, "at least one message"),)
    messages: list[dict[str, object]] = []
    faults: list[Fault] = []
    for at, message in enumerate(given):
        role = message.get("role")
        if role not in ROLES:
            why = " (tools are not supported yet)" if role in ("tool", "function") else ""
            faults.append(fault(f"messages[{at}].role", role, f"one of {', '.join(ROLES)}{why}"))
        faults += [
            fault(f"messages[{at}].{name}", value, "it to be left out: this is not supported")
            for name, value in message.items()
            if name not in SHOWN and name not in IGNORED and value not in NEUTRAL
        ]
        known_as = "system" if role == "developer" else role  # what templates call it
        kept = {name: value for name, value in message.items() if name in SHOWN and value is not None}
        messages.append({"role": known_as, **kept})
    return messages, tuple(faults)
