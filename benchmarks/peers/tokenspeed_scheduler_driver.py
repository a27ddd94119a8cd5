"""TokenSpeed's C++ scheduler (PyPI ``tokenspeed-scheduler``, 0.1.42) driven from Python.

A round is what an event loop over it does: make the plan, read it, build one result and one
reservation a request in Python, advance.
"""

from __future__ import annotations

import importlib.metadata
import time

import tokenspeed_scheduler as ts
from driver import TOKEN, prompt, serve

GROUP = "full"
FORWARD = ts.ForwardEvent


def scheduler_of(*, seats: int, block: int, pages: int, batched: int) -> ts.Scheduler:
    config = ts.SchedulerConfig()
    config.prefix_granularity = block
    config.max_scheduled_tokens = batched
    config.max_batch_size = seats
    config.num_device_pages = pages
    config.num_host_pages = 0
    config.num_snapshot_pages = 1
    config.disable_l2_cache = True
    config.disable_prefix_cache = False
    config.decode_input_tokens = 1
    config.cache_groups = [
        ts.CacheGroupConfig(group_id=GROUP, block_granularity=block, total_pages=pages, attn_kind=ts.AttnKind.Full)
    ]
    return ts.Scheduler(config)


def spec(rid: str, ids: list[int], max_new: int) -> ts.RequestSpec:
    made = ts.RequestSpec()
    made.request_id, made.tokens, made.max_new_tokens = rid, ids, max_new
    return made


def landed(rids: list[str], decodes: set[str]) -> ts.ExecutionEvent:
    event = ts.ExecutionEvent()
    for rid in rids:
        result = FORWARD.ExtendResult()
        result.request_id, result.tokens = rid, [TOKEN]
        event.add_event(result)
        if rid in decodes:
            room = FORWARD.UpdateReserveNumTokens()
            room.request_id, room.reserve_num_tokens_in_next_schedule_event = rid, 1
            event.add_event(room)
    return event


class Running:
    def __init__(self, n: int, context: int, block: int, rounds: int) -> None:
        total = context + rounds + 256
        self.n = n
        self.scheduler = scheduler_of(
            seats=n, block=block, pages=n * (total // block + 2) + 64, batched=max(n * context, 8192)
        )
        self.scheduler.submit_requests([spec(f"request-{i:06d}", prompt(context, i), rounds + 200) for i in range(n)])
        while self.scheduler.prefilling_size() or self.scheduler.waiting_size():
            forward = self.scheduler.next_execution_plan().forward[0]
            rids, extends = list(forward.request_ids), forward.num_extends()
            ends = zip(forward.extend_prefix_lens, forward.input_lengths, forward.prefill_lengths, strict=False)
            done = [before + count >= whole for before, count, whole in ends][:extends]
            ready = [rid for i, rid in enumerate(rids) if i >= extends or done[i]]
            self.scheduler.advance(landed(ready, set(rids[extends:])))
        if self.scheduler.decoding_size() != n:
            raise SystemExit(f"{self.scheduler.decoding_size()} of {n} requests decode")
        for _ in range(16):
            self.round()

    def round(self) -> int:
        plan = self.scheduler.next_execution_plan()
        forward = plan.forward[0]
        rids = forward.request_ids
        seen = (forward.request_pool_indices, forward.input_lengths, forward.block_tables_arrays()[GROUP])
        event = ts.ExecutionEvent()
        add, extend, reserve = event.add_event, FORWARD.ExtendResult, FORWARD.UpdateReserveNumTokens
        for rid in rids:
            result = extend()
            result.request_id = rid
            result.tokens = [TOKEN]
            add(result)
            room = reserve()
            room.request_id = rid
            room.reserve_num_tokens_in_next_schedule_event = 1
            add(room)
        self.scheduler.advance(event)
        if len(rids) != self.n or len(seen[2]) != self.n:
            raise SystemExit("a round without all requests")
        return 0


def long_prompt(block: int, length: int, seed: int) -> tuple[int, int, int, int]:
    scheduler = scheduler_of(seats=8, block=block, pages=4 * (length // block + 16), batched=length + 64)
    ids = prompt(length, seed)
    clock = time.perf_counter_ns
    start = clock()
    scheduler.submit_requests([spec("first", ids, 32)])
    submitted = clock()
    scheduler.next_execution_plan()
    admitted = clock()
    scheduler.advance(landed(["first"], set()))
    for _ in range(2):  # the rounds after publish the prompt's pages
        scheduler.next_execution_plan()
        scheduler.advance(landed(["first"], {"first"}))
    scheduler.next_execution_plan()
    again = ids[: length - 64] + [1] * 64
    hit_start = clock()
    scheduler.submit_requests([spec("again", again, 32)])
    hit_submitted = clock()
    forward = scheduler.next_execution_plan().forward[0]
    hit_admitted = clock()
    if forward.extend_prefix_lens[list(forward.request_ids).index("again")] < length - 64 - block:
        raise SystemExit("the second prompt did not hit")
    return submitted - start, admitted - submitted, hit_submitted - hit_start, hit_admitted - hit_submitted


serve(f"tokenspeed-scheduler {importlib.metadata.version('tokenspeed-scheduler')}", Running, long_prompt)
