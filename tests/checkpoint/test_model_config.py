"""config.json and GGUF metadata to one model configuration, or to a refusal that names the key."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from model_files import HF_CONFIG, write_gguf

from tokenspeed.checkpoint.config import Activation, ModelConfig, RopeKind, RopeScaling
from tokenspeed.checkpoint.config_gguf import config_from_gguf
from tokenspeed.checkpoint.config_hf import config_from_hf
from tokenspeed.checkpoint.gguf_header import open_gguf
from tokenspeed.errors import ModelError

QWEN2 = {**HF_CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**HF_CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def test_a_llama_config_is_read() -> None:
    assert config_from_hf(HF_CONFIG) == ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=512,
        rms_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_positions=2048,
        tie_embeddings=False,
        attention_bias=False,
        qk_norm=False,
        sliding_window=None,
        torch_dtype="bfloat16",
    )


def test_the_families_differ_in_bias_norm_and_head_size() -> None:
    qwen2, qwen3 = config_from_hf(QWEN2), config_from_hf(QWEN3)
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 16)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_missing_keys_mean_what_the_format_says() -> None:
    needed = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "torch_dtype")
    config = config_from_hf({key: value for key, value in HF_CONFIG.items() if key not in needed})
    assert (config.num_kv_heads, config.rms_eps, config.rope_theta) == (4, 1e-6, 10000.0)
    assert (config.max_positions, config.torch_dtype) == (2048, "float32")


def test_both_spellings_of_rope_parameters_are_the_same() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    old = config_from_hf({**HF_CONFIG, "rope_theta": 5e5, "rope_scaling": scaling})
    new = config_from_hf(
        {
            **{key: value for key, value in HF_CONFIG.items() if key != "rope_theta"},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        }
    )
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling(kind=RopeKind.LINEAR, factor=4.0)


def test_llama3_scaling_is_read_in_full() -> None:
    config = config_from_hf(
        {
            **HF_CONFIG,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    )
    assert config.rope_scaling == RopeScaling(
        kind=RopeKind.LLAMA3, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


def test_yarn_resolves_its_attention_factor_and_stretches_the_positions() -> None:
    plain = {"rope_type": "yarn", "factor": 4.0}
    config = config_from_hf({**HF_CONFIG, "rope_scaling": plain})
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert config.rope_scaling.original_max_positions == 2048
    assert config.max_positions == 8192
    given = config_from_hf({**HF_CONFIG, "rope_scaling": {**plain, "attention_factor": 0.5}})
    assert given.rope_scaling is not None
    assert given.rope_scaling.attention_factor == 0.5
    both = config_from_hf({**HF_CONFIG, "rope_scaling": {**plain, "mscale": 2.0, "mscale_all_dim": 1.0}})
    assert both.rope_scaling is not None
    assert both.rope_scaling.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"vision_config": {}}, "images or sound"),
        ({"text_config": {"model_type": "llama"}}, "images or sound"),
        ({"num_local_experts": 8}, "num_local_experts is 8; mixture-of-experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"hidden_size": 0}, "hidden_size is 0; a positive whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 66}, "multiple of 4 heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; supported are default, linear"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_value_and_alternative(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says.replace("[", r"\[")) as caught:
        config_from_hf({**HF_CONFIG, **changes}, "somewhere/config.json")
    assert "somewhere/config.json" in str(caught.value)


def test_a_window_that_no_layer_uses_is_no_obstacle() -> None:
    unused = {**QWEN2, "sliding_window": 4096, "use_sliding_window": False}
    assert config_from_hf(unused).sliding_window is None
    late = {**QWEN2, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}
    assert config_from_hf(late).sliding_window is None
    with pytest.raises(ModelError, match="sliding_window is 4096"):
        config_from_hf({**late, "max_window_layers": 1})
    full = {**QWEN2, "sliding_window": 4096, "layer_types": ["full_attention"] * 2}
    assert config_from_hf(full).sliding_window is None


def gguf_config(path: Path, **kwargs: object) -> ModelConfig:
    return config_from_gguf(open_gguf(write_gguf(path / "m.gguf", **kwargs)))  # type: ignore[arg-type]


def test_gguf_metadata_says_the_same_as_config_json(tmp_path: Path) -> None:
    config = gguf_config(tmp_path)
    assert config == ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=5,
        rms_eps=pytest.approx(1e-5),
        rope_theta=10000.0,
        max_positions=2048,
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        torch_dtype="F32",
    )


def test_gguf_tensors_say_what_metadata_leaves_out(tmp_path: Path) -> None:
    tensors = {
        "output.weight": np.zeros((5, 64), np.float16),
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
        "blk.0.attn_q_norm.weight": np.zeros(16, np.float32),
    }
    config = gguf_config(tmp_path, arch="qwen3", tensors=tensors, metadata={"qwen3.attention.key_length": 32})
    assert (config.tie_embeddings, config.attention_bias, config.qk_norm, config.head_dim) == (False, True, True, 32)


GEMMA_HF = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 24,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 106],
}


def test_a_gemma_config_is_read_in_both_spellings() -> None:
    config = config_from_hf(GEMMA_HF)
    assert (config.model_type, config.architectures) == ("gemma3", ("Gemma3ForCausalLM",))
    assert (config.sliding_window, config.full_layers) == (24, (5,))
    assert (config.rope_theta, config.window_rope_theta, config.rope_scaling) == (1e6, 1e4, None)
    assert (config.activation, config.post_norms, config.qk_norm) == (Activation.GELU_TANH, True, True)
    assert (config.embedding_scale, config.score_scale, config.tie_embeddings) == (8.0, 32**-0.5, True)
    new = {key: value for key, value in GEMMA_HF.items() if not key.startswith("rope")}
    new["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert config_from_hf(new) == config


def test_a_gemma_config_s_scaling_is_of_the_full_layers_and_its_query_scale_is_kept() -> None:
    scaled = config_from_hf(
        {**GEMMA_HF, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 168}
    )
    assert scaled.rope_scaling == RopeScaling(kind=RopeKind.LINEAR, factor=8.0)
    assert scaled.score_scale == 168**-0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sliding_window": None}, "sliding_window is None; a positive whole number"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*for each of 8 layers"),
        ({"layer_types": ["chunked_attention"] * 8}, "layer_types is"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; capped logits"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; only gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters is .*full_attention and sliding_attention"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures is"),
        ({"vision_config": {}}, "vision_config is"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; supported are llama, qwen2, qwen3, gemma3_text"),
    ],
)
def test_a_gemma_config_this_build_cannot_compute_is_refused_by_key(change: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        config_from_hf({**GEMMA_HF, **change})


GEMMA = {
    "gemma3.attention.key_length": 32,
    "gemma3.attention.sliding_window": 24,
    "gemma3.block_count": 8,
    "gemma3.rope.freq_base": 1e6,
}


def test_a_gemma_file_says_little_of_what_makes_it_one(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q_norm.weight": np.zeros(32, np.float32)}
    config = gguf_config(tmp_path, arch="gemma3", metadata=GEMMA, tensors=tensors)
    assert config.architectures == ("Gemma3ForCausalLM",)
    assert (config.sliding_window, config.full_layers) == (24, (5,))
    assert (config.rope_theta, config.window_rope_theta, config.rope_scaling) == (1e6, 1e4, None)
    assert (config.activation, config.post_norms, config.qk_norm) == (Activation.GELU_TANH, True, True)
    assert (config.embedding_scale, config.score_scale) == (8.0, 32**-0.5)


@pytest.mark.parametrize(
    ("metadata", "full"),
    [
        ({"gemma3.attention.sliding_window_pattern": [True, False] * 4}, (1, 3, 5, 7)),
        ({"gemma3.attention.sliding_window_pattern": 3}, (2, 5)),
    ],
)
def test_a_gemma_file_may_say_which_layers_have_the_window(
    tmp_path: Path, metadata: dict[str, object], full: tuple[int, ...]
) -> None:
    config = gguf_config(tmp_path, arch="gemma3", metadata={**GEMMA, **metadata, "gemma3.rope.freq_base_swa": 5e3})
    assert config.full_layers == full
    assert config.window_rope_theta == 5e3


def test_the_largest_gemma_scales_scores_by_the_hidden_size_a_head(tmp_path: Path) -> None:
    config = gguf_config(tmp_path, arch="gemma3", metadata={**GEMMA, "gemma3.block_count": 62})
    assert config.score_scale == (64 / 4) ** -0.5


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"gemma3.attention.sliding_window": 0}, "sliding_window is 0; a positive whole number"),
        ({"gemma3.attention.sliding_window_pattern": [True]}, "true or false for each of 8 layers"),
        ({"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; capped logits"),
    ],
)
def test_a_gemma_file_that_contradicts_itself_is_refused(
    tmp_path: Path, metadata: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        gguf_config(tmp_path, arch="gemma3", metadata={**GEMMA, **metadata})


def test_gguf_frequency_factors_become_a_scaling(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    config = gguf_config(tmp_path, tensors={"rope_freqs.weight": factors})
    assert config.rope_scaling == RopeScaling(kind=RopeKind.FACTORS, frequency_factors=tuple(factors.tolist()))


def test_gguf_frequency_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    assert gguf_config(tmp_path, tensors={"rope_freqs.weight": np.ones(8, np.float32)}).rope_scaling is None


def test_gguf_yarn_multiplies_its_attention_factor(tmp_path: Path) -> None:
    config = gguf_config(
        tmp_path,
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 1024,
            "llama.rope.scaling.attn_factor": 2.0,
        },
    )
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1.0))
    assert config.max_positions == 4096


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window is 4096"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv is 3"),
        ({"llama.attention.head_count": [4, 2]}, "head_count is"),
        ({"split.count": 3}, "split.count is 3"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
    ],
)
def test_a_gguf_file_this_build_cannot_serve_is_refused_by_key(
    tmp_path: Path, metadata: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        gguf_config(tmp_path, metadata=metadata)


def test_an_unknown_gguf_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"general\.architecture is 'phi3'; supported are llama, qwen2, qwen3"):
        gguf_config(tmp_path, arch="phi3")
