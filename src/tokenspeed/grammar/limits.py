"""How much a grammar may cost."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class GrammarLimits:
    """See the settings of the same names.

    Attributes:
        whitespace: characters between the tokens of JSON, at most.
        source_bytes: UTF-8 size of one grammar.
        compile_s: of one compilation, once the compiler runs.
        timeout_s: that a request may wait in the queue.
        memory_bytes: that one compilation may take.
        cache_bytes: compiled grammars that are kept.
        queue: compilations that may wait.
    """

    whitespace: int = 2
    source_bytes: int = 256 << 10
    compile_s: float = 10.0
    timeout_s: float = 60.0
    memory_bytes: int = 512 << 20
    cache_bytes: int = 128 << 20
    queue: int = 64
