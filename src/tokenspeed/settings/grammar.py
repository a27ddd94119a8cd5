"""The keys of constrained decoding and of sampling, sections of `settings.model.Settings`."""

from __future__ import annotations

import attrs
from attrs import validators as v

from tokenspeed.settings.choices import GrammarBackend, GrammarFill


@attrs.frozen(kw_only=True)
class GrammarSettings:
    """Constrained decoding."""

    backend: GrammarBackend = attrs.field(
        default=GrammarBackend.XGRAMMAR,
        metadata={"help": "what compiles grammars; none: requests that ask for one are refused"},
    )
    fill: GrammarFill = attrs.field(
        default=GrammarFill.AUTO,
        metadata={
            "help": "who fills the token masks; forward: the forward itself, which costs no overlap; eager: the forward"
            " thread, once all before is committed; auto: forward where executor and backend allow it"
        },
    )
    preload: bool = attrs.field(
        default=True,
        metadata={
            "help": "load the compiler in the background once the server is ready, so that the first grammar need not"
            " wait for it; false: not before there is a grammar"
        },
    )
    workers: int = attrs.field(
        default=1,
        validator=[v.ge(1), v.le(16)],
        metadata={"help": "grammars compiled at once; each takes a process, started when it is needed"},
    )
    queue: int = attrs.field(
        default=64, validator=v.ge(1), metadata={"help": "grammars that may wait to be compiled; beyond that 429"}
    )
    max_source_kib: int = attrs.field(
        default=256, validator=[v.ge(1), v.le(1 << 14)], metadata={"help": "largest text of one grammar; larger: 400"}
    )
    compile_s: float = attrs.field(
        default=10.0, validator=v.gt(0.0), metadata={"help": "how long one compilation may run; longer: 400"}
    )
    timeout_s: float = attrs.field(
        default=60.0,
        validator=v.gt(0.0),
        metadata={"help": "how long a request may wait until its grammar is taken up; longer: 400"},
    )
    token_ms: float = attrs.field(
        default=50.0,
        validator=v.gt(0.0),
        metadata={"help": "processor time that following a grammar may take for one token; more ends its request: 400"},
    )
    memory_mib: int = attrs.field(
        default=512, validator=v.ge(64), metadata={"help": "memory that one compilation may take; more: 400"}
    )
    cache_mib: int = attrs.field(
        default=128, validator=v.ge(0), metadata={"help": "compiled grammars kept for requests to come"}
    )
    whitespace: int = attrs.field(
        default=2,
        validator=[v.ge(0), v.le(64)],
        metadata={"help": "blanks and line ends between the tokens of JSON, at most; 0: one form without a choice"},
    )


@attrs.frozen(kw_only=True)
class SamplingSettings:
    """What requests may bring into the choice of their tokens, and may ask about it."""

    max_logprobs: int = attrs.field(
        default=20,
        validator=[v.ge(0), v.le(1 << 16)],
        metadata={"help": "alternatives of each token that a request may ask for; the vocabulary bounds it, too"},
    )
    logits_processors: tuple[str, ...] = attrs.field(
        default=(),
        metadata={
            "help": "processors that requests may name: an entry point's name, or NAME=package.module:attribute;"
            " none: requests that name one are refused"
        },
    )
