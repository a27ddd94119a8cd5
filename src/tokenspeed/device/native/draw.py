"""`sampling.draw.Drawer` in C: rows shared out among the threads of the step, no vocabulary sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from tokenspeed.device.native.library import NativeLibrary
from tokenspeed.device.native.model import NativeModel
from tokenspeed.device.native.step import Scratch
from tokenspeed.device.parts import ModelFactory, SamplerFactory
from tokenspeed.device.sampling.draw import Draw, Float32Array
from tokenspeed.device.sampling.processors import NO_PROCESSORS, LogitsProcessor
from tokenspeed.device.sampling.sampler import BatchSampler, batch_sampler
from tokenspeed.plane.table import Int64Array

ROW = np.dtype(
    [
        ("logits", np.uint64),
        ("top_k", np.int64),
        ("number", np.float64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("token", np.int64),
    ]
)
"""`ts_draw` of c/native.h."""


@attrs.frozen(kw_only=True, eq=False)
class NativeDrawer:
    """Called from the exec stream's thread only, whose OpenMP team it uses."""

    library: NativeLibrary
    threads: int
    scratch: Scratch = attrs.field(factory=Scratch)

    def __call__(self, rows: Sequence[Float32Array], draws: Sequence[Draw]) -> Int64Array:
        vocab, table = len(rows[0]), np.zeros(len(rows), dtype=ROW)
        kept = [np.ascontiguousarray(row) for row in rows]  # alive until the call has returned
        for at, (row, draw) in enumerate(zip(kept, draws, strict=True)):
            table[at] = (row.ctypes.data, draw.top_k, draw.number, draw.top_p, draw.temperature, draw.min_p, 0)
        calls = self.library.calls
        workspace = self.scratch.address(calls.ts_draw_workspace_bytes(vocab, self.threads))
        calls.ts_draw_tokens(table.ctypes.data, len(table), vocab, workspace, self.threads)
        tokens: Int64Array = table["token"].copy()
        return tokens


def sampler_of(model: ModelFactory) -> SamplerFactory:
    """What samples the model's logits: in C where the forward is. Call the factory on the exec stream's thread."""
    if not isinstance(model, NativeModel):
        return batch_sampler
    library, threads = model.library, model.threads

    def make(*, slots: int, vocab_size: int, processors: Mapping[str, LogitsProcessor] = NO_PROCESSORS) -> BatchSampler:
        drawer = NativeDrawer(library=library, threads=threads or torch.get_num_threads())
        return batch_sampler(slots=slots, vocab_size=vocab_size, drawer=drawer, processors=processors)

    return make
