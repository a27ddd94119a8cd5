"""What the frontend's process does to its interpreter once it is set up."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys
from tokenspeed.launch.frontend_main import settle
from tokenspeed.plane.messages import OutputBatch
from tokenspeed.wire.layouts import LAYOUTS
from tokenspeed.wire.outputs import decode_output, encode_output
from tokenspeed.wire.structs import pack, unpack

ROWS = 1024
none, zeros = [[] for _ in range(ROWS)], [0] * ROWS
names = ("finished", "prompt_tokens", "completion_tokens", "cached_tokens", "status")
batch = OutputBatch(
    rids=[f"{i:x}" for i in range(ROWS)], output_ids=[[i] for i in range(ROWS)], messages=[""] * ROWS,
    logprobs=none, top_logprobs=none, prompt_logprobs=none, prompt_top_logprobs=none,
    **dict.fromkeys(names, zeros),
)
payload = pack(encode_output(batch, LAYOUTS, engine_index=0))

def collections():
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    for _ in range(20):
        decode_output(unpack(payload), LAYOUTS)
    gc.callbacks.clear()
    return len(seen)

before = collections()
settle()
print(before > 20, collections(), sys.getswitchinterval() < 0.002)
"""


def test_batches_of_outputs_start_no_collection_and_no_thread_waits_long_for_another() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["True", "0", "True"]
