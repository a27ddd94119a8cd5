"""From files to panels: what a file stores keeps its meaning, its row order and, if asked, its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Ggml
from model_files import HF_CONFIG, resolved, write_folder
from native_rig import NUM_PAGES, native_model, native_run, prompt
from paged_rows import paged_run
from safetensors.torch import save_file

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.device.native.structs import Format
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.device.weights.random_source import RandomSource
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.errors import ModelError
from tokenspeed.settings.model import WeightsMode

VOCAB = 40
TOKENS = prompt(30, seed=2, vocab=VOCAB)
KINDS: Mapping[str, Ggml] = {
    "token_embd": Ggml.Q8_0,
    "attn_q": Ggml.Q4_1,
    "attn_k": Ggml.Q8_0,
    "attn_v": Ggml.F16,
    "attn_output": Ggml.Q4_0,
    "ffn_gate": Ggml.Q4_1,
    "ffn_up": Ggml.Q5_1,
    "ffn_down": Ggml.Q5_0,
    "output": Ggml.BF16,
}
"""A type for each part, as published files mix them."""

PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}


def hf_folder(folder: Path, arch: str, **changes: object) -> Path:
    return write_folder(folder, config={**HF_CONFIG, "vocab_size": VOCAB, **MODELS[arch], **changes}, weights=False)


def drawn(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    source = RandomSource(3, checkpoint.config)
    return {name: source.read(name) for name in tensor_shapes(checkpoint.config)}


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, str(folder / "model.safetensors"))
    return open_checkpoint(resolved(folder))


def safetensors_checkpoint(folder: Path, arch: str, dtype: torch.dtype) -> Checkpoint:
    path = hf_folder(folder, arch)
    save_file({"model.norm.weight": torch.ones(64)}, str(path / "model.safetensors"))
    tensors = drawn(open_checkpoint(resolved(path)))
    return opened(path, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def stored_rows(name: str, value: np.ndarray, arch: str) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter orders them: pairs for llama, halves for the others."""
    heads = {"attn_q": 4, "attn_k": 2}.get(name, 0)
    if arch != "llama" or not heads:
        return value
    return np.ascontiguousarray(
        value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
    )


def quantized_gguf(path: Path, arch: str, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    writer = gguf.GGUFWriter(path, arch)
    numbers = {"block_count": 2, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 128}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    if arch == "qwen3":
        numbers |= {"attention.key_length": 32, "attention.value_length": 32}
    for key, number in numbers.items():
        writer.add_uint32(f"{arch}.{key}", number)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", [f"w{i}" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCAB)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    for name, tensor in tensors.items():
        stem, ending = name.rsplit(".", 1)
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else ""
        part = PARTS[stem.split(".", 3)[3] if layer else stem]
        value = stored_rows(part, tensor.numpy(), arch)
        kind = KINDS.get(part, Ggml.F32) if ending == "weight" else Ggml.F32
        called = f"blk.{layer}.{part}.{ending}" if layer else f"{part}.{ending}"
        writer.add_tensor(called, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(resolved(path, CheckpointKind.GGUF))


def native_logits(checkpoint: Checkpoint, mode: WeightsMode) -> torch.Tensor:
    run = native_run(native_model(checkpoint, mode))
    return run.forward([(run.sequence(TOKENS), len(TOKENS))], all_logits=True)


def torch_logits(checkpoint: Checkpoint) -> torch.Tensor:
    step = bind_model(load_weights(checkpoint), num_pages=NUM_PAGES, page_tokens=8).step
    run = paged_run(step, num_pages=NUM_PAGES, page_tokens=8)
    return run.forward([(run.sequence(TOKENS), len(TOKENS))], all_logits=True)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_file_that_mixes_types_computes_what_torch_makes_of_it(tmp_path: Path, arch: str) -> None:
    folder = hf_folder(tmp_path / "hf", arch)
    save_file({"model.norm.weight": torch.ones(64)}, str(folder / "model.safetensors"))
    checkpoint = quantized_gguf(tmp_path / "mixed.gguf", arch, drawn(open_checkpoint(resolved(folder))))
    wanted = torch_logits(checkpoint)
    exact, native = (native_logits(checkpoint, mode) for mode in (WeightsMode.EXACT, WeightsMode.NATIVE))
    assert (exact - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert (native - wanted).abs().max() < 2e-3 * wanted.abs().max()
    for mode in (WeightsMode.FP16, WeightsMode.INT8G32):
        assert (native_logits(checkpoint, mode) - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_native_weights_keep_the_types_of_the_file(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen2")
    save_file({"model.norm.weight": torch.ones(64)}, str(folder / "model.safetensors"))
    checkpoint = quantized_gguf(tmp_path / "mixed.gguf", "qwen2", drawn(open_checkpoint(resolved(folder))))
    weights = native_model(checkpoint, WeightsMode.NATIVE).step.weights
    layer = weights.layers[0]
    assert [part.format for part in (weights.embedding, weights.head)] == [Format.Q8, Format.BF16]
    assert [part.format for part in (layer.q, layer.k, layer.v, layer.o)] == [
        Format.Q4M,
        Format.Q8,
        Format.F16,
        Format.Q4M,
    ]
    assert [part.format for part in (layer.gate, layer.up, layer.down)] == [Format.Q4M, Format.Q8M, Format.Q8]


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.bfloat16, Format.BF16), (torch.float16, Format.F16), (torch.float32, Format.F32)]
)
def test_native_weights_of_a_float_checkpoint_have_the_bits_of_exact_ones(
    tmp_path: Path, dtype: torch.dtype, kind: Format
) -> None:
    checkpoint = safetensors_checkpoint(tmp_path, "qwen2", dtype)
    weights = native_model(checkpoint, WeightsMode.NATIVE).step.weights
    assert {linear.format for layer in weights.layers for linear in layer.linears} == {kind}
    assert torch.equal(native_logits(checkpoint, WeightsMode.NATIVE), native_logits(checkpoint, WeightsMode.EXACT))


def test_a_missing_tensor_is_named_before_anything_is_packed(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "llama")
    save_file({"model.norm.weight": torch.ones(64)}, str(folder / "model.safetensors"))
    with pytest.raises(ModelError, match="embed_tokens"):
        native_model(open_checkpoint(resolved(folder)), WeightsMode.NATIVE)
