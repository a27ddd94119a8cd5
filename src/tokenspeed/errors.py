"""The exceptions this package raises on purpose.

::

    TokenspeedError
    ├── SettingsError        the operator's configuration cannot be used (all faults in one text)
    ├── ModelError           a checkpoint is missing, damaged, or of a kind this build cannot serve
    ├── NotSupported         a real feature of the design that this build does not have yet
    ├── RequestError         a caller of the Python API asked for something invalid (carries a status)
    ├── EngineDead           the engine stopped; nothing more will be answered
    ├── DeviceLost           the device side failed; ends the rank
    ├── PeerLost             another process of the deployment is gone; ends the rank
    └── InvariantBroken      a bug of ours; ends the rank, is never caught to go on

What a client can cause on a normal day (full queue, prompt too long, duplicate id) is a *value*
(:class:`tokenspeed.plane.messages.Refusal`), not an exception.
"""

from __future__ import annotations


class TokenspeedError(Exception):
    """Base of everything this package raises on purpose."""


class SettingsError(TokenspeedError):
    """Configuration cannot be used. ``str()`` is what the operator reads: one fault a line."""


class ModelError(TokenspeedError):
    """A checkpoint cannot be found, read or served; the text names the file, tensor or key."""


class NotSupported(TokenspeedError):
    """A part of the design that this build does not contain; the text says which and what to use."""


class RequestError(TokenspeedError):
    """A request was refused.

    Attributes:
        status: the HTTP status that says the same thing (400, 404, 409, 413, 429, 503).
        field: the offending request field, or None.
    """

    def __init__(self, message: str, *, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class EngineDead(TokenspeedError):
    """The engine has stopped; requests in flight are lost and new ones are refused."""


class DeviceLost(TokenspeedError):
    """The device side failed in a way a round cannot survive."""


class PeerLost(TokenspeedError):
    """Another process of this deployment closed its connection."""


class InvariantBroken(TokenspeedError):
    """A bug of this package: ``what`` must never happen; ``facts`` are the numbers that show it."""

    def __init__(self, what: str, **facts: object) -> None:
        shown = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        super().__init__(f"{what} ({shown})" if shown else what)
        self.what = what
        self.facts = facts
