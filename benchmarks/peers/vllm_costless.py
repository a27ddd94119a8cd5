"""vLLM's engine in front of a device that computes nothing, for `benchmarks/frontend_cost.py`.

    COSTLESS_STEP_MS=25 PYTHONPATH=benchmarks/peers \
        vllm serve FOLDER --distributed-executor-backend vllm_costless.CostlessExecutor ...

Everything around the device is vLLM's own: API server, tokenizer, engine core, scheduler with asynchronous scheduling
as on accelerators. Written for vLLM 0.32. Steps follow each other without a gap if the engine is ahead, like those of
the simulated device.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

LOWEST_ID, HIGHEST_ID = 1000, 20000
"""Ordinary words; no special token."""
BLOCKS = 16384


class CostlessExecutor(Executor):
    supports_pp = False

    def _init_executor(self) -> None:
        self.scheduler_config.async_scheduling = True  # the CPU platform has switched it off
        self.step_s = float(os.environ.get("COSTLESS_STEP_MS", "0")) / 1e3
        self.spec = FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.left: dict[str, int] = {}  # prompt tokens still to compute
        self.words = itertools.cycle(range(LOWEST_ID, HIGHEST_ID, 7))
        self.launched: ModelRunnerOutput = EMPTY_MODEL_RUNNER_OUTPUT
        self.free_s = 0.0  # when the device has done what it was given
        self.jobs: queue.SimpleQueue[tuple[float, Future[Any], ModelRunnerOutput]] = queue.SimpleQueue()
        if self.step_s:
            threading.Thread(target=self._device, name="costless-device", daemon=True).start()

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        answers = {
            "get_kv_cache_spec": {"layer": self.spec},
            "get_supported_kv_cache_layouts": ["LBHNC"],
            "determine_available_memory": BLOCKS * self.spec.page_size_bytes,
            "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
            "get_supported_tasks": ("generate",),
        }
        return [answers.get(method)] if isinstance(method, str) else [None]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self.left[new.req_id] = new.prompt_len - new.num_computed_tokens
        for rid in scheduler_output.finished_req_ids:
            self.left.pop(rid, None)
        ids, tokens = [], []
        for rid, count in scheduler_output.num_scheduled_tokens.items():
            self.left[rid] = max(0, self.left[rid] - count)
            ids.append(rid)
            tokens.append([] if self.left[rid] else [next(self.words)])
        made = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={rid: at for at, rid in enumerate(ids)}, sampled_token_ids=tokens
        )
        if ids:
            self.launched = made
            return _done(None) if non_block else None
        return _done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        if not self.step_s:
            return _done(self.launched) if non_block else self.launched
        future: Future[Any] = Future()
        self.free_s = max(self.free_s, time.monotonic()) + self.step_s
        self.jobs.put((self.free_s, future, self.launched))
        return future if non_block else future.result()

    def _device(self) -> None:
        while True:
            due_s, future, made = self.jobs.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            future.set_result(made)

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


def _done(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
