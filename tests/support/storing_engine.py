"""A process with an engine that stores a prompt's pages, says "stored", and then waits to be killed.

``storing_engine.py FOLDER``
"""

from __future__ import annotations

import sys
import threading

from ops_rig import greedy, hand_rank
from stored_ranks import PROMPT, come_to_rest, stored_settings

if __name__ == "__main__":
    with hand_rank(stored_settings(sys.argv[1])) as rank:
        print(rank.run(greedy("a", PROMPT)), flush=True)
        come_to_rest(rank)
        print("stored", flush=True)
        threading.Event().wait()
