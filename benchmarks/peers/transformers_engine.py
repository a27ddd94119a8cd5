"""Transformers: forwards of one rectangular batch over its dynamic cache.

python transformers_engine.py HF_FOLDER DTYPE THREADS
"""

from __future__ import annotations

import sys
import time

import torch
import transformers
from engine_driver import Prompts, serve


class ForwardBench:
    """Greedy tokens, taken one forward after the other; what `generate` adds to that is left out."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.prompts = Prompts()
        self.caches: dict[tuple[int, int], tuple[transformers.Cache, torch.Tensor]] = {}

    def _forward(self, ids: torch.Tensor, cache: transformers.Cache) -> torch.Tensor:
        """Next tokens ``[batch, 1]``."""
        out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(1, keepdim=True)

    def _filled(self, batch: int, length: int) -> tuple[transformers.Cache, torch.Tensor]:
        if (batch, length) not in self.caches:
            cache = transformers.DynamicCache()
            ids = torch.tensor(self.prompts.same(batch, length))
            self.caches[batch, length] = cache, self._forward(ids, cache)
        return self.caches[batch, length]

    def decode(self, batch: int, context: int, steps: int, *, sampled: bool) -> float:
        if sampled:
            raise NotImplementedError
        length = context - steps // 2
        cache, token = self._filled(batch, length)
        start = time.perf_counter()
        for _ in range(steps):
            token = self._forward(token, cache)
        took = time.perf_counter() - start
        cache.crop(-steps)
        return took / steps

    def prefill(self, prompt: int) -> float:
        ids = torch.tensor([self.prompts.fresh(prompt)])
        start = time.perf_counter()
        self._forward(ids, transformers.DynamicCache())
        return time.perf_counter() - start

    def warm(self, shared: int, new: int) -> float:
        cache, _ = self._filled(1, shared)
        ids = torch.tensor([self.prompts.fresh(new)])
        start = time.perf_counter()
        self._forward(ids, cache)
        took = time.perf_counter() - start
        cache.crop(-new)
        return took


def bench() -> ForwardBench:
    folder, dtype, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    return ForwardBench(folder, dtype)


serve(f"transformers {transformers.__version__}", bench)
