"""Compiles grammars on threads of its own, tried in a process first; keeps what was compiled."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import attrs

from tokenspeed.grammar.backend import CompiledGrammar, GrammarBackend, GrammarRefused
from tokenspeed.grammar.limits import GrammarLimits
from tokenspeed.grammar.matchers import Matchers
from tokenspeed.grammar.process import Trial
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource, GrammarVerdict
from tokenspeed.plane.ports import Wakeup

log = logging.getLogger("tokenspeed.grammar")

THREAD_NAME = "ts-grammar"


@attrs.define(eq=False)
class Compilation:
    """One source under way. Writer: CompilePool, under its lock.

    Attributes:
        handles: who waits for it; several requests of one grammar compile it once.
        trial: where it runs; None: it waits.
        took_s: None: it has not ended.
    """

    source: GrammarSource
    until_s: float
    handles: set[int] = attrs.field(factory=set[int])
    trial: Trial | None = None
    took_s: float | None = None


@attrs.define(eq=False)
class Loaded:
    """Writer: the first worker that needs it, under `lock`."""

    vocabulary: Vocabulary | None = None
    backend: GrammarBackend | None = None
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.define(eq=False)
class PoolState:
    """Writers: the control thread and the workers, under `changed`.

    Attributes:
        queue: bounded by `GrammarLimits.queue`; of `open`, those that no worker has.
        cache: least recently used first.
        compiled: grammars compiled since the start.
    """

    next_handle: int = 1
    open: dict[GrammarSource, Compilation] = attrs.field(factory=dict[GrammarSource, Compilation])
    queue: deque[Compilation] = attrs.field(factory=deque[Compilation])
    verdicts: list[GrammarVerdict] = attrs.field(factory=list[GrammarVerdict])
    cache: OrderedDict[GrammarSource, CompiledGrammar] = attrs.field(factory=OrderedDict)
    cached_bytes: int = 0
    compiled: int = 0
    threads: list[threading.Thread] = attrs.field(factory=list[threading.Thread])
    trials: list[Trial] = attrs.field(factory=list[Trial])
    idle: int = 0
    closed: bool = False
    loaded: Loaded = attrs.field(factory=Loaded)
    changed: threading.Condition = attrs.field(factory=threading.Condition)


@attrs.frozen(kw_only=True, eq=False)
class CompilePool:
    """`plane.grammar.GrammarCompiler`. The control thread calls it; `close` joins its workers.

    Attributes:
        workers: compilations at once; a thread and a process each, started when they are needed.
        vocabulary: of the model; asked for once, on a worker.
        load: the backend for a vocabulary; called once, on a worker.
        trial: makes a worker's place to try a grammar in.
        fault: what is wrong with a source as far as can be told without compiling it, or "".
    """

    matchers: Matchers
    limits: GrammarLimits
    wakeup: Wakeup
    workers: int
    vocabulary: Callable[[], Vocabulary]
    load: Callable[[Vocabulary], GrammarBackend]
    trial: Callable[[], Trial]
    fault: Callable[[GrammarSource], str]
    now_s: Callable[[], float] = time.monotonic
    state: PoolState = attrs.field(factory=PoolState)

    def warm(self, after_s: float) -> None:
        """Load what the first grammar needs on a worker, unless one comes within `after_s`. Any thread; returns."""
        with self.state.changed:
            if not self.state.threads and not self.state.closed:
                self._start_worker(partial(self._warm, after_s))

    # ---- the control thread -------------------------------------------------------------------

    def submit(self, source: GrammarSource) -> int:
        state = self.state
        size, most = len(source.text.encode("utf-8", "surrogatepass")), self.limits.source_bytes
        with state.changed:
            handle, state.next_handle = state.next_handle, state.next_handle + 1
            if size > most:  # before anything looks at all of it
                self._say(handle, f"{source.kind}: got {size} bytes, must be at most {most} (grammar.max_source_kib)")
            elif (known := state.cache.get(source)) is not None:
                state.cache.move_to_end(source)
                self.matchers.add(handle, known.matcher())
                self._say(handle)
            elif source in state.open:
                state.open[source].handles.add(handle)
            elif len(state.queue) >= self.limits.queue:
                text = f"{self.limits.queue} grammars already wait to be compiled (grammar.queue); retry later"
                self._say(handle, text, status=429)
            else:
                self._enqueue(source, handle)
        return handle

    def ready(self) -> tuple[GrammarVerdict, ...]:
        with self.state.changed:
            found = tuple(self.state.verdicts)
            self.state.verdicts.clear()
        return found

    def drop(self, handle: int) -> None:
        state = self.state
        with state.changed:
            self.matchers.remove(handle)
            waited = next((one for one in state.open.values() if handle in one.handles), None)
            if waited is None:
                return
            waited.handles.discard(handle)
            if not waited.handles:
                del state.open[waited.source]
                if waited.trial is None:
                    state.queue.remove(waited)
                else:
                    waited.trial.kill()  # the slot is free for the next one

    def close(self) -> None:
        state = self.state
        with state.changed:
            state.closed = True
            state.changed.notify_all()
            for trial in state.trials:
                trial.close()
        for thread in state.threads:
            thread.join()

    def _enqueue(self, source: GrammarSource, handle: int) -> None:
        state = self.state
        one = Compilation(source=source, until_s=self.now_s() + self.limits.timeout_s, handles={handle})
        state.open[source] = one
        state.queue.append(one)
        if state.idle < len(state.queue) and len(state.threads) < self.workers:
            self._start_worker(None)
        state.changed.notify()

    def _start_worker(self, first: Callable[[Trial], None] | None) -> None:
        threads = self.state.threads
        name = f"{THREAD_NAME}-{len(threads)}"
        threads.append(threading.Thread(target=self._serve, args=(first,), name=name, daemon=True))
        threads[-1].start()

    def _say(self, handle: int, error: str = "", *, status: int = 400, compile_s: float | None = None) -> None:
        verdict = GrammarVerdict(handle=handle, error=error, status=status, compile_s=compile_s)
        self.state.verdicts.append(verdict)
        self.wakeup.set()

    # ---- a worker -----------------------------------------------------------------------------

    def _serve(self, first: Callable[[Trial], None] | None) -> None:
        """Args: first: done ahead of any grammar."""
        state, trial = self.state, self.trial()
        with state.changed:
            state.trials.append(trial)
            if state.closed:
                trial.close()
        try:
            if first is not None:
                first(trial)
            while (one := self._next(trial)) is not None:
                try:
                    made = self._compile(one, trial)
                except GrammarRefused as no:
                    self._settle(one, None, f"{one.source.kind}: {no}")
                except Exception as error:  # whatever it is, it is this grammar's and not the engine's
                    self._settle(one, None, f"{one.source.kind}: cannot be compiled: {error}", status=500)
                else:
                    self._settle(one, made)
        finally:
            trial.close()

    def _next(self, trial: Trial) -> Compilation | None:
        """The next one in the queue; None: the pool is closed."""
        state = self.state
        with state.changed:
            state.idle += 1
            state.changed.wait_for(lambda: state.queue or state.closed)
            state.idle -= 1
            if state.closed:
                return None
            one = state.queue.popleft()
            one.trial = trial
            return one

    def _compile(self, one: Compilation, trial: Trial) -> CompiledGrammar:
        """Raises: GrammarRefused."""
        if fault := self.fault(one.source):
            raise GrammarRefused(fault)
        if self.now_s() > one.until_s:
            raise GrammarRefused(f"was not compiled within {self.limits.timeout_s:g} s (grammar.timeout_s)")
        begun_s = self.now_s()
        try:
            return self._tried(one, trial)
        finally:
            one.took_s = self.now_s() - begun_s

    def _tried(self, one: Compilation, trial: Trial) -> CompiledGrammar:
        trial.start()  # it loads the library while we do
        vocabulary, backend = self._loaded()
        trial.attempt(one.source, vocabulary)
        return backend.compile(one.source)

    def _loaded(self) -> tuple[Vocabulary, GrammarBackend]:
        loaded = self.state.loaded
        with loaded.lock:
            if loaded.backend is None or loaded.vocabulary is None:
                loaded.vocabulary = self.vocabulary()
                loaded.backend = self.load(loaded.vocabulary)
        return loaded.vocabulary, loaded.backend

    def _warm(self, after_s: float, trial: Trial) -> None:
        state = self.state
        with state.changed:
            state.idle += 1
            wanted = state.changed.wait_for(lambda: state.queue or state.closed, after_s)
            state.idle -= 1
        if wanted:
            return
        trial.start()
        try:
            trial.prepare(self._loaded()[0])
        except Exception as error:  # the first grammar will find the same, and tell its client
            log.warning("grammars: the compiler could not be loaded ahead: %s", error)

    def _settle(self, one: Compilation, made: CompiledGrammar | None, error: str = "", *, status: int = 400) -> None:
        state = self.state
        with state.changed:
            one.trial = None
            if state.open.get(one.source) is one:
                del state.open[one.source]
            if made is not None:
                state.compiled += 1
                self._keep(one.source, made)
            took_s = one.took_s
            for handle in sorted(one.handles):
                if made is not None:
                    self.matchers.add(handle, made.matcher())
                self._say(handle, error, status=status, compile_s=took_s)
                took_s = None  # it was made for the first, and counts once

    def _keep(self, source: GrammarSource, made: CompiledGrammar) -> None:
        """Into the cache, and out with the least recently used until it fits."""
        state = self.state
        state.cache[source] = made
        state.cached_bytes += made.nbytes + len(source.text)
        while state.cached_bytes > self.limits.cache_bytes and state.cache:
            of, oldest = state.cache.popitem(last=False)
            state.cached_bytes -= oldest.nbytes + len(of.text)
