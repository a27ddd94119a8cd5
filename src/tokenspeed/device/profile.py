"""Recording the device's work: one Chrome trace a recording, made by torch's profiler."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import attrs
import torch
from torch._C._profiler import _ExperimentalConfig

from tokenspeed.device.backends.base import DeviceStream
from tokenspeed.plane.plan import ExecutionPlan

log = logging.getLogger(__name__)

NOT_RECORDED = nullcontext()


def title_of(plan: ExecutionPlan) -> str:
    """What was submitted, from the plan alone: no tensor is read, and what becomes of it later is not in it."""
    batch = plan.batch
    if batch is None:
        return f"plan {plan.round_id}: no batch"
    return f"plan {plan.round_id}: rows={len(batch.rows)} tokens={batch.num_tokens}"


class Profiler(Protocol):
    """Starts and ends one recording at a time; ``ts-forward`` only."""

    def start(self, path: str) -> str:
        """Record from here on. Returns the file to come; "" if `path` cannot be written."""
        ...

    def batch(self, plan: ExecutionPlan) -> AbstractContextManager[object]:
        """Around the submission of `plan`: names it in the recording, by values that do not change (KM-43)."""
        ...

    def stop(self) -> str:
        """End the recording and write it. Returns the file; "" if none was running or it failed."""
        ...


@attrs.define(eq=False)
class Recording:
    """Writer: TraceProfiler."""

    session: torch.profiler.profile | None = None
    file: str = ""
    made: int = 0


@attrs.frozen(kw_only=True, eq=False)
class TraceProfiler:
    """Records the operations of all threads: one stream's jobs, and the forward thread that submits them.

    torch's profiler watches the thread that started it, so starting and stopping are jobs of the
    stream. Both wait for the jobs before them, which is why profiling is an awaited operation. At the
    first start the library writes a line to standard error about the thread it was loaded by; the
    recording is complete all the same.
    """

    stream: DeviceStream
    state: Recording = attrs.field(factory=Recording)

    def start(self, path: str) -> str:
        """`path` is a folder, made if it is missing, or the name of a ``.json`` file."""
        if self.state.session is not None:
            log.warning("profile: already recording to %s", self.state.file)
            return self.state.file
        try:
            file = self._file(path)
        except OSError as error:
            log.warning("profile: %s cannot be written: %s", path, error)
            return ""
        session = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self.stream.submit(session.start, "profile start").wait()
        self.state.session, self.state.file = session, file
        return file

    def batch(self, plan: ExecutionPlan) -> AbstractContextManager[object]:
        if self.state.session is None:
            return NOT_RECORDED
        return torch.profiler.record_function(title_of(plan))

    def stop(self) -> str:
        session, file = self.state.session, self.state.file
        if session is None:
            return ""
        self.state.session, self.state.file = None, ""
        self.stream.submit(session.stop, "profile stop").wait()
        try:
            session.export_chrome_trace(file)
        except (OSError, RuntimeError) as error:
            log.warning("profile: %s was not written: %s", file, error)
            return ""
        return file

    def _file(self, path: str) -> str:
        """A file that can be written. Raises OSError."""
        target = Path(path)
        if target.suffix != ".json":
            self.state.made += 1
            target = target / f"forward-{self.state.made}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        return str(target)
