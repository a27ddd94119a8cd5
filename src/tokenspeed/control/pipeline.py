"""Pipelines: earlier stages adopt the results of the last one before they commit (RA-47)."""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.plane.results import ForwardResult


class Pipeline(Protocol):
    def adopt_last_stage(self, result: ForwardResult) -> ForwardResult:
        """The last stage's result, on every stage."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class OneStage:
    """The whole model is in this rank."""

    def adopt_last_stage(self, result: ForwardResult) -> ForwardResult:
        return result
