"""A rank's process with an engine of a few lines: run as a script by the launcher under test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.errors import ModelError
from tokenspeed.launch.child import Parent, run_child
from tokenspeed.launch.messages import StartRank
from tokenspeed.launch.rank_main import run_rank
from tokenspeed.plane.messages import EngineInfo, Finish, GenerateRequest, OutputBatch
from tokenspeed.plane.ports import FrontendLink, Wakeup
from tokenspeed.settings.model import Settings

INFO = EngineInfo(
    model="toy",
    dtype="float32",
    vocab_size=96,
    max_model_len=128,
    num_blocks=32,
    block_size=16,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_waiting=8,
    max_logprobs=0,
    eos_token_ids=(2,),
)


@attrs.define(eq=False)
class EchoEngine:
    """Answers each request with its own ids, until stopped or alone."""

    link: FrontendLink
    wakeup: ThreadWakeup
    conduct: str
    info: EngineInfo = INFO
    stopped: bool = False
    served: bool = False

    def enter_serving(self) -> None:
        self.served = True

    def stop(self) -> None:
        self.stopped = True
        self.wakeup.set()

    def request_dump(self) -> None:
        return None

    def run(self) -> None:
        assert self.served
        while not (self.stopped or self.link.gone) or self.conduct == "deaf":
            self.wakeup.wait(None)
            for message in self.link.receive():
                if isinstance(message, GenerateRequest):
                    if self.conduct == "crash":
                        raise ZeroDivisionError("a round went wrong")
                    self.link.send(echo(message))


def echo(request: GenerateRequest) -> OutputBatch:
    ids = request.input_ids.tolist()
    return OutputBatch(
        rids=[request.rid],
        output_ids=[ids],
        finished=[int(Finish.LENGTH)],
        prompt_tokens=[len(ids)],
        completion_tokens=[len(ids)],
        cached_tokens=[0],
        logprobs=[[]],
        top_logprobs=[[]],
        prompt_logprobs=[[]],
        prompt_top_logprobs=[[]],
        status=[0],
        messages=[""],
    )


def builder(start: StartRank) -> Callable[..., Any]:
    """What this rank does is written in the model's source: ``random:CONDUCT0,CONDUCT1,…``."""
    conduct = start.settings.model.source.removeprefix("random:").split(",")[start.index]
    scratch = Path(start.settings.model.cache_dir or ".")

    @contextmanager
    def build(
        settings: Settings,
        *,
        connect: Callable[[EngineInfo, Wakeup], FrontendLink],
        resolved: object,
        progress: Progress,
        own_process: bool,
        meter_for: object,
    ) -> Generator[EchoEngine, None, None]:
        (scratch / f"rank{start.index}.pid").write_text(str(os.getpid()))
        match conduct:
            case "raise":
                raise ModelError("weights.safetensors: tensor lm_head.weight is missing")
            case "raise-with-thread":
                threading.Thread(target=threading.Event().wait, daemon=False).start()
                raise ValueError("no rope scaling called moebius")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                progress.step("hanging", 0, 1)
                threading.Event().wait()
            case "grandchild":
                sleeper = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
                (scratch / "grandchild.pid").write_text(str(sleeper.pid))
                raise ModelError("after a grandchild")
            case "first":
                (scratch / "meet").read_text()  # a named pipe: until the second rank writes
            case "second":
                progress.step("second is here", 1, 1)
                (scratch / "meet").write_text("here")
        progress.step("loading", 3, 3)
        wakeup = ThreadWakeup()
        link = connect(INFO, wakeup)
        engine = EchoEngine(link=link, wakeup=wakeup, conduct=conduct)
        yield engine
        link.close()
        (scratch / f"rank{start.index}.closed").write_text("closed in good order")

    return build


def work(parent: Parent, start: StartRank) -> None:
    run_rank(parent, start, builder(start))


if __name__ == "__main__":
    sys.exit(run_child(sys.argv, StartRank, work))
