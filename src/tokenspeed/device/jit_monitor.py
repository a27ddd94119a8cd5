"""Kernel compilations, and the mark between start-up, when they are welcome, and serving, when they stall.

A compilation on the forward thread halts the round as a wait for the device does, and longer: 0.1 s
to seconds for each new key of a compile cache. `device.jit_sources` tells the monitor of every one.
Before the mark they are only remembered; after it each is logged with kernel, cause and duration,
counted into the next commit, and refused where the environment asks for that. What makes them come
again is named: a compile-time parameter that takes ever new values, a call site that compiles what
was compiled before, a function that is traced anew at each call.

Code that can compile asks `JitMonitor.is_serving`, and takes a path without compilation once it is True.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Mapping

import attrs

from tokenspeed.errors import InvariantBroken, SettingsError

log = logging.getLogger(__name__)

SWITCH = "TOKENSPEED_JIT_COMPILE_CHECK"

EVER_NEW = 3
"""Values of one compile-time parameter at one call site from which on it is taken for a quantity of the batch."""

REMEMBERED = 1024
"""Keys or values kept of a call site, and call sites kept; what is beyond is counted and logged like the rest."""


class JitCheckMode(enum.Enum):
    """What a compilation after the mark does."""

    WARN = "warn"
    ERROR = "error"


@attrs.frozen(kw_only=True)
class Compilation:
    """One compilation, as its library tells it.

    Attributes:
        site: file:line of the call that caused it.
        key: everything it was specialised for.
        constants: compile-time parameters by name, values as text.
        cause: why no earlier compilation fits; "": the monitor works it out.
        direct_trace: nothing was looked up: a function to be compiled was called directly, and its
            Python was traced, as it will be at each call.
    """

    kernel: str
    site: str
    seconds: float
    key: str = ""
    constants: tuple[tuple[str, str], ...] = ()
    cause: str = ""
    direct_trace: bool = False


@attrs.frozen(kw_only=True)
class JitCounts:
    """Compilations since the last commit that carried any."""

    compiles: int = 0
    seconds: float = 0.0


NO_COMPILATIONS = JitCounts()


@attrs.define(eq=False)
class CallSite:
    """What one kernel was compiled for at one place. Writer: JitMonitor, under its lock."""

    keys: set[str] = attrs.field(factory=set[str])
    values: dict[str, set[str]] = attrs.field(factory=dict[str, set[str]])
    reported: set[str] = attrs.field(factory=set[str])


@attrs.define(eq=False)
class JitState:
    """Writer: JitMonitor; `serving` goes from False to True once, the rest under `lock`."""

    serving: bool = False
    pending: JitCounts = NO_COMPILATIONS
    sites: dict[tuple[str, str], CallSite] = attrs.field(factory=dict[tuple[str, str], CallSite])
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.frozen(kw_only=True, eq=False)
class JitMonitor:
    """Made before anything of the device side is built (DP-73). Every method may be called from any thread."""

    mode: JitCheckMode = JitCheckMode.WARN
    state: JitState = attrs.field(factory=JitState)

    def enter_serving(self) -> None:
        """Start-up is over; what compiles from here on stalls a round."""
        self.state.serving = True

    def is_serving(self) -> bool:
        return self.state.serving

    def starting(self, kernel: str, site: str) -> None:
        """A compilation is about to begin.

        Raises: InvariantBroken: after the mark, in mode ``error``.
        """
        if self.state.serving and self.mode is JitCheckMode.ERROR:
            raise InvariantBroken(
                f"a kernel would be compiled while serving; compile it at start-up ({SWITCH}=warn only reports)",
                kernel=kernel,
                site=site,
            )

    def compiled(self, event: Compilation) -> None:
        """A compilation has ended. Raises: as `starting`; it is counted all the same."""
        state = self.state
        with state.lock:
            cause, findings = _learn(state, event)
            if not state.serving:
                return
            counts = state.pending
            state.pending = JitCounts(compiles=counts.compiles + 1, seconds=counts.seconds + event.seconds)
        what, at = event.kernel, event.site
        log.warning("%s was compiled while serving, at %s, in %.3f s: %s", what, at, event.seconds, cause)
        for finding in findings:
            log.warning("%s: %s: %s", at, what, finding)
        self.starting(what, at)

    def take(self) -> JitCounts:
        """What was compiled after the mark since the last call; for each commit (DP-80)."""
        if self.state.pending is NO_COMPILATIONS:
            return NO_COMPILATIONS
        with self.state.lock:
            counts, self.state.pending = self.state.pending, NO_COMPILATIONS
        return counts


def jit_monitor(environ: Mapping[str, str] | None = None) -> JitMonitor:
    """What the environment asks for; None: this process's. Without a word: ``warn``.

    Raises: SettingsError: the variable has another value.
    """
    asked = (os.environ if environ is None else environ).get(SWITCH) or JitCheckMode.WARN.value
    known = {mode.value: mode for mode in JitCheckMode}
    if asked not in known:
        raise SettingsError(f"{SWITCH}: {asked!r} is not one of {', '.join(known)}")
    return JitMonitor(mode=known[asked])


def _learn(state: JitState, event: Compilation) -> tuple[str, list[str]]:
    """Take `event` into the memory of its call site: why it happened, and what is to be said of the site."""
    at = (event.kernel, event.site)
    site = state.sites.get(at)
    known = site is not None
    if site is None:
        site = CallSite()
        if len(state.sites) < REMEMBERED:
            state.sites[at] = site
    if event.direct_trace:
        return event.cause or "it was called directly", _once(site, "a direct call traces its Python each time")
    if known and event.key and event.key in site.keys:
        again = f"it compiles again and again what it was specialised for already: {event.key}"
        return event.cause or "a key it was compiled for before", _once(site, again)
    new = [name for name, value in event.constants if value not in site.values.get(name, ())]
    _remember(site.keys, event.key)
    findings = []
    for name, value in event.constants:
        values = site.values.setdefault(name, set())
        _remember(values, value)
        if name in new and len(values) >= EVER_NEW and state.serving:
            some = ", ".join(sorted(values)[:EVER_NEW])
            findings += _once(site, f"compile-time parameter {name} takes ever new values: {some}, …", key=name)
    if not known:
        return event.cause or "its first call from here", findings
    named = ", ".join(f"{name}={value}" for name, value in event.constants if name in new)
    return event.cause or (f"new value of {named}" if named else f"a new key: {event.key}"), findings


def _remember(values: set[str], value: str) -> None:
    if len(values) < REMEMBERED:
        values.add(value)


def _once(site: CallSite, finding: str, *, key: str = "") -> list[str]:
    """`finding`, unless this site was told of before."""
    if (key or finding) in site.reported:
        return []
    _remember(site.reported, key or finding)
    return [finding]
