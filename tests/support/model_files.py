"""Small checkpoints on disk, for tests: made with the writers of the formats' own libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tokenspeed.checkpoint.resolved import CheckpointKind, ResolvedModel

HF_CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}

CORPUS = (
    "the quick brown fox jumps over the lazy dog and 1234567890 runs away, don't they? "
    "naïve café — “quotes” … 日本語のテキスト 中文 한국어 😀 def f(x):\n    return x**2\n"
) * 20


def byte_level_tokenizer(*, specials: Sequence[str] = ("<bos>", "<eos>", "<|im_end|>"), size: int = 400) -> Tokenizer:
    """A byte-level BPE trained on a line of text; the specials are its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def with_bos_template(tokenizer: Tokenizer, bos: str = "<bos>") -> Tokenizer:
    """Let the post-processor put `bos` in front."""
    bos_id = tokenizer.token_to_id(bos)
    assert bos_id is not None
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return tokenizer


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, object] = HF_CONFIG,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, object] | None = None,
    generation: Mapping[str, object] | None = None,
    weights: bool = True,
) -> Path:
    """A folder in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if weights:
        save_file({"model.norm.weight": np.ones(64, np.float32)}, str(folder / "model.safetensors"))
    return folder


def resolved(path: Path, kind: CheckpointKind = CheckpointKind.SAFETENSORS) -> ResolvedModel:
    return ResolvedModel(kind=kind, path=path, name=path.name, served_name=path.name, origin=str(path))


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    metadata: Mapping[str, int | float | str | bool | Sequence[object]] | None = None,
    tokens: Sequence[str] = ("<s>", "</s>", "a", "b", "ab"),
    kinds: Sequence[int] = (3, 3, 1, 1, 1),
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file of a two-layer model; `metadata` adds keys or replaces those written here."""
    keys: dict[str, object] = {
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 2048,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 128,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    arrays = {"token_embd.weight": np.zeros((len(tokens), 64), np.float32), **(tensors or {})}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
