"""llama.cpp through its `llama-batched-bench`, started anew for each command.

python llama_cpp_engine.py LLAMA_BATCHED_BENCH MODEL.gguf THREADS
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from engine_driver import serve


@dataclass
class BatchedBench:
    """Prompts are shared by the rows of a batch, as the tool does it to fill their contexts quickly."""

    program: str
    model: str
    threads: str

    def _run(self, prompt: int, new: int, batch: int) -> dict[str, float]:
        sizes = {"-npp": prompt, "-ntg": new, "-npl": batch, "-c": max(512, (prompt + new) * batch)}
        command = [self.program, "-m", self.model, "-t", self.threads, "-b", "2048", "-ub", "512", "-pps", "-kvu"]
        command += ["--output-format", "jsonl", *(str(part) for pair in sizes.items() for part in pair)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))

    def decode(self, batch: int, context: int, steps: int, *, sampled: bool) -> float:
        if sampled:
            raise NotImplementedError
        return self._run(context - steps // 2, steps, batch)["t_tg"] / steps

    def prefill(self, prompt: int) -> float:
        return self._run(prompt, 1, 1)["t_pp"]

    def warm(self, shared: int, new: int) -> float:
        raise NotImplementedError


serve("llama.cpp", lambda: BatchedBench(*sys.argv[1:4]))
