"""Plants one fault at a time in a copy of the scheduler, and expects random lives of requests to catch it.

::

    python tools/planted_faults.py              # every fault, a few seconds each
    python tools/planted_faults.py --only salt --seconds 60

A fault is one replacement in one file of ``src/tokenspeed/scheduler``; the copy lies in a temporary folder, and the
tree is left alone. A fault whose text is not in its file any more is an error: bring it up to date. The lives are
those of ``tests/scheduler/model_world.py``, by seed; a fault that outlives them must be caught by a scenario test
of `SCENARIOS`. Prints what caught each fault; fails if one lived.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

DRIVER = """
import sys, time, traceback
from model_seen import Seen
from model_world import run_trace

end, seed = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    try:
        run_trace(seed, steps=50, seen=Seen())
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).split(chr(10))[0][:70] or frame.line[:90]
        print(f"seed {seed}: {type(error).__name__} in {frame.name}: {said}")
        sys.exit(1)
    seed += 1
print(f"{seed} lives")
"""


SCENARIOS = ("images", "host_tier", "kv_events", "pending_copies", "model", "pressure", "planning")
"""``tests/scheduler/test_scheduler_*.py`` for moments that random lives seldom come to."""


class Fault(NamedTuple):
    """`old` is in `file` once."""

    name: str
    file: str
    old: str
    new: str


FAULTS = (
    Fault(
        "who has nothing left to plan keeps its place",
        "admission.py",
        "        self.state.leaving = self.life.count(State.DRAINING) + self.life.count(State.FINISHING)\n",
        "        self.state.leaving = 0\n",
    ),
    Fault(
        "who plans its last token in this very forward gives up its place in it",
        "admission.py",
        "        return seated < self.config.request_slots and seated - self.state.leaving < self.config.seats\n",
        "        self.begin_plan()\n"
        "        return seated < self.config.request_slots and seated - self.state.leaving < self.config.seats\n",
    ),
    Fault(
        "a forward's blocks are findable before it has landed",
        "prefill.py",
        "        schedule.scheduled[row] = end\n",
        "        schedule.scheduled[row] = end\n        schedule.landed[row] = end\n",
    ),
    Fault(
        "a write-through does not pin its sources",
        "host/tier.py",
        "        self.pool.share(group, blocks)\n        for block",
        "        for block",
    ),
    Fault(
        "a load does not pin its targets",
        "host/tier.py",
        "        self.pool.share(group, device_blocks)\n",
        "",
    ),
    Fault("a load does not pin its sources", "host/tier.py", "        self.host.pin(group, host_blocks)\n", ""),
    Fault(
        "a block is found in the host tier before its write-back is acknowledged",
        "host/blocks.py",
        "return block if block is not None and lane.written[block] else None",
        "return block",
    ),
    Fault(
        "a restore does not wait for the snapshot",
        "host/snapshots.py",
        "return image.snapped and all(",
        "return all(",
    ),
    Fault(
        "a restore does not wait for the pages' write-backs",
        "host/snapshots.py",
        "            host.all_written(group, imaged.host_blocks) for",
        "            True for",
    ),
    Fault(
        "a restored request goes on before its restore is acknowledged",
        "admission.py",
        "        self.life.move(row, Event.RESTORE)\n",
        "        self.life.move(row, Event.RESTORE)\n        self.life.move(row, Event.RESTORED)\n",
    ),
    Fault(
        "an image reads the state from where this plan moves it to",
        "host/snapshots.py",
        "self.residents.source_of(number, block) for block in blocks",
        "block for block in blocks",
    ),
    Fault(
        "an image does not pin the host blocks it finds",
        "host/snapshots.py",
        "            host.pin(group, imaged.host_blocks[imaged.host_blocks != NOWHERE])\n",
        "            pass\n",
    ),
    Fault(
        "a window gives up a block too early",
        "groups.py",
        "np.maximum(starts - (self.window - 1), 0) // self.block_tokens",
        "np.maximum(starts - (self.window - 1), 0) // self.block_tokens + 1",
    ),
    Fault(
        "the boundary block is not copied",
        "residents.py",
        "        if own != source:  # it may",
        "        if False:  # it may",
    ),
    Fault(
        "the boundary block is shared and written",
        "reach.py",
        "        return common if common >= self.least else 0\n",
        "        return min(common + 1, room) if common >= self.least else 0\n",
    ),
    Fault(
        "a state's new owner gets it as it was",
        "residents.py",
        "if clean and (self.groups[group].zero or self.config.zero_new_blocks):",
        "if clean and self.config.zero_new_blocks:",
    ),
    Fault(
        "a kept state is written over by its owner",
        "kept_states.py",
        "        if position == NO_POSITION:\n            return\n",
        "        return\n",
    ),
    Fault(
        "the move of a state is not copied",
        "residents.py",
        "        self.state.copies.append(BlockCopy(group=group.number, source=old, destination=int(got[0])))\n",
        "",
    ),
    Fault(
        "promises are not kept back",
        "packed.py",
        "            lacking = lane.promised + want[group] - slack\n",
        "            lacking = want[group] - slack\n",
    ),
    Fault(
        "promises are not kept back, one group",
        "pool.py",
        "        need = want[0] + state.promised\n",
        "        need = want[0]\n",
    ),
    Fault(
        "a request that leaves does not give back its promises",
        "residents.py",
        "            self.pool.redeem(number, int(tables.owed[slot]))\n            tables.first",
        "            tables.first",
    ),
    Fault(
        "what one group takes is not kept for another that was said to get it",
        "residents.py",
        "        for group, slots in enumerate(parts):\n            self.pool.promise(group, len(slots))\n"
        "        for group, slots in enumerate(parts):\n            self.pool.redeem(group, len(slots))\n",
        "        for group, slots in enumerate(parts):\n",
    ),
    Fault(
        "the salt is not part of the name",
        "names.py",
        "root_name(salt=self.table.identity.salt[row])",
        'root_name(salt=b"")',
    ),
    Fault("images are not part of the name", "names.py", '        return b"".join(parts)\n', '        return b""\n'),
    Fault(
        "a page with an image in it is found in part by its ids",
        "reach.py",
        "        if entry is None or self.chains.has_media(row, at):\n",
        "        if entry is None:\n",
    ),
    Fault(
        "the chain of an ended request is kept for the next one in its row",
        "exits.py",
        "        self.cache.forget(row)\n",
        "",
    ),
    Fault(
        "a prefix is released before what extends it, so evicted before it",
        "residents.py",
        "            self.pool.release(number, tables.blocks[slot, first:held][::-1].copy())\n",
        "            self.pool.release(number, tables.blocks[slot, first:held].copy())\n",
    ),
    Fault(
        "an evicted block stays findable",
        "prefix_index.py",
        "                name, whole = self._remove(lost.group, block)\n",
        "                name = self.indexes[lost.group].name(block)\n                whole = False\n",
    ),
    Fault(
        "a displaced block is never released",
        "residents.py",
        "        self.state.displaced.append((forward, relink.group, own))\n",
        "",
    ),
    Fault(
        "a displaced block is released at once, under the forward that uses it",
        "residents.py",
        "        while displaced and displaced[0][0] <= landed:\n",
        "        while displaced:\n",
    ),
    Fault(
        "an aborted request's pages return while its forward is in flight",
        "exits.py",
        "            self.life.move(row, Event.END_IN_FLIGHT)\n            return\n",
        "            self.life.move(row, Event.END_IN_FLIGHT)\n"
        "            self.residents.release_pages(int(self.table.schedule.slot[row]))\n            return\n",
    ),
    Fault(
        "an end that is told twice releases twice",
        "exits.py",
        "        if Owned.TRANSFER in owned or state in (State.RESTORING, State.DISCARDING):\n            return\n",
        "        if Owned.TRANSFER in owned:\n            return\n",
    ),
    Fault(
        "an aborted transfer's pages return before it has stopped",
        "exits.py",
        "        if Owned.TRANSFER in owned or state in (State.RESTORING, State.DISCARDING):\n            return\n",
        "        if state in (State.RESTORING, State.DISCARDING):\n            return\n",
    ),
    Fault(
        "an aborted request leaves its image behind",
        "exits.py",
        "        if Owned.IMAGE in owned:\n            self.images.discard(row)\n",
        "",
    ),
    Fault(
        "what was fetched for a request is never let go",
        "admission.py",
        "        self.storage.admitted(row)\n",
        "",
    ),
    Fault(
        "a GET that failed counts as one that filled its block",
        "storage_fetch.py",
        "            if ok:\n                self.shelf.wrote",
        "            if True:\n                self.shelf.wrote",
    ),
    Fault(
        "storage keys do not tell groups apart",
        "storage_reach.py",
        'return self.group.to_bytes(2, "little") + self.name',
        'return (0).to_bytes(2, "little") + self.name',
    ),
    Fault(
        "a PUT's host block may be evicted meanwhile",
        "storage_shelf.py",
        "            self.host.pin(group, int32([block]))\n",
        "            pass\n",
    ),
    Fault(
        "an acknowledgment of another kind is taken",
        "host/operations.py",
        "                if not isinstance(work, kind):\n",
        "                if work is None:\n",
    ),
    Fault(
        "a request that did not fit is not looked at again when a resident has gone",
        "admission.py",
        "        no_more_room = unused <= state.unused and seated >= state.seated\n",
        "        no_more_room = unused <= state.unused\n",
    ),
    Fault(
        "a suspended request alone waits for room that its scattered blocks take",
        "admission.py",
        "        if not fits and not self.residents.seated:\n",
        "        if False:\n",
    ),
    Fault(
        "a removal is not told",
        "prefix_index.py",
        "        if whole:\n            self.logs[group].removed(name)\n",
        "        if whole and group:\n            self.logs[group].removed(name)\n",
    ),
    Fault(
        "an equal block that replaces another is told behind what extends it",
        "kv_log.py",
        "        changes[name] = VOID if name in changes else None\n",
        "        if name in changes:\n            del changes[name]\n        else:\n            changes[name] = None\n",
    ),
    Fault(
        "forwards are planned while they are forbidden",
        "scheduler.py",
        "        if not state.may_forward:\n",
        "        if False:\n",
    ),
    Fault(
        "a prompt position whose log-probability is wanted is skipped",
        "admission.py",
        "            most = min(most, max(first - 1, 0))\n",
        "            pass\n",
    ),
    Fault(
        "rows that fill a block are remembered beyond a change of the batch",
        "prefix_index.py",
        "            state.due.clear()\n",
        "",
    ),
    Fault(
        "rows that fill a block are looked up a turn late",
        "prefix_index.py",
        "        due = known.get(state.turn % size)\n",
        "        due = known.get((state.turn - 1) % size)\n",
    ),
)


def plant(fault: Fault, folder: Path) -> str:
    """A copy of the package with the fault in it; returns what is wrong with the fault, if anything is."""
    package = folder / "tokenspeed"
    shutil.copytree(ROOT / "src" / "tokenspeed", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / "scheduler" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return f"its text is {text.count(fault.old)} times in {fault.file}"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return ""


def caught_by(folder: Path, seconds: float) -> tuple[bool, str]:
    """Whether a life failed, and how."""
    paths = os.pathsep.join([str(folder), str(ROOT / "tests" / "scheduler"), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, this file's own text
            [sys.executable, "-c", DRIVER, str(seconds)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True, "a life that does not end"
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.returncode != 0, said[-1] if said else "nothing said"


def caught_by_scenario(folder: Path) -> tuple[bool, str]:
    """Whether a scenario test failed, and which."""
    paths = os.pathsep.join([str(folder), str(ROOT / "tests" / "scheduler"), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    files = [str(ROOT / "tests" / "scheduler" / f"test_scheduler_{name}.py") for name in SCENARIOS]
    done = subprocess.run(  # noqa: S603 - this interpreter, this tree's tests
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not leave_nothing_out", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, failed[0][:160] if failed else "and no scenario fails"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults in copies of the scheduler and see them caught.")
    parser.add_argument("--only", default="", help="a regular expression; faults whose names it finds")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each fault, at most")
    wanted = parser.parse_args()
    lived = tried = 0
    for fault in FAULTS:
        if not re.search(wanted.only, fault.name):
            continue
        tried += 1
        with tempfile.TemporaryDirectory() as name:
            wrong = plant(fault, Path(name))
            caught, how = (False, wrong) if wrong else caught_by(Path(name), wanted.seconds)
            if not wrong and not caught:
                caught, how = caught_by_scenario(Path(name))
        lived += not caught
        print(f"{'caught' if caught else 'LIVED '}  {fault.name}\n        {how}", flush=True)  # noqa: T201
    print(f"{tried - lived} of {tried} caught")  # noqa: T201
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
