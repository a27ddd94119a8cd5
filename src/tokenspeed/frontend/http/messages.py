"""Chat messages from the wire to what a template takes: a role and one text each."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.plane.checks import Fault, fault

ROLES = ("system", "developer", "user", "assistant")
IGNORED = frozenset({"role", "content", "name", "refusal", "annotations", "reasoning_content"})
NEUTRAL: tuple[object, ...] = (None, [], {}, "")


def plain_messages(given: Sequence[dict[str, object]]) -> tuple[list[dict[str, object]], tuple[Fault, ...]]:
    """Messages with ``role`` and ``content`` (and ``name``), and everything wrong with `given`."""
    if not given:
        return [], (fault("messages", given, "at least one message"),)
    messages: list[dict[str, object]] = []
    faults: list[Fault] = []
    for at, message in enumerate(given):
        place = f"messages[{at}]"
        role = message.get("role")
        if role not in ROLES:
            why = " (tools are not supported yet)" if role in ("tool", "function") else ""
            faults.append(fault(f"{place}.role", role, f"one of {', '.join(ROLES)}{why}"))
        faults += [
            fault(f"{place}.{name}", value, "it to be left out: this is not supported")
            for name, value in message.items()
            if name not in IGNORED and value not in NEUTRAL
        ]
        shown = "system" if role == "developer" else role  # what templates know it as
        plain: dict[str, object] = {"role": shown, "content": _content(message.get("content"), place, role, faults)}
        if isinstance(name := message.get("name"), str):
            plain["name"] = name
        messages.append(plain)
    return messages, tuple(faults)


def _content(given: object, place: str, role: object, faults: list[Fault]) -> str:
    """The text of one message; parts are joined as they are."""
    if isinstance(given, str):
        return given
    if given is None and role == "assistant":
        return ""
    if not isinstance(given, list):
        faults.append(fault(f"{place}.content", given, "a text, or a list of text parts"))
        return ""
    texts: list[str] = []
    for at, part in enumerate(given):
        where = f"{place}.content[{at}]"
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text":
            allowed = 'a part of type "text"; images, audio and files are not supported yet'
            faults.append(fault(f"{where}.type" if isinstance(part, dict) else where, kind or part, allowed))
        elif not isinstance(text, str):
            faults.append(fault(f"{where}.text", text, "a string"))
        else:
            texts.append(text)
    return "".join(texts)
