"""What a waiting request keeps in memory, measured on the real ingress, table and scheduler."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from scheduler_rig import build

from tokenspeed.control.ingress import Ingress
from tokenspeed.plane.messages import GenerateRequest, SamplingParams
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch

TOKENS = 200
REQUESTS = 512


def request(at: int) -> GenerateRequest:
    ids = np.arange(at, at + TOKENS, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=20, temperature=0.7, stop_token_ids=(2,))
    return GenerateRequest(rid=f"chatcmpl-{at:032x}", input_ids=ids, sampling=sampling)


@pytest.mark.parametrize("policy", [Fcfs(), AgedPriority(), LongestPrefixMatch()], ids=["fcfs", "priority", "lpm"])
def test_a_waiting_request_costs_less_than_two_kilobytes_beside_its_tokens(policy: SchedulingPolicy) -> None:
    rig = build(policy=policy, max_model_len=256, num_pages=200)
    specs = DeviceSpecs(
        backend="none",
        model_name="none",
        dtype="none",
        vocab_size=4096,
        max_model_len=256,
        num_pages=200,
        page_tokens=4,
        max_num_seqs=8,
        max_batched_tokens=64,
        eos_token_ids=(2,),
    )
    ingress = Ingress(specs=specs, table=rig.table, max_waiting=REQUESTS, grammar_refusal=lambda sampling: "")
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(REQUESTS):
            rows = ingress.admit(
                (request(at),), holds=rig.scheduler.holds, buffers=lambda rid: False, waiting=lambda: 0
            ).rows
            rig.scheduler.submit(rows)
        for round_id in range(REQUESTS):
            rig.scheduler.waiting.refresh(round_id=round_id)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rig.scheduler.sizes().waiting == REQUESTS
    assert (after - before) / REQUESTS < 2048 + 4 * TOKENS
