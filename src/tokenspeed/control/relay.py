"""Pass the owner's messages, and its wish to stop, to every member of the replica (RA-8)."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import ControlReply, FrontendMessage, OutputBatch
from tokenspeed.plane.ports import FrontendLink, Mesh


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


@attrs.frozen(eq=False)
class FollowersLink:
    """The `FrontendLink` of every member but the first: it hears by relay, and the first speaks for it (OL-13)."""

    def receive(self) -> tuple[FrontendMessage, ...]:
        return ()

    def send(self, batch: OutputBatch) -> None:
        return None

    def reply(self, reply: ControlReply) -> None:
        return None

    @property
    def gone(self) -> bool:
        return False

    def close(self) -> None:
        return None


def voice_of(mesh: Mesh, link: FrontendLink) -> FrontendLink:
    """What a member's loop talks to: the wire belongs to the first (FW-4)."""
    return link if mesh.rank == 0 else FollowersLink()
