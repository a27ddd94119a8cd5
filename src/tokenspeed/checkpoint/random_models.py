"""Models without files: a small configuration, seeded random weights, a byte-level tokenizer.

For tests and for trying the engine on a machine without a network; their text is noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ARCHITECTURES, Activation, LinearAttention, ModelConfig, RopeKind, RopeScaling
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.tokenizer_data import TokenizerBytes
from tokenspeed.errors import ModelError
from tokenspeed.plane.messages import SamplingParams

SPECIALS = ("<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>")
BOS_ID, EOS_ID, END_ID = 256, 257, 258

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TINY = ModelConfig(
    model_type="llama",
    architectures=(ARCHITECTURES["llama"],),
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256 + len(SPECIALS),
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_positions=2048,
    tie_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    torch_dtype="float32",
)


RANDOM_MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny-llama": _TINY,
        "tiny-llama3": attrs.evolve(
            _TINY,
            tie_embeddings=False,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(
                kind=RopeKind.LLAMA3,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_positions=256,
            ),
        ),
        # An embedding wider than the tokenizer, as published Qwen2 models have it.
        "tiny-qwen2": attrs.evolve(
            _TINY,
            model_type="qwen2",
            architectures=(ARCHITECTURES["qwen2"],),
            attention_bias=True,
            vocab_size=288,
            rms_eps=1e-6,
        ),
        "tiny-qwen3": attrs.evolve(
            _TINY,
            model_type="qwen3",
            architectures=(ARCHITECTURES["qwen3"],),
            qk_norm=True,
            head_dim=32,
            tie_embeddings=False,
            rms_eps=1e-6,
            rope_theta=1e6,
        ),
        # A window far shorter than most prompts, and of no whole number of pages.
        "tiny-gemma3": attrs.evolve(
            _TINY,
            model_type="gemma3",
            architectures=(ARCHITECTURES["gemma3"],),
            num_layers=4,
            num_kv_heads=1,
            head_dim=32,
            qk_norm=True,
            rms_eps=1e-6,
            rope_theta=1e6,
            activation=Activation.GELU_TANH,
            post_norms=True,
            embedding_scale=8.0,
            sliding_window=24,
            window_layers=(0, 1, 3),
            window_rope_theta=10000.0,
        ),
        # A state in every other layer.
        "tiny-hybrid": attrs.evolve(
            _TINY,
            model_type="gated_delta_hybrid",
            architectures=("GatedDeltaHybridForCausalLM",),
            num_layers=4,
            linear=LinearAttention(layers=(0, 2), heads=4, key_dim=16, value_dim=32),
        ),
        # The shape of a 135M model, for measurements where no weights are at hand.
        "llama-135m": attrs.evolve(
            _TINY,
            num_layers=30,
            hidden_size=576,
            intermediate_size=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=49152,
            rope_theta=100000.0,
            max_positions=8192,
        ),
        # The shapes of large models, for the simulated device, which loads no weights.
        "llama-8b": attrs.evolve(
            _TINY,
            num_layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            tie_embeddings=False,
            rope_theta=500000.0,
            max_positions=131072,
        ),
        "llama-32b": attrs.evolve(
            _TINY,
            num_layers=64,
            hidden_size=5120,
            intermediate_size=27648,
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=152064,
            tie_embeddings=False,
            rope_theta=1e6,
            max_positions=131072,
        ),
    }
)


def is_random_model(name: str) -> bool:
    """Whether `name` is a preset, or one with other weights: ``NAME@SEED``."""
    preset, at, seed = name.partition("@")
    return preset in RANDOM_MODELS and (seed.isascii() and seed.isdigit() if at else True)


def open_random_checkpoint(name: str, *, served_name: str) -> Checkpoint:
    """The preset `name`, or ``NAME@SEED``; the same name gives the same weights everywhere.

    Raises: ModelError: no such preset, or a seed that is no number; the text lists the presets.
    """
    preset, _, seed = name.partition("@")
    if not is_random_model(name):
        raise ModelError(f"random:{name}: no such preset; there are {', '.join(RANDOM_MODELS)}, each also as NAME@SEED")
    return Checkpoint(
        kind=CheckpointKind.RANDOM,
        path=None,
        name=name,
        served_name=served_name,
        config=RANDOM_MODELS[preset],
        weight_files=(),
        generation=SamplingParams(),
        eos_token_ids=(EOS_ID, END_ID),
        bos_token_id=BOS_ID,
        add_bos=True,
        tokenizer_vocab_size=256 + len(SPECIALS),
        chat_template=CHAT_TEMPLATE,
        special_tokens=(("bos_token", SPECIALS[0]), ("eos_token", SPECIALS[1]), ("pad_token", SPECIALS[-1])),
        tokenizer=TokenizerBytes(specials=SPECIALS, prefix_ids=(BOS_ID,)),
        seed=int(seed) if seed else zlib.crc32(preset.encode()),
    )
