"""Which tests' processes were ended by the watchdog, from the log of a run: one a line; nothing if others failed, too.

python tools/hung_tests.py LOG
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ENDED = re.compile(r"^worker '\w+' crashed while running (.+)$", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) ", re.MULTILINE)
WATCHDOG = re.compile(r"Timeout \(\d+:\d\d:\d\d")


def hung_tests(log: str) -> list[str]:
    """Each once. A run names a test once for every process that it ended."""
    ended = [str(ast.literal_eval(name)) for name in ENDED.findall(log)]
    alone = len(FAILED.findall(log)) == len(ended) == len(WATCHDOG.findall(log))  # others failed, or really crashed
    return list(dict.fromkeys(ended)) if alone else []


if __name__ == "__main__":
    print("\n".join(hung_tests(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))))  # noqa: T201
