"""A sampler from outside, behind a check of what it draws: executors store its tensors as they are."""

from __future__ import annotations

import attrs
import torch

from tokenspeed.device.sampling.base import SampledTokens, Sampler, TokenMasks
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.table import Int64Array


@attrs.frozen(kw_only=True, eq=False)
class CheckedSampler:
    """Looks at shapes and dtypes only, so that nothing waits for the device."""

    inner: Sampler
    samples_on_host: bool

    def seat(self, seat: Seat) -> None:
        self.inner.seat(seat)

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Raises: InvariantBroken: what the sampler returned is not `SampledTokens` of as many rows."""
        drawn = self.inner.sample(logits, slots=slots, positions=positions, masks=masks)
        for name, dtype in (("tokens", torch.int64), ("nan", torch.bool)):
            found = getattr(drawn, name, None)
            if not isinstance(found, torch.Tensor) or found.shape != (len(logits),) or found.dtype != dtype:
                raise InvariantBroken(
                    f"{type(self.inner).__name__}.sample returned no SampledTokens of {len(logits)} rows",
                    field=name,
                    wanted=f"{dtype} [{len(logits)}]",
                    got=_shown(found if found is not None else drawn),
                )
        return drawn


def _shown(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
