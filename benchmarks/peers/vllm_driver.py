"""vLLM's v1 scheduler (PyPI ``vllm``) driven from Python, without its workers.

A round is what its engine core does around a forward: schedule, then update from the forward's output.
The output itself is made between the two and not counted. Prompts are hashed for the prefix cache.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # before vllm reads them; whoever imports this module keeps its environment
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from driver import TOKEN, prompt, serve
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LONGEST = 65536
HASH = get_hash_fn_by_name("sha256")
CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": LONGEST,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}


def scheduler_of(*, seats: int, block: int, pages: int, batched: int) -> Scheduler:
    """One layer of full attention; the model's folder holds a configuration and nothing else."""
    folder = Path(tempfile.gettempdir()) / "round-benchmark-opt"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig(model=str(folder), dtype="float16", seed=1, skip_tokenizer_init=True, max_model_len=LONGEST)
    cache = CacheConfig(block_size=block, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True)
    cache.num_gpu_blocks = pages
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=batched,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        log_stats=True,
        block_size=block,
        structured_output_manager=StructuredOutputManager(config),
    )


def request(rid: str, ids: list[int], block: int, max_new: int) -> Request:
    return Request(
        request_id=rid,
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=max_new, ignore_eos=True, temperature=0.0),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block, HASH),
    )


def forwarded(plan: object, scheduler: Scheduler) -> ModelRunnerOutput:
    rids = list(plan.num_scheduled_tokens)
    done = (scheduler.requests[rid] for rid in rids)
    return ModelRunnerOutput(
        req_ids=rids,
        req_id_to_index={rid: i for i, rid in enumerate(rids)},
        sampled_token_ids=[[TOKEN] if r.num_computed_tokens >= r.num_prompt_tokens else [] for r in done],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


class Running:
    def __init__(self, n: int, context: int, block: int, rounds: int) -> None:
        total = context + rounds + 256
        self.n = n
        self.scheduler = scheduler_of(
            seats=n, block=block, pages=n * (total // block + 2) + 64, batched=max(n * context, 8192)
        )
        for i in range(n):
            self.scheduler.add_request(request(f"request-{i:06d}", prompt(context, i), block, rounds + 200))
        while len(self.scheduler.running) < n or any(not r.num_output_tokens for r in self.scheduler.running):
            self.round()
        for _ in range(16):
            self.round()

    def round(self) -> int:
        plan = self.scheduler.schedule()
        start = time.perf_counter_ns()
        output = forwarded(plan, self.scheduler)
        other = time.perf_counter_ns() - start
        self.scheduler.update_from_output(plan, output)
        return other


def long_prompt(block: int, length: int, seed: int) -> tuple[int, int, int, int]:
    scheduler = scheduler_of(seats=8, block=block, pages=4 * (length // block + 16), batched=length + 64)
    ids = prompt(length, seed)
    clock = time.perf_counter_ns
    start = clock()
    scheduler.add_request(request("first", ids, block, 32))
    submitted = clock()
    plan = scheduler.schedule()
    admitted = clock()
    scheduler.update_from_output(plan, forwarded(plan, scheduler))
    again = ids[: length - 64] + [1] * 64
    hit_start = clock()
    scheduler.add_request(request("again", again, block, 32))
    hit_submitted = clock()
    plan = scheduler.schedule()
    hit_admitted = clock()
    if plan.num_scheduled_tokens["again"] > 64 + block:
        raise SystemExit("the second prompt did not hit")
    return submitted - start, admitted - submitted, hit_submitted - hit_start, hit_admitted - hit_submitted


init_none_hash(HASH)
serve(f"vllm {vllm.__version__}", Running, long_prompt)
