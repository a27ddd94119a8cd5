"""Weights from every source: the same tensors give the same model; what does not fit is named."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import attrs
import gguf
import numpy as np
import pytest
import torch
from dense_llama import dense_logits
from model_files import HF_CONFIG, resolved, write_folder, write_gguf
from paged_rows import paged_run
from safetensors.torch import save_file

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.device.layers.rope import rope_frequencies
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.gguf_source import GgufSource
from tokenspeed.device.weights.load import Weights, load_weights
from tokenspeed.device.weights.random_source import RandomSource
from tokenspeed.device.weights.shapes import model_bytes, tensor_shapes
from tokenspeed.errors import InvariantBroken, ModelError

VOCAB = 40
Tensors = dict[str, torch.Tensor]


def hf_tensors(folder: Path) -> Tensors:
    """Random tensors for the configuration in `folder`."""
    config = open_checkpoint(resolved(folder)).config
    source = RandomSource(3, config)
    return {name: source.read(name) for name in tensor_shapes(config)}


def hf_folder(folder: Path, **changes: object) -> Path:
    config = {**HF_CONFIG, "vocab_size": VOCAB, "torch_dtype": "float32", "tie_word_embeddings": True, **changes}
    return write_folder(folder, config=config)


def hf_checkpoint(folder: Path, tensors: Tensors) -> Checkpoint:
    save_file(tensors, str(folder / "model.safetensors"))
    return open_checkpoint(resolved(folder))


def gguf_names(tensors: Tensors, *, arch: str) -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them: its own names and, for llama, q and k rows in pairs."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
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
    written = {}
    for name, tensor in tensors.items():
        value = tensor.numpy()
        if name in names:
            written[names[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part, 0)
        if arch == "llama" and heads:
            shape = value.shape
            value = value.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        written[f"blk.{layer}.{parts[part]}.{kind}"] = np.ascontiguousarray(value)
    return written


def gguf_checkpoint(path: Path, tensors: dict[str, np.ndarray], *, arch: str = "llama", **keys: int) -> Checkpoint:
    words = [f"w{i}" for i in range(VOCAB)]
    write_gguf(path, arch=arch, tokens=words, kinds=[1] * VOCAB, tensors=tensors, metadata=keys)
    return open_checkpoint(resolved(path, CheckpointKind.GGUF))


def same(first: Weights, second: Weights, *, within: float = 0.0) -> None:
    assert list(first.tensors) == list(second.tensors)
    for name, tensor in first.tensors.items():
        torch.testing.assert_close(tensor, second.tensors[name], rtol=within, atol=within)


QWEN = {
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_gguf_and_a_safetensors_file_of_the_same_tensors_load_alike(tmp_path: Path, arch: str) -> None:
    folder = hf_folder(tmp_path / "hf", **QWEN.get(arch, {}))
    tensors = hf_tensors(folder)
    keys = {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32} if arch == "qwen3" else {}
    from_gguf = gguf_checkpoint(tmp_path / "m.gguf", gguf_names(tensors, arch=arch), arch=arch, **keys)
    same(load_weights(hf_checkpoint(folder, tensors)), load_weights(from_gguf))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_loaded_weights_compute_what_the_files_tensors_mean(tmp_path: Path, arch: str) -> None:
    folder = hf_folder(tmp_path / "hf", **QWEN.get(arch, {}))
    tensors = hf_tensors(folder)
    checkpoint = hf_checkpoint(folder, tensors)
    step = bind_model(load_weights(checkpoint), num_pages=8, page_tokens=8).step
    run = paged_run(step, num_pages=8, page_tokens=8)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    wanted = dense_logits(
        checkpoint.config, {k: v.double() for k, v in tensors.items()}, ids, rope_frequencies(checkpoint.config)
    )
    got = run.forward([(run.sequence(ids), len(ids))], all_logits=True)
    assert (got.double() - wanted).abs().max().item() < 2e-4


def test_quantized_tensors_load_as_the_library_dequantizes_them(tmp_path: Path) -> None:
    names = gguf_names(hf_tensors(hf_folder(tmp_path / "hf")), arch="llama")
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    plain = gguf_checkpoint(tmp_path / "plain.gguf", names)
    assert plain.gguf is not None
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", int(plain.gguf.metadata[f"llama.{key}"]))
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.attention.head_count_kv", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", [f"w{i}" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCAB)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    kinds = {"ffn_down": gguf.GGMLQuantizationType.Q8_0, "ffn_up": gguf.GGMLQuantizationType.Q4_1}
    kinds["token_embd"] = gguf.GGMLQuantizationType.F16
    rounded = dict(names)
    for name, value in names.items():
        kind = next((kind for part, kind in kinds.items() if part in name), gguf.GGMLQuantizationType.F32)
        stored = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        rounded[name] = gguf.quants.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantized = load_weights(open_checkpoint(resolved(path, CheckpointKind.GGUF)))
    same(load_weights(gguf_checkpoint(tmp_path / "rounded.gguf", rounded)), quantized)
    assert not torch.equal(quantized.tensors["0.down"], load_weights(plain).tensors["0.down"])


def test_half_precision_is_widened_exactly_with_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = hf_folder(tmp_path / "hf", torch_dtype="bfloat16")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in hf_tensors(folder).items()}
    with caplog.at_level(logging.INFO):
        narrow = load_weights(hf_checkpoint(folder, halves))
    assert [r.getMessage() for r in caplog.records] == ["weights: stored as bfloat16, converted to float32"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        wide = load_weights(hf_checkpoint(folder, {name: tensor.float() for name, tensor in halves.items()}))
    assert caplog.records == []
    same(narrow, wide)


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "one")
    tensors = hf_tensors(folder)
    single = hf_checkpoint(folder, tensors)
    parts = hf_folder(tmp_path / "many")
    names = list(tensors)
    for index, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in chosen}, str(parts / f"part-{index}.safetensors"))
    where = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    (parts / "model.safetensors").unlink()
    (parts / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    sharded = open_checkpoint(resolved(parts))
    assert len(sharded.weight_files) == 2
    same(load_weights(single), load_weights(sharded))


def test_missing_tensors_are_named_as_the_file_would_call_them(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    tensors = hf_tensors(folder)
    lacking = {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        load_weights(hf_checkpoint(folder, lacking))
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.1\.ffn_down\.weight is missing"):
        load_weights(gguf_checkpoint(tmp_path / "m.gguf", gguf_names(lacking, arch="llama")))
    few = {k: v for k, v in tensors.items() if "layers" not in k}
    with pytest.raises(ModelError, match=r"tensors .*q_proj.* and 13 more are missing"):
        load_weights(hf_checkpoint(folder, few))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    tensors = hf_tensors(folder)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 64)
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \(64, 64\); .* asks for \(32, 64\)"):
        load_weights(hf_checkpoint(folder, tensors))


def test_of_a_sharded_checkpoint_the_file_at_fault_is_named(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "many")
    tensors = hf_tensors(folder)
    last = "model.layers.1.mlp.down_proj.weight"

    def written(in_the_second: Tensors) -> Checkpoint:
        first = {name: tensor for name, tensor in tensors.items() if name != last}
        save_file(first, str(folder / "a-1.safetensors"))
        save_file(in_the_second, str(folder / "a-2.safetensors"))
        return open_checkpoint(resolved(folder))

    (folder / "model.safetensors").unlink()
    places = {name: "a-2.safetensors" if name == last else "a-1.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=r"a-2\.safetensors: tensor \S*down_proj\.weight is missing"):
        load_weights(written({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    with pytest.raises(
        ModelError, match=r"a-2\.safetensors: tensor \S*down_proj\.weight has shape \(3, 3\); .* \(64, 128\)"
    ):
        load_weights(written({last: torch.zeros(3, 3)}))
    with pytest.raises(ModelError, match=r"a-2\.safetensors: tensor extra\.weight is in the file but not"):
        load_weights(written({last: tensors[last], "extra.weight": torch.zeros(2)}))
    whole = written({last: tensors[last]})
    file = folder / "a-2.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"a-2\.safetensors: not a usable safetensors file"):
        load_weights(whole)


def test_a_tensor_the_architecture_does_not_use_is_refused_unless_it_is_harmless(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    tensors = hf_tensors(folder)
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(VOCAB, 64),
    }
    load_weights(hf_checkpoint(folder, {**tensors, **harmless}))
    stranger = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}
    with pytest.raises(ModelError, match=r"o_proj\.bias is in the file but not in this architecture"):
        load_weights(hf_checkpoint(folder, {**tensors, **stranger}))


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    checkpoint = hf_checkpoint(folder, hf_tensors(folder))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a usable safetensors file"):
        load_weights(checkpoint)
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        load_weights(attrs.evolve(checkpoint, weight_files=(folder / "gone.safetensors",)))


def test_a_number_format_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    tensors = hf_tensors(folder)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8; supported are F32, F16, BF16"):
        load_weights(hf_checkpoint(folder, tensors))
    broken = gguf_checkpoint(tmp_path / "m.gguf", gguf_names(hf_tensors(folder), arch="llama"))
    assert broken.gguf is not None
    entry = broken.gguf.tensors["output_norm.weight"]
    odd = {**broken.gguf.tensors, entry.name: attrs.evolve(entry, ggml_type=gguf.GGMLQuantizationType.I8)}
    source = GgufSource(attrs.evolve(broken.gguf, tensors=odd), broken.config)
    with pytest.raises(ModelError, match=r"output_norm\.weight is stored as I8"):
        source.read("model.norm.weight")


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    checkpoint = hf_checkpoint(folder, hf_tensors(folder))
    save_file({"model.norm.weight": torch.ones(64)}, str(folder / "more.safetensors"))
    files = (*checkpoint.weight_files, folder / "more.safetensors")
    with pytest.raises(ModelError, match=r"more\.safetensors: tensor model\.norm\.weight is in model\.safetensors"):
        load_weights(attrs.evolve(checkpoint, weight_files=files))


@attrs.define(eq=False)
class Steps:
    seen: list[tuple[str, int, int]] = attrs.field(factory=list)

    def step(self, what: str, done: int, total: int) -> None:
        self.seen.append((what, done, total))


def test_loading_tells_how_far_it_is_and_ends_at_the_whole() -> None:
    watch = Steps()
    weights = load_weights(open_random_checkpoint("tiny-llama", served_name="x"), progress=watch)
    done = [count for _, count, _ in watch.seen]
    assert done == sorted(done)
    assert len(done) > 10
    assert watch.seen[-1] == ("weights", weights.nbytes, weights.nbytes)


def test_the_announced_size_is_that_of_the_tensors() -> None:
    for name, config in RANDOM_MODELS.items():
        if name.startswith("tiny"):
            weights = load_weights(open_random_checkpoint(name, served_name=name))
            tied = weights.tensors["embedding"].nbytes if config.tie_embeddings else 0
            norms = sum(t.nbytes - t[0].nbytes * 2 for n, t in weights.tensors.items() if n.endswith("qk_norm"))
            assert (
                weights.nbytes == model_bytes(config) == sum(t.nbytes for t in weights.tensors.values()) + tied - norms
            )


def test_random_weights_are_the_same_on_every_machine() -> None:
    weights = load_weights(open_random_checkpoint("tiny-qwen3", served_name="x"))
    digest = hashlib.sha256()
    for name in sorted(weights.tensors):
        digest.update(weights.tensors[name].contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "ef35cb79c18ea970"


def test_a_weight_can_be_taken_once() -> None:
    weights = load_weights(open_random_checkpoint("tiny-llama", served_name="x"))
    weights.take("norm")
    with pytest.raises(InvariantBroken):
        weights.take("norm")
    weights = load_weights(open_random_checkpoint("tiny-llama", served_name="x"))
    bind_model(weights, num_pages=2, page_tokens=8)
    assert weights.tensors == {}
