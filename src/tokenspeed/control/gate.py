"""Agreements between ranks that must fall in the same round: the gate, and the attention-DP step.

With one member both are decided on the spot and cost nothing.
"""

from __future__ import annotations

import attrs

from tokenspeed.plane.ports import Mesh


@attrs.frozen(kw_only=True, eq=False)
class Gate:
    """Lets an operation pass in the round in which every rank has it at the head of its queue (RA-12)."""

    mesh: Mesh

    def passes(self, *, waiting: bool) -> bool:
        """Whether the operation that waits here is carried out in this round, on every rank."""
        if self.mesh.size == 1:
            return waiting
        return all(self.mesh.gather(waiting))


@attrs.frozen(kw_only=True, eq=False)
class DpStep:
    """Attention DP in step: a rank without tokens joins a peer's forward with an idle one (RA-18)."""

    mesh: Mesh

    def idle_forward_due(self, *, tokens: int) -> bool:
        """Whether this rank must run an idle forward; decided by the tokens in the batches alone (SP-27)."""
        if self.mesh.size == 1:
            return False
        everyone = self.mesh.gather(tokens)  # first: a member that stays away would hold up the others
        return tokens == 0 and any(everyone)
