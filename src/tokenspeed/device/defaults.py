"""The build's own choice of model: the checkpoint's weights."""

from __future__ import annotations

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.attention.groups import attention_groups
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.parts import BoundModel, LoadedWeights
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import Weights, load_weights
from tokenspeed.device.weights.shapes import FLOAT32_BYTES, model_bytes
from tokenspeed.errors import InvariantBroken


@attrs.frozen(eq=False)
class ModelFromWeights:
    """`device.parts.ModelFactory` of the checkpoint's own weights."""

    def expected_bytes(self, config: ModelConfig) -> int:
        return model_bytes(config)

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        return attention_groups(config, page_tokens, number_bytes=FLOAT32_BYTES)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> Weights:
        return load_weights(checkpoint, progress=progress)

    def bind(self, weights: LoadedWeights, *, num_pages: int, page_tokens: int) -> BoundModel:
        if not isinstance(weights, Weights):
            raise InvariantBroken("weights of another factory", kind=type(weights).__name__)
        return bind_model(weights, num_pages=num_pages, page_tokens=page_tokens)
