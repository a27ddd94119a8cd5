"""What the operator reads in the launcher's terminal: that the deployment serves, or why it does not."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.launch.messages import Failed, Ready
from tokenspeed.launch.starter import RELAY
from tokenspeed.settings.model import Settings


def ready_text(settings: Settings, resolved: ResolvedModel, ready: Mapping[str, Ready]) -> str:
    """What is served, where, and a line to try.

    Args:
        ready: what each child said of itself, by name.
    """
    lines = []
    for name, message in ready.items():
        if message.info is not None:
            info = message.info
            pool = info.kv_capacity_tokens or info.num_blocks * info.block_size
            lines.append(
                f"{name}: {info.model} ({info.dtype}), up to {info.max_model_len} tokens a request, "
                f"KV pool of {pool} tokens, {info.max_num_seqs} requests at once"
            )
    if RELAY in ready and ready[RELAY].url:
        lines.append(f"metrics of the ranks at {ready[RELAY].url}")
    url = next((message.url for name, message in ready.items() if message.url and name != RELAY), "")
    if not url:
        lines.append(f"serving {resolved.served_name} to the frontend at {settings.wire.handshake}")
        return "\n".join(lines) + "\n"
    reach = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    key = " -H 'authorization: Bearer YOUR_KEY'" if settings.server.api_key else ""
    asked = f'"model": "{resolved.served_name}", "prompt": "The capital of France is"'
    body = shlex.quote(f'{{{asked}, "max_tokens": 16, "temperature": 0}}')
    lines.append(f"serving {resolved.served_name} at {url}")
    lines.append(f"try: curl {reach}/v1/completions -H 'content-type: application/json'{key} -d {body}")
    return "\n".join(lines) + "\n"


def faults_text(faults: Mapping[str, Failed]) -> str:
    """Every fault once, consequences first and the root cause last.

    Args:
        faults: by the child's name, in order of discovery.
    """
    found = list(faults)

    def weight(name: str) -> tuple[bool, bool, int]:
        # A rank that dies takes its frontend along, and of several the earliest is the cause.
        return not faults[name].consequence, name.startswith("rank"), -found.index(name)

    lines = []
    for name in sorted(faults, key=weight):
        fault = faults[name]
        if fault.details:
            lines.append(fault.details.rstrip())
        lines.append(f"{name}: {fault.text}")
    return "".join(line + "\n" for line in lines)
