"""Decode batches as captured graphs: one for each of a few batch sizes, replayed over static buffers.

A replay launches a whole forward at the cost of one call. It reads the buffers that the capture read,
so a batch is copied into them and padded with rows of no context, which write nothing and read
nothing. Chunks of prompts run as they come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import attrs
import torch

from tokenspeed.device.step import AllReady, ForwardStep, LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken


class Graph(Protocol):
    def replay(self) -> None:
        """Launch all that was captured, on the current stream."""
        ...


class Capture(Protocol):
    def __call__(self, launch: Callable[[], None]) -> Graph:
        """Record what `launch` launches, instead of running it; start-up only, it waits for the device."""
        ...


def torch_capture() -> Capture:
    """`Capture` by torch, whose graphs share one memory pool: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(launch: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            launch()
        return graph

    return capture


@attrs.frozen(eq=False)
class StaticRows:
    """The buffers that graphs read: rows of one token, as `RaggedRows` has them; tables are as wide as can be."""

    rows: RaggedRows

    def padded(self, size: int) -> RaggedRows:
        """Views of the first `size` rows."""
        rows = self.rows
        return RaggedRows(
            token_ids=rows.token_ids[:size],
            positions=rows.positions[:size],
            offsets=rows.offsets[: size + 1],
            contexts=rows.contexts[:size],
            block_tables=rows.block_tables[:size],
            more_tables=tuple(table[:size] for table in rows.more_tables),
            logit_tokens=rows.logit_tokens[:size],
        )

    def fits(self, batch: RaggedRows) -> bool:
        pairs = zip(self.rows.group_tables, batch.group_tables, strict=True)
        return all(batch_table.shape[1] <= table.shape[1] for table, batch_table in pairs)

    def fill(self, batch: RaggedRows, size: int) -> None:
        """Copy `batch` in, and pad to `size` rows: no context, position and logit of token 0.

        What stands in the tables of padded rows, and behind the width of the others, is not read.
        """
        rows, count = self.rows, len(batch.contexts)
        rows.token_ids[:count].copy_(batch.token_ids)
        for buffer, values in (
            (rows.positions, batch.positions),
            (rows.contexts, batch.contexts),
            (rows.logit_tokens, batch.logit_tokens),
        ):
            buffer[: len(values)].copy_(values)
            buffer[len(values) : size].zero_()
        for buffer, values in zip(rows.group_tables, batch.group_tables, strict=True):
            buffer[:count, : values.shape[1]].copy_(values)


@attrs.frozen(kw_only=True, eq=False)
class DecodeGraph:
    """A captured forward of `size` rows; `logits` is what each replay writes, float32 ``[size, vocab]``."""

    size: int
    graph: Graph
    logits: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class GraphedStep:
    """`ForwardStep` that replays decode batches and runs the others. Build it with `capture_decodes`.

    Logits of a replayed batch are good until the next replay.

    Attributes:
        graphs: by size, the smallest first.
    """

    inner: ForwardStep
    static: StaticRows
    graphs: tuple[DecodeGraph, ...]

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ForwardStep.run`."""
        graph = self.graph_for(rows) if hidden is None and layers == range(self.num_layers) else None
        if graph is None:
            return self.inner.run(rows, layers=layers, ready=ready, hidden=hidden)
        # A graph has no fence inside: the whole load must be there before it begins (RA-37).
        ready.wait_for(self.num_layers - 1)
        with torch.inference_mode():
            self.static.fill(rows, graph.size)
            graph.graph.replay()
            return graph.logits[: len(rows.logit_tokens)]

    def graph_for(self, rows: RaggedRows) -> DecodeGraph | None:
        """The smallest that has room for `rows`; None for chunks, for more rows or wider tables than any has."""
        count = len(rows.contexts)
        index = bisect_left(self.graphs, max(count, len(rows.logit_tokens)), key=lambda graph: graph.size)
        if len(rows.token_ids) != count or index == len(self.graphs) or not self.static.fits(rows):
            return None
        return self.graphs[index]


def static_rows(size: int, widths: tuple[int, ...], device: torch.device) -> StaticRows:
    """`size` padded rows; `widths`: columns of each cache group's table."""
    tables = tuple(torch.zeros((size, width), dtype=torch.int32, device=device) for width in widths)

    def zeros() -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    return StaticRows(
        RaggedRows(
            token_ids=zeros(),
            positions=zeros(),
            offsets=torch.arange(size + 1, device=device),
            contexts=zeros(),
            block_tables=tables[0],
            more_tables=tables[1:],
            logit_tokens=zeros(),
        )
    )


def capture_decodes(
    step: ForwardStep, *, sizes: tuple[int, ...], widths: tuple[int, ...], device: torch.device, capture: Capture
) -> GraphedStep:
    """Capture `step` for each of `sizes`, the largest first, whose memory the others then share.

    A first run outside a capture compiles kernels and makes what libraries make once.

    Raises: InvariantBroken: no size.
    """
    if not sizes or min(sizes) < 1:
        raise InvariantBroken("decode graphs without a size", sizes=sizes)
    static, graphs = static_rows(max(sizes), widths, device), []
    for size in sorted(set(sizes), reverse=True):
        rows, outputs = static.padded(size), list[torch.Tensor]()

        def launch(rows: RaggedRows = rows, outputs: list[torch.Tensor] = outputs) -> None:
            outputs.append(step.run(rows, layers=range(step.num_layers), ready=AllReady()))

        launch()
        graph = capture(launch)
        graphs.append(DecodeGraph(size=size, graph=graph, logits=outputs[-1]))
    return GraphedStep(inner=step, static=static, graphs=tuple(reversed(graphs)))
