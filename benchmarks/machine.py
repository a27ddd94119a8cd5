"""One line about the machine a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Python {platform.python_version()}, {platform.system()} {platform.release()}"
