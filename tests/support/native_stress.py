"""A process whose native steps are disturbed: pinned threads, forks in between, other teams beside. Prints what it did.

Run by tests/device/test_native_stress.py. What waits for ever ends with all stacks on standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs
import torch
from native_rig import checkpoint_of, native_model, prompt
from paged_rows import paged_run

from tokenspeed.device.native.bind import NativeModelBound
from tokenspeed.device.native.draw import NativeDrawer
from tokenspeed.device.native.library import native_library
from tokenspeed.device.sampling.draw import Draw

CHILD_S = 20.0
"""For a forked process to compute two steps."""
DRAW = Draw(temperature=1.0, top_k=5, top_p=0.9, min_p=0.0, number=0.5)


@attrs.define(eq=False)
class Done:
    """Counts; each written by one thread."""

    steps: int = 0
    pins: int = 0
    forks: int = 0
    most_threads: int = 0


@attrs.frozen(eq=False)
class Stepper:
    """A model and a sampler of one thread, with teams of a size."""

    model: NativeModelBound
    drawer: NativeDrawer

    def step(self) -> torch.Tensor:
        """Logits and drawn tokens of a batch of three rows."""
        run = paged_run(self.model.step, num_pages=16, page_tokens=8)
        logits = run.forward([(run.sequence(prompt(9 + i, seed=i)), 9 + i) for i in range(3)])
        drawn = self.drawer([row.numpy() for row in logits], [DRAW] * 3)
        return torch.cat([logits, torch.from_numpy(drawn).float()[:, None]], dim=1)


def stepper(threads: int) -> Stepper:
    model = native_model(checkpoint_of("tiny-llama"), threads=threads)
    return Stepper(model, NativeDrawer(library=native_library(), threads=threads))


def pin_at_random(dice: random.Random, cores: list[int], stop: threading.Event, done: Done) -> None:
    """Set every thread of the process to one core, or to all, over and over."""
    while not stop.wait(dice.random() * 0.002):
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        done.most_threads = max(done.most_threads, len(tasks))
        for task in tasks:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(task, dice.choice([cores, [dice.choice(cores)]]))
                done.pins += 1


def fork_and_step(step: Callable[[], bool]) -> None:
    """In a copy of this process: a step by the copied thread, whose team is not there, and one by a new thread."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(CHILD_S))  # the watchdog's thread is in the parent
        right = [step()]
        thread = threading.Thread(target=lambda: right.append(step()))
        thread.start()
        thread.join()
        os._exit(0 if right == [True, True] else 3)
    ended = os.pidfd_open(pid)
    if not select.select([ended], [], [], 2 * CHILD_S)[0]:
        raise TimeoutError("a forked process has not ended")
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    if status:
        raise ValueError(f"a forked process ended with {os.waitstatus_to_exitcode(status)}")


def main(seconds: float, threads: int, seed: int) -> None:
    faulthandler.dump_traceback_later(seconds + 4 * CHILD_S, exit=True)
    dice, done, stop, wrong = random.Random(seed), Done(), threading.Event(), list[str]()
    own, other, wanted = stepper(threads), stepper(threads), stepper(1).step()

    def right() -> bool:
        return torch.equal(own.step(), wanted)

    def beside() -> None:
        while not stop.is_set():
            if not torch.equal(other.step(), wanted):
                wrong.append("beside")

    cores = sorted(os.sched_getaffinity(0))
    helpers = [
        threading.Thread(target=beside, daemon=True),
        threading.Thread(target=pin_at_random, args=(dice, cores, stop, done), daemon=True),
    ]
    for helper in helpers:
        helper.start()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s or not done.forks:
        for _ in range(10):
            if not right():
                wrong.append("main")
            done.steps += 1
        fork_and_step(right)
        done.forks += 1
    stop.set()
    for helper in helpers:
        helper.join(CHILD_S)
    if wrong or any(helper.is_alive() for helper in helpers):
        raise ValueError(f"wrong: {wrong[:5]}; threads: {[helper for helper in helpers if helper.is_alive()]}")
    print(json.dumps(attrs.asdict(done)))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
