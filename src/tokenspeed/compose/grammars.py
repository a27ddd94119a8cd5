"""The grammar room of one rank: matchers for the device side, a compiler and a queue for the control side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.grammar.backend import load_backend
from tokenspeed.grammar.limits import GrammarLimits
from tokenspeed.grammar.matchers import Matchers
from tokenspeed.grammar.pool import CompilePool
from tokenspeed.grammar.process import CompileProcess
from tokenspeed.grammar.source_check import source_fault
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.ports import Wakeup
from tokenspeed.settings.choices import Backend, GrammarBackend
from tokenspeed.settings.grammar import GrammarSettings
from tokenspeed.settings.model import Settings

PRELOAD_AFTER_S = 5.0
"""Behind what a server has to do when it is ready: who waited for it sends the first requests then."""


def serves_grammars(settings: Settings) -> bool:
    """The simulated device names its tokens itself, whatever a mask says."""
    return settings.grammar.backend is not GrammarBackend.NONE and settings.device.backend is not Backend.SIMULATED


def grammar_parts(
    settings: Settings, checkpoint: Checkpoint, matchers: Matchers, wakeup: Wakeup, lifetime: ExitStack
) -> Mapping[str, object]:
    """The parts of a control plane that compile and match grammars; none where grammars are not served."""
    if not serves_grammars(settings):
        return {}
    known = partial(vocabulary_of, checkpoint, size=matchers.vocab_size)
    compiler = compile_pool(settings.grammar, matchers, wakeup, known)
    lifetime.callback(compiler.close)
    return {"compiler": compiler, "matchers": matchers}


def preloading(settings: GrammarSettings, parts: Mapping[str, object]) -> Callable[[], None]:
    """What a rank of our own calls when it begins to serve; `parts` are those of `grammar_parts`."""
    compiler = parts.get("compiler")
    if not settings.preload or not isinstance(compiler, CompilePool):
        return _nothing
    return partial(compiler.warm, PRELOAD_AFTER_S)


def _nothing() -> None: ...


def limits_of(grammar: GrammarSettings) -> GrammarLimits:
    return GrammarLimits(
        whitespace=grammar.whitespace,
        source_bytes=grammar.max_source_kib << 10,
        compile_s=grammar.compile_s,
        timeout_s=grammar.timeout_s,
        memory_bytes=grammar.memory_mib << 20,
        cache_bytes=grammar.cache_mib << 20,
        queue=grammar.queue,
    )


def compile_pool(
    grammar: GrammarSettings, matchers: Matchers, wakeup: Wakeup, vocabulary: Callable[[], Vocabulary]
) -> CompilePool:
    """Without threads or processes until there is a grammar; `close` joins them."""
    limits = limits_of(grammar)
    return CompilePool(
        matchers=matchers,
        limits=limits,
        wakeup=wakeup,
        workers=grammar.workers,
        vocabulary=vocabulary,
        load=partial(load_backend, whitespace=limits.whitespace),
        trial=partial(CompileProcess, limits=limits),
        fault=source_fault,
    )


def vocabulary_of(checkpoint: Checkpoint, *, size: int) -> Vocabulary:
    """The bytes of ids below `size`; a second for fifty thousand."""
    from tokenspeed.frontend.text.tokenizer import load_tokenizer  # only with the first grammar

    tokenizer = load_tokenizer(checkpoint)
    tokens = tuple(b"" if tokenizer.is_special(one) else tokenizer.token_bytes(one) for one in range(size))
    return Vocabulary(tokens=tokens, stops=tuple(one for one in checkpoint.eos_token_ids if one < size))
