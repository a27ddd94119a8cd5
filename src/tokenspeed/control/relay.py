"""Pass the owner's messages, and its wish to stop, to every member of the replica (RA-8)."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import FrontendMessage
from tokenspeed.plane.ports import Mesh


@attrs.frozen(kw_only=True)
class Inbox:
    """What one round received, equal on every member.

    Attributes:
        stop: the engine ends after this round.
    """

    messages: tuple[FrontendMessage, ...]
    stop: bool


@attrs.frozen(kw_only=True, eq=False)
class Relay:
    """The first member's link to the frontend speaks for the replica."""

    mesh: Mesh

    def share(self, messages: tuple[FrontendMessage, ...], *, stop: bool) -> Inbox:
        return self.mesh.share(Inbox(messages=messages, stop=stop))
