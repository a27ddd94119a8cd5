"""nano-vllm's scheduler (PyPI ``nano-vllm-fork``, which adds guidance pairs to it) driven from Python.

The package's own ``__init__`` starts at torch and Triton kernels; its scheduler needs neither, so it is
imported around that. A round is what its engine does around a forward: schedule, then append the tokens.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import time
import types

from driver import TOKEN, prompt, serve

found = importlib.util.find_spec("nanovllm")
if found is None or found.submodule_search_locations is None:
    raise SystemExit("nanovllm is not installed")
package = types.ModuleType("nanovllm")
package.__path__ = list(found.submodule_search_locations)
sys.modules["nanovllm"] = package

from nanovllm.engine.scheduler import Scheduler  # noqa: E402 (behind the package above)
from nanovllm.engine.sequence import Sequence  # noqa: E402 (behind the package above)
from nanovllm.sampling_params import SamplingParams  # noqa: E402 (behind the package above)


def scheduler_of(*, seats: int, block: int, pages: int, batched: int) -> Scheduler:
    Sequence.block_size = block
    config = types.SimpleNamespace(
        max_num_seqs=seats,
        max_num_batched_tokens=batched,
        eos=-1,
        num_kvcache_blocks=pages,
        kvcache_block_size=block,
    )
    return Scheduler(config)


def sequence(ids: list[int], max_new: int) -> Sequence:
    return Sequence(ids, SamplingParams(max_tokens=max_new, ignore_eos=True))


class Running:
    def __init__(self, n: int, context: int, block: int, rounds: int) -> None:
        total = context + rounds + 256
        self.n = n
        self.scheduler = scheduler_of(
            seats=n, block=block, pages=n * (total // block + 2) + 64, batched=max(n * context, 8192)
        )
        for i in range(n):
            self.scheduler.add(sequence(prompt(context, i), rounds + 200))
        for _ in range(17):
            self.round()

    def round(self) -> int:
        scheduled, _ = self.scheduler.schedule()
        self.scheduler.postprocess(scheduled, [TOKEN] * len(scheduled))
        if len(scheduled) != self.n:
            raise SystemExit("a round without all requests")
        return 0


def long_prompt(block: int, length: int, seed: int) -> tuple[int, int, int, int]:
    scheduler = scheduler_of(seats=8, block=block, pages=4 * (length // block + 16), batched=length + 64)
    ids = prompt(length, seed)
    clock = time.perf_counter_ns
    start = clock()
    scheduler.add(sequence(ids, 32))
    submitted = clock()
    first, _ = scheduler.schedule()
    admitted = clock()
    scheduler.postprocess(first, [TOKEN])
    again = sequence(ids[: length - 64] + [1] * 64, 32)
    hit_start = clock()
    scheduler.add(again)
    hit_submitted = clock()
    scheduler.schedule()
    hit_admitted = clock()
    if again.num_cached_tokens < length - 64 - block:
        raise SystemExit("the second prompt did not hit")
    return submitted - start, admitted - submitted, hit_submitted - hit_start, hit_admitted - hit_submitted


serve(f"nano-vllm-fork {importlib.metadata.version('nano-vllm-fork')}", Running, long_prompt)
