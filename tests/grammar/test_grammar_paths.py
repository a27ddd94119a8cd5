"""Both ways to fill masks on real streams: who does what to a matcher, on which thread, and in which order."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import pytest
import torch
from device_doubles import CountingWakeup, cpu_backend
from rig import SPECS, Rig, hand_rig, request
from source_tree import ROOT
from toy_rig import toy_logprobs

from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.executors.streams import StreamExecutor, stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.sampling.base import SampledTokens, TokenMasks
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.toy import ToyModel, ToySampler
from tokenspeed.plane.grammar import GrammarRow, GrammarSource, GrammarVerdict, MatcherState
from tokenspeed.plane.messages import Int32Array, SamplingParams
from tokenspeed.plane.table import Int64Array
from tokenspeed.settings.choices import GrammarFill
from tokenspeed.settings.grammar import GrammarSettings
from tokenspeed.settings.model import SchedulerSettings, Settings

HELD = SamplingParams(regex="x", temperature=0.0, ignore_eos=True)
FORWARD, EXEC, CONTROL = "ts-forward", "exec stream", "control"


@attrs.define(eq=False)
class Log:
    """What happened, and on which thread."""

    entries: list[tuple[str, str]] = attrs.field(factory=list)
    control: int = attrs.field(factory=threading.get_ident)

    def note(self, what: str) -> None:
        thread = threading.current_thread()
        here = CONTROL if thread.ident == self.control else FORWARD if thread.name == FORWARD else EXEC
        self.entries.append((what, here))

    def names(self) -> list[str]:
        return [what for what, _ in self.entries]

    def threads(self, *of: str) -> set[str]:
        return {thread for what, thread in self.entries if what in of}


@attrs.define(eq=False)
class Noted:
    """A forward step, a sampler's masks and matchers that note when they are at work."""

    log: Log
    accepted: dict[int, list[int]] = attrs.field(factory=dict)
    masked: list[bool] = attrs.field(factory=list)
    words: int = (SPECS.vocab_size + 31) // 32

    def fill(self, rows: Sequence[GrammarRow], words: Int32Array) -> None:
        self.log.note("fill")
        words[:] = -1
        for row in rows:
            assert len(self.accepted.setdefault(row.handle, [])) == row.produced

    def bring(self, handle: int, tokens: Sequence[int]) -> None:
        if tokens:  # seated again
            self.log.note("bring")
        self.accepted[handle] = list(tokens)

    def accept(self, handles: Sequence[int], tokens: Sequence[int]) -> tuple[MatcherState, ...]:
        self.log.note("advance")
        for handle, token in zip(handles, tokens, strict=True):
            self.accepted[handle].append(token)
        return (MatcherState.OPEN,) * len(handles)


@attrs.frozen(eq=False)
class NotedStep:
    inner: ForwardStep
    log: Log

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def run(self, *args: object, **more: object) -> torch.Tensor:
        self.log.note("forward")
        return self.inner.run(*args, **more)  # type: ignore[arg-type]


@attrs.define(eq=False)
class NotedSampler(ToySampler):
    noted: Noted = attrs.field(kw_only=True)

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: TokenMasks | None = None
    ) -> SampledTokens:
        self.noted.log.note("sample")
        self.noted.masked.append(masks is not None)
        return super().sample(logits, slots=slots, positions=positions, masks=masks)


@attrs.define(eq=False)
class AtOnce:
    """A compiler that has always compiled."""

    handles: int = 0
    verdicts: list[GrammarVerdict] = attrs.field(factory=list)

    def submit(self, source: GrammarSource) -> int:
        self.handles += 1
        self.verdicts.append(GrammarVerdict(handle=self.handles))
        return self.handles

    def ready(self) -> tuple[GrammarVerdict, ...]:
        found, self.verdicts = tuple(self.verdicts), []
        return found

    def drop(self, handle: int) -> None:
        del handle

    def close(self) -> None:
        return None


@contextmanager
def noted_rank(fill: GrammarFill, *, num_pages: int = SPECS.num_pages) -> Iterator[tuple[Rig, Noted]]:
    noted, specs = Noted(Log()), attrs.evolve(SPECS, num_pages=num_pages)
    settings = Settings(
        scheduler=SchedulerSettings(chunk_tokens=32, max_waiting=64), grammar=GrammarSettings(fill=fill)
    )
    with cpu_backend() as backend:

        def make() -> StreamExecutor:
            model = ToyModel(vocab_size=specs.vocab_size)
            bound = model.bind(None, num_pages=specs.num_pages, page_tokens=specs.page_tokens)
            return stream_executor(
                backend=backend,
                step=NotedStep(bound.step, noted.log),  # type: ignore[arg-type]
                pool=bound.pool,
                sampler=NotedSampler(noted=noted),
                logprobs=toy_logprobs,
                request_slots=specs.request_slots,
                max_model_len=specs.max_model_len,
                num_pages=specs.num_pages,
                groups=specs.groups,
                matchers=noted,
            )

        handle = StreamDeviceHandle(
            backend=backend,
            executor=on_stream(backend.exec_stream, make, "make"),
            profiler=TraceProfiler(stream=backend.exec_stream),
            rounds=AutomaticCollection(),
        )
        plane = open_data_plane(handle, CountingWakeup(), check=Strict())
        try:
            yield hand_rig(specs=specs, settings=settings, plane=plane, compiler=AtOnce(), matchers=noted), noted
        finally:
            plane.close()


@pytest.mark.contract("GR-7", "GR-9")
def test_the_forward_fills_between_model_and_sampler_and_advances_behind_it_and_nobody_else_does() -> None:
    with noted_rank(GrammarFill.FORWARD) as (rig, noted):
        rig.put(request("g", 3, sampling=HELD, max_new=4))
        rig.settle()
        tokens = rig.link.tokens("g")
    # With one forward in flight a surplus one may follow the last.
    names = noted.log.names()
    assert names[: 4 * 4] == ["forward", "fill", "sample", "advance"] * 4
    assert noted.log.threads("fill", "advance", "bring") == {EXEC}
    assert noted.accepted[1][:4] == tokens
    assert all(noted.masked)


@pytest.mark.contract("GR-8", "GR-9")
def test_the_eager_path_fills_ahead_of_the_forward_and_the_commit_advances() -> None:
    with noted_rank(GrammarFill.EAGER) as (rig, noted):
        rig.put(request("g", 3, sampling=HELD, max_new=4))
        rig.settle()
        tokens = rig.link.tokens("g")
    assert noted.log.names() == ["fill", "forward", "sample", "advance"] * 4
    assert noted.log.threads("fill") == {FORWARD}
    assert noted.log.threads("advance", "bring") == {CONTROL}
    assert noted.accepted[1] == tokens


@pytest.mark.contract("GR-10")
@pytest.mark.parametrize("fill", [GrammarFill.FORWARD, GrammarFill.EAGER])
def test_after_a_retraction_a_matcher_has_exactly_the_output_of_its_request(fill: GrammarFill) -> None:
    lengths = {f"r{i}": 30 for i in range(6)}
    with noted_rank(fill, num_pages=14) as (rig, noted):
        rig.put(*(request(rid, 20 + i, sampling=HELD, max_new=most) for i, (rid, most) in enumerate(lengths.items())))
        rig.settle()
        outputs = [rig.link.tokens(rid) for rid in lengths]
    assert "bring" in noted.log.names()  # somebody was retracted
    assert [len(tokens) for tokens in outputs] == list(lengths.values())
    assert [noted.accepted[at + 1][:30] for at in range(6)] == outputs


@pytest.mark.contract("GR-6")
def test_matchers_are_filled_at_one_place_of_the_device_side() -> None:
    """Whoever needs masks asks the filler."""
    places = []
    for path in sorted((ROOT / "src" / "tokenspeed" / "device").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="matchers"), attr=name)):
                    places.append((path.stem, name))
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="filler"), attr="fill")):
                    places.append((path.stem, "filler.fill"))
    assert sorted(set(places)) == [
        ("executor", "filler.fill"),
        ("grammar_fill", "accept"),
        ("grammar_fill", "bring"),
        ("grammar_fill", "fill"),
        ("streams", "filler.fill"),
    ]
    assert places.count(("grammar_fill", "fill")) == 1
    assert places.count(("streams", "filler.fill")) == 2
