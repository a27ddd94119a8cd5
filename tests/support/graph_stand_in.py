"""Captured graphs without a device: what was recorded is run again."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from tokenspeed.device.graphs import Graph
from tokenspeed.device.kernels import torch_kernels
from tokenspeed.device.kernels.registry import KernelSet, kernel_set
from tokenspeed.device.step import ForwardStep, LayersReady, RaggedRows


def write_but_for_padding(vectors: torch.Tensor, places: torch.Tensor, kv: torch.Tensor) -> None:
    """What a kernel of a device does with rows that a graph was padded with."""
    kept = places >= 0
    torch_kernels.kv_write(vectors, places[kept], kv.reshape(len(places), 1, -1)[kept])


KERNELS = attrs.evolve(kernel_set(KernelSet.TORCH), follows_tables=True, kv_write=write_but_for_padding)


@attrs.define(eq=False)
class Fixed:
    """A step whose logits for so many rows are always in the same place, as those of a captured graph are.

    Attributes:
        ran: tokens of each run.
    """

    inner: ForwardStep
    places: dict[int, torch.Tensor] = attrs.field(factory=dict)
    ran: list[int] = attrs.field(factory=list)
    ready: list[LayersReady] = attrs.field(factory=list)

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    @torch.inference_mode()
    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.ran.append(len(rows.token_ids))
        self.ready.append(ready)
        logits = self.inner.run(rows, layers=layers, ready=ready, hidden=hidden)
        return self.places.setdefault(len(logits), logits).copy_(logits)


@attrs.define(eq=False)
class Replays:
    """`Capture` whose graphs run again what was recorded.

    Attributes:
        log: rows of each graph as it is captured, and ``"replay"``.
    """

    log: list[str] = attrs.field(factory=list)

    def __call__(self, launch: Callable[[], None]) -> Graph:
        launch()
        self.log.append("capture")
        return Replayed(launch, self.log)


@attrs.frozen(eq=False)
class Replayed:
    launch: Callable[[], None]
    log: list[str]

    def replay(self) -> None:
        self.log.append("replay")
        self.launch()
