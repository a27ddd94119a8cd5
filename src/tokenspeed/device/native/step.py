"""A `ForwardStep` whose every call is one call into C."""

from __future__ import annotations

import ctypes

import attrs
import torch

from tokenspeed.device.host_sync import device_code
from tokenspeed.device.kv.grouped import GroupedPool
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.native.library import NativeLibrary
from tokenspeed.device.native.memory import ALIGNMENT
from tokenspeed.device.native.ready import LayerCounter
from tokenspeed.device.native.structs import CallStruct, ModelStruct, PoolStruct, RowsStruct, Status, TableStruct
from tokenspeed.device.native.weights import NativeWeights
from tokenspeed.device.step import AllReady, LayersReady, RaggedRows, check_layers
from tokenspeed.errors import InvariantBroken

_INT64 = ("token_ids", "positions", "offsets", "contexts", "logit_tokens")


@attrs.define(eq=False)
class Scratch:
    """Memory of the step in progress, grown and never shrunk. Writer: the exec stream's thread."""

    memory: torch.Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.uint8))

    def address(self, count: int) -> int:
        """Of `count` aligned bytes."""
        if self.memory.numel() < count + ALIGNMENT:
            self.memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8)
        start: int = self.memory.data_ptr()
        return start + -start % ALIGNMENT


@attrs.frozen(kw_only=True, eq=False)
class NativeStep:
    """`device.step.ForwardStep` in C. Build it with `native.bind.bind_native`; called from the exec stream's jobs.

    Attributes:
        weights, frequencies: what `model` points into; `pool` likewise for `pages`.
        threads: size of the OpenMP team, the same as torch's, so that both use the same threads.
    """

    library: NativeLibrary
    weights: NativeWeights
    frequencies: tuple[torch.Tensor, ...]
    model: ModelStruct
    pool: KvPool | GroupedPool
    pages: PoolStruct
    page_tokens: int
    threads: int
    scratch: Scratch = attrs.field(factory=Scratch)

    @property
    def num_layers(self) -> int:
        return self.weights.config.num_layers

    @device_code
    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ForwardStep.run`.

        Raises: InvariantBroken: `layers`, `rows` or `hidden` cannot be computed; nothing was written.
        """
        check_layers(layers, hidden, of=self.num_layers)
        state = self._hidden(rows, hidden)
        logits = torch.empty((len(rows.logit_tokens), self.weights.config.vocab_size), dtype=torch.float32)
        match ready:
            case AllReady():
                self._call(rows, layers, None, state, logits)
            case LayerCounter():
                self._call(rows, layers, ready.address, state, logits)
                ready.wait_for(layers.stop - 1)  # of a load that failed, C was told that all is there
            case _:  # it can only be asked from Python: one call a layer
                for index in layers:
                    ready.wait_for(index)
                    self._call(rows, range(index, index + 1), None, state, logits)
        return logits if layers.stop == self.num_layers else state

    def _hidden(self, rows: RaggedRows, hidden: torch.Tensor | None) -> torch.Tensor:
        """float32 ``[T, hidden]`` of this call's own."""
        shape = (len(rows.token_ids), self.weights.config.hidden_size)
        if hidden is None:
            return torch.empty(shape, dtype=torch.float32)
        if hidden.shape != shape or hidden.dtype != torch.float32:
            raise InvariantBroken("a hidden state of another batch", shape=hidden.shape, expected=shape)
        return hidden.contiguous().clone()

    def _call(
        self, rows: RaggedRows, layers: range, layers_ready: int | None, hidden: torch.Tensor, logits: torch.Tensor
    ) -> None:
        given = rows_struct(rows)
        if len(rows.group_tables) != self.pages.num_caches:
            raise InvariantBroken("tables of other cache groups than the model's", groups=len(rows.group_tables))
        calls, longest = self.library.calls, rows.block_tables.shape[1] * self.page_tokens
        needed = calls.ts_workspace_bytes(ctypes.byref(self.model), given.tokens, longest, self.threads)
        call = CallStruct(
            first=layers.start,
            last=layers.stop,
            threads=self.threads,
            layers_ready=layers_ready,
            hidden=hidden.data_ptr(),
            logits=logits.data_ptr(),
            workspace=self.scratch.address(needed),
            workspace_bytes=needed,
        )
        status = calls.ts_run(
            ctypes.byref(self.model), ctypes.byref(self.pages), ctypes.byref(given), ctypes.byref(call)
        )
        if status != Status.OK:
            raise InvariantBroken("a batch that the native forward refuses", why=Status(status).name, layers=layers)


def rows_struct(rows: RaggedRows) -> RowsStruct:
    """Point at the tensors of `rows`, which have to outlive the result.

    Raises: InvariantBroken: a tensor of another type, not contiguous, or of a length that contradicts the others.
    """
    tokens, count = len(rows.token_ids), len(rows.contexts)
    kinds = {name: getattr(rows, name) for name in _INT64}
    wrong = [name for name, tensor in kinds.items() if tensor.dtype != torch.int64 or not tensor.is_contiguous()]
    tables = rows.group_tables
    if wrong or any(table.dtype != torch.int32 or not table.is_contiguous() for table in tables):
        raise InvariantBroken("a batch of other types than agreed", wrong=wrong or ["block_tables"])
    lengths = {len(table) for table in tables}
    if len(rows.positions) != tokens or len(rows.offsets) != count + 1 or lengths != {count}:
        raise InvariantBroken("a batch whose parts have different lengths", tokens=tokens, rows=count)
    structs = (TableStruct * len(tables))(
        *(TableStruct(blocks=table.data_ptr(), max_blocks=table.shape[1]) for table in tables)
    )
    return RowsStruct(
        tokens=tokens,
        rows=count,
        wanted=len(rows.logit_tokens),
        token_ids=rows.token_ids.data_ptr(),
        positions=rows.positions.data_ptr(),
        offsets=rows.offsets.data_ptr(),
        contexts=rows.contexts.data_ptr(),
        tables=ctypes.cast(structs, ctypes.POINTER(TableStruct)),  # the pointer keeps the array alive
        logit_tokens=rows.logit_tokens.data_ptr(),
    )
