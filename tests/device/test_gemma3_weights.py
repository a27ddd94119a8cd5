"""Gemma 3 weights from both file formats, which store norms differently, are the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_gemma import gemma_logits
from grouped_rows import native_grouped_run, run_over
from model_files import resolved, write_folder, write_gguf
from safetensors.torch import save_file

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.device.kv.grouped import GroupedPool
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.device.weights.random_source import RandomSource
from tokenspeed.device.weights.shapes import tensor_shapes

VOCAB, LAYERS, WINDOW = 48, 7, 20
Tensors = dict[str, torch.Tensor]

HF = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "torch_dtype": "float32",
}
GGUF = {
    "gemma3.block_count": LAYERS,
    "gemma3.feed_forward_length": 96,
    "gemma3.attention.key_length": 32,
    "gemma3.attention.value_length": 32,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": WINDOW,
    "gemma3.rope.freq_base": 1e6,
}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
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


def drawn(config: ModelConfig) -> Tensors:
    """Norms among them are what is multiplied by."""
    source = RandomSource(3, config)
    return {name: source.read(name) for name in tensor_shapes(config)}


def folder(path: Path) -> Checkpoint:
    """In the Hugging Face layout, whose norms are less one."""
    write_folder(path, config=HF)
    tensors = drawn(open_checkpoint(resolved(path)).config)
    stored = {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    save_file(stored, str(path / "model.safetensors"))
    return open_checkpoint(resolved(path))


def gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{PARTS[part.removesuffix('.weight')]}.weight"


def gguf(path: Path, config: ModelConfig) -> Checkpoint:
    tensors = {gguf_name(name): tensor.numpy() for name, tensor in drawn(config).items()}
    tokens, kinds = [f"t{number}" for number in range(VOCAB - 2)], [1] * (VOCAB - 2)
    merges: dict[str, object] = {"tokenizer.ggml.merges": ["t 0"]}
    write_gguf(
        path,
        arch="gemma3",
        metadata={**GGUF, **merges},  # type: ignore[dict-item]
        tokens=["<s>", "</s>", *tokens],
        kinds=[3, 3, *kinds],
        tensors=tensors,
    )
    return open_checkpoint(resolved(path, CheckpointKind.GGUF))


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_files_of_both_formats_give_the_logits_of_the_plain_computation(tmp_path: Path, native: bool) -> None:
    hf = folder(tmp_path / "hf")
    ids = np.random.RandomState(1).randint(0, VOCAB, 70).tolist()
    expected = gemma_logits(hf.config, {name: one.double() for name, one in drawn(hf.config).items()}, ids).float()
    for checkpoint in (hf, gguf(tmp_path / "model.gguf", hf.config)):
        if native:
            run = native_grouped_run(checkpoint, num_parents=64)
        else:
            model = bind_model(load_weights(checkpoint), num_pages=64, page_tokens=8)
            assert isinstance(model.pool, GroupedPool)
            run = run_over(model.step, model.pool)
        row = run.sequence(ids)
        got = torch.cat([run.forward([(row, count)], all_logits=True) for count in (30, 1, 39)])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
