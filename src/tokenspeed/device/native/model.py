"""The native forward as a replaceable part, and the choice between it and torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Ggml

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.attention.groups import attention_groups
from tokenspeed.device.defaults import ModelFromWeights
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.native.bind import NativeModelBound, bind_native
from tokenspeed.device.native.library import NativeLibrary, native_library
from tokenspeed.device.native.weights import NativeWeights, load_native
from tokenspeed.device.parts import LoadedWeights, ModelFactory
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.errors import InvariantBroken, NotSupported, SettingsError
from tokenspeed.settings.model import DeviceSettings, Forward, KvDtype, WeightsMode

log = logging.getLogger(__name__)

_BYTES_EACH: Mapping[WeightsMode, float] = MappingProxyType(
    {WeightsMode.EXACT: 4.0, WeightsMode.FP16: 2.0, WeightsMode.INT8G32: 36 / 32}
)
_STORED_BYTES: Mapping[str, float] = MappingProxyType({"float16": 2.0, "bfloat16": 2.0})


@attrs.frozen(kw_only=True, eq=False)
class NativeModel:
    """`device.parts.ModelFactory` over the C library.

    Attributes:
        mode: not AUTO.
        threads: None: as many as torch uses on the thread that binds.
        kv_dtype: of the KV pool, float32 or float16.
    """

    library: NativeLibrary
    mode: WeightsMode
    threads: int | None = None
    kv_dtype: torch.dtype = torch.float32

    def expected_bytes(self, config: ModelConfig) -> int:
        numbers = sum(math.prod(shape) for shape in tensor_shapes(config).values())
        return int(numbers * (stored_bytes_each(config) if self.mode is WeightsMode.NATIVE else _BYTES_EACH[self.mode]))

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        return attention_groups(config, page_tokens, number_bytes=self.kv_dtype.itemsize)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> NativeWeights:
        return load_native(self.library, checkpoint, self.mode, progress)

    def bind(self, weights: LoadedWeights, *, num_pages: int, page_tokens: int) -> NativeModelBound:
        if not isinstance(weights, NativeWeights):
            raise InvariantBroken("weights of another factory", kind=type(weights).__name__)
        return bind_native(
            self.library,
            weights,
            num_pages=num_pages,
            page_tokens=page_tokens,
            threads=self.threads or torch.get_num_threads(),
            kv_dtype=self.kv_dtype,
        )


def stored_bytes_each(config: ModelConfig) -> float:
    """Bytes of one weight in the main type that the checkpoint is stored in; 4 for types unknown here."""
    if config.torch_dtype in Ggml.__members__:
        elements, size = GGML_QUANT_SIZES[Ggml[config.torch_dtype]]
        return float(size) / float(elements)
    return _STORED_BYTES.get(config.torch_dtype, 4.0)


def cpu_model_factory(device: DeviceSettings) -> ModelFactory:
    """What `device.forward`, `weights` and `kv_dtype` ask for. May compile the library, which takes seconds.

    Raises: SettingsError: torch has no such weights or pool. NotSupported: the native forward is asked
        for and cannot be had; the text says why.
    """
    if device.forward is Forward.TORCH:
        _check_torch(device)
        return ModelFromWeights()
    try:
        library = native_library()
    except NotSupported as reason:
        if device.forward is Forward.NATIVE or not _torch_can(device):
            raise
        log.warning("%s; torch computes: a token's last bits may depend on the batch it is in", reason)
        return ModelFromWeights()
    mode = WeightsMode.NATIVE if device.weights is WeightsMode.AUTO else device.weights
    half = device.kv_dtype is KvDtype.FLOAT16 or (device.kv_dtype is KvDtype.AUTO and mode is not WeightsMode.EXACT)
    kv_dtype = torch.float16 if half else torch.float32
    log.info("native forward: %s, weights %s, KV %s", library.instruction_set, mode.value, kv_dtype)
    return NativeModel(library=library, mode=mode, kv_dtype=kv_dtype)


def _torch_can(device: DeviceSettings) -> bool:
    return device.weights in (WeightsMode.AUTO, WeightsMode.EXACT) and device.kv_dtype is not KvDtype.FLOAT16


def _check_torch(device: DeviceSettings) -> None:
    if device.weights not in (WeightsMode.AUTO, WeightsMode.EXACT):
        raise SettingsError(
            f"device.weights: {device.weights.value} is for device.forward native; with torch they are exact"
        )
    if device.kv_dtype is KvDtype.FLOAT16:
        raise SettingsError("device.kv_dtype: float16 is for device.forward native; with torch it is float32")
