"""Identities of traces and spans: from the caller's header, from a provider, or derived from the request's id."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeAlias

import attrs

from tokenspeed.errors import SettingsError

log = logging.getLogger("tokenspeed.tracing")
GROUP = "tokenspeed.trace_providers"
"""Entry-point group. Each entry is called with a `TraceProviders` to register at."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

ProviderResult: TypeAlias = tuple[int, int | None] | None
TraceProvider: TypeAlias = Callable[[str], ProviderResult]
"""From a request's id to ``(trace_id, parent_span_id or None)``, or None to keep the native ids.

Runs on the export thread; short, without I/O.
"""


@attrs.frozen(kw_only=True)
class Context:
    """Where a request's first span belongs: 128 and 64 bits, never 0; `parent_id` None: it is a root."""

    trace_id: int
    parent_id: int | None
    sampled: bool = True


def parse_traceparent(text: str) -> Context | None:
    """None if `text` is no ``traceparent`` of the W3C Trace Context recommendation."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or text.startswith("ff"):
        return None
    return Context(trace_id=int(found[1], 16), parent_id=int(found[2], 16), sampled=bool(int(found[3], 16) & 1))


def traceparent(trace_id: int, span_id: int, *, sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"


def derived_trace_id(rid: str) -> int:
    """The same in every process that knows the request."""
    return _digest(rid, 16)


def derived_span_id(service: str, name: str) -> int:
    return _digest(f"{service}/{name}", 8)


def sampled_by_rid(rid: str, share: float) -> bool:
    """The same answer in every process; `share` of all ids, 0 to 1."""
    return _digest(f"sample/{rid}", 8) < share * 2.0**64


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()) or 1


@attrs.define(eq=False)
class TraceProviders:
    """Providers by name; filled while an engine starts."""

    by_name: dict[str, TraceProvider] = attrs.field(factory=dict[str, TraceProvider])

    def register_trace_provider(self, name: str, provider: TraceProvider) -> None:
        """The same name again replaces the earlier provider."""
        self.by_name[name] = provider


def chosen_provider(name: str | None) -> TraceProvider | None:
    """The provider called `name` (or found at ``package.module:attribute``); None: none is used.

    Raises: SettingsError: nobody registered that name.
    """
    if name is None:
        return None
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: TraceProvider = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            raise SettingsError(f"tracing.provider: {name}: {exc}") from exc
        return found
    providers = TraceProviders()
    for entry in entry_points(group=GROUP):
        entry.load()(providers)
    if name not in providers.by_name:
        known = ", ".join(sorted(providers.by_name)) or "none"
        raise SettingsError(f"tracing.provider: unknown provider {name!r}; registered: {known}")
    return providers.by_name[name]


def context_of(rid: str, trace: str, provider: TraceProvider | None) -> Context:
    """Provider first, then the caller's header, then ids derived from `rid` (KM-38, KM-40)."""
    native = parse_traceparent(trace) or Context(trace_id=derived_trace_id(rid), parent_id=None)
    if provider is None:
        return native
    try:
        given = provider(rid)
    except Exception:
        log.exception("the trace provider failed for request %s; its native ids are used", rid)
        return native
    match given:
        case (int() as trace_id, parent_id) if 0 < trace_id < 1 << 128 and _span_or_none(parent_id):
            return Context(trace_id=trace_id, parent_id=parent_id)
        case _:
            return native


def _span_or_none(value: object) -> bool:
    return value is None or (type(value) is int and 0 < value < 1 << 64)
