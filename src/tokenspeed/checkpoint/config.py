"""What a checkpoint says of its model's mathematics, in one form for every file format."""

from __future__ import annotations

import enum
import math
from types import MappingProxyType

import attrs

ARCHITECTURES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
    }
)
"""The families this build serves: model type (also the GGUF architecture) to class name."""


class Activation(enum.Enum):
    """Of the feed-forward's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh formula (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)."""


class RopeKind(enum.Enum):
    """How rotary frequencies were changed after pre-training.

    With ``theta ** (-2i / head_dim)`` as the plain frequency of pair i:

    * LINEAR: every frequency divided by `factor`.
    * LLAMA3: long wavelengths divided by `factor`, short ones kept, a smooth part between
      (`low_freq_factor`, `high_freq_factor`, `original_max_positions`).
    * YARN: Peng et al. 2023, arXiv:2309.00071 (`factor`, `beta_fast`, `beta_slow`, `truncate`,
      `original_max_positions`); cos and sin are multiplied by `attention_factor`.
    * FACTORS: frequency i divided by ``frequency_factors[i]`` (GGUF's ``rope_freqs.weight``, which
      is how a GGUF file carries LLAMA3).
    """

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"


@attrs.frozen(kw_only=True)
class RopeScaling:
    """Parameters of one :class:`RopeKind`; fields its kind does not use keep their default.

    Attributes:
        attention_factor: multiplies cos and sin; already resolved from the checkpoint's `mscale`
            settings, 1.0 where the kind has none.
        truncate: YARN rounds the bounds of its ramp to whole dimensions.
        frequency_factors: ``head_dim / 2`` divisors, kind FACTORS only.
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@attrs.frozen(kw_only=True)
class LinearAttention:
    """Layers that keep a state of one size in place of keys and values of every token.

    Attributes:
        layers: their numbers, in order.
        heads: each with a state ``[key_dim, value_dim]`` in every such layer.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Shape and constants of a dense decoder-only transformer of the Llama or Gemma 3 family, or of a hybrid.

    Attributes:
        model_type: a key of `ARCHITECTURES`.
        num_kv_heads: divides `num_heads`.
        head_dim: of q, k and v alike; need not be ``hidden_size / num_heads``.
        vocab_size: rows of the embedding, which may exceed the tokenizer's ids.
        max_positions: longest sequence the checkpoint was made for, rope scaling included.
        tie_embeddings: the output projection is the embedding.
        attention_bias: q, k and v projections have a bias (the output projection never has).
        qk_norm: RMS norm over `head_dim` of each q and k head before rotation.
        activation: of the feed-forward's gate.
        post_norms: what attention and feed-forward add is normed before it is added.
        embedding_scale: embeddings are multiplied by it.
        query_scale: what scores are multiplied by; None: ``head_dim ** -0.5``.
        sliding_window: tokens a query of `window_layers` sees: itself and those right before it.
        window_layers: numbers of the layers that see so little, in order; the others see everything.
        window_rope_theta: rotary base of these layers, without `rope_scaling`; None: as the others.
        linear: the layers with linear attention in place of the other kind; None: there are none.
        torch_dtype: how weights are stored: ``float32``, ``bfloat16``, …, or for GGUF the name of
            its main ggml type.
    """

    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    activation: Activation = Activation.SILU
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    linear: LinearAttention | None = None
    torch_dtype: str

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Numbers of the attention layers that see everything, in order."""
        others = self.window_layers + (() if self.linear is None else self.linear.layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much YARN enlarges cos and sin (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
