"""The one door to xgrammar, which is imported with the first grammar and not before.

Source: Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine", arXiv:2411.15100.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import numpy as np

from tokenspeed.grammar.compiled_text import compiled_text
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource
from tokenspeed.plane.messages import Int32Array


class GrammarRefused(Exception):
    """The text is no grammar of its kind; says why."""


class TokenMatcher(Protocol):
    """One sequence's way through its grammar."""

    def fill(self, words: Int32Array, row: int) -> None:
        """Write the next token's mask into ``words[row]``, int32 ``[rows, words]``."""
        ...

    def accept(self, token: int) -> bool: ...

    def ended(self) -> bool: ...

    def reset(self) -> None: ...


class CompiledGrammar(Protocol):
    """Immutable; may be shared by any number of matchers."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> TokenMatcher: ...


class GrammarBackend(Protocol):
    """Worker threads only; the interpreter is free for others while it compiles."""

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Raises: GrammarRefused."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Utf8Leads:
    """Tokens whose last byte allows fewer bytes behind it than the library takes: no long forms, no surrogates.

    Attributes:
        behind: by id of such a token, int32 words of a mask: the tokens that may come next.
    """

    behind: Mapping[int, Int32Array]
    words: int


@attrs.define(eq=False)
class XgrammarMatcher:
    """Writer: whoever advances it. `behind`: what the last token leaves of any mask; None: all of it."""

    inner: Any
    leads: Utf8Leads
    behind: Int32Array | None = None

    def fill(self, words: Int32Array, row: int) -> None:
        if not self.inner.fill_next_token_bitmask(words, row):
            words[row] = -1
        if self.behind is not None:
            words[row] &= self.behind

    def accept(self, token: int) -> bool:
        self.behind = self.leads.behind.get(token)
        return bool(self.inner.accept_token(token))

    def ended(self) -> bool:
        return bool(self.inner.is_terminated())

    def reset(self) -> None:
        self.inner.reset()
        self.behind = None


@attrs.frozen(kw_only=True, eq=False)
class XgrammarCompiled:
    """`endless`: the vocabulary has no stop token, so that a match of the whole grammar is the end."""

    library: Any
    inner: Any
    leads: Utf8Leads
    endless: bool

    @property
    def nbytes(self) -> int:
        return int(self.inner.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        inner = self.library.GrammarMatcher(self.inner, terminate_without_stop_token=self.endless)
        return XgrammarMatcher(inner, self.leads)


@attrs.frozen(kw_only=True, eq=False)
class XgrammarBackend:
    """`compiler` and `json_compiler` differ in their vocabularies, see `json_tokens`."""

    library: Any
    compiler: Any
    json_compiler: Any
    leads: Utf8Leads
    whitespace: int
    endless: bool

    def compile(self, source: GrammarSource) -> XgrammarCompiled:
        compiler = self.compiler
        try:
            text = compiled_text(source, whitespace=self.whitespace)
            match source.kind:
                case "json_schema":
                    bounded = {"max_whitespace_cnt": self.whitespace} if self.whitespace else {}
                    inner = self.json_compiler.compile_json_schema(
                        text, any_whitespace=bool(self.whitespace), **bounded
                    )
                case "regex":
                    inner = compiler.compile_regex(text)
                case "ebnf":
                    inner = compiler.compile_grammar(text)
                case "structural_tag":
                    # Free text around the schemas then goes without those tokens, too.
                    inner = (self.json_compiler if "Length" in text else compiler).compile_structural_tag(text)
                case kind:
                    raise GrammarRefused(f"no grammar is called {kind!r}")
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # how the library says no
            raise GrammarRefused(_words(error)) from error
        made = XgrammarCompiled(library=self.library, inner=inner, leads=self.leads, endless=self.endless)
        if not self._begins(made.matcher()):
            raise GrammarRefused("there is no text that it accepts")
        return made

    def _begins(self, matcher: XgrammarMatcher) -> bool:
        """Whether some token may come first, or nothing at all."""
        if matcher.ended():
            return True
        words = np.zeros((1, self.leads.words), dtype=np.int32)
        matcher.fill(words, 0)
        return bool(words.any())


def load_backend(vocabulary: Vocabulary, *, whitespace: int) -> XgrammarBackend:
    """Import the library and show it the vocabulary; takes a second or more."""
    import xgrammar  # costs a second and 40 MB, which engines without grammars need not pay

    def compiler(tokens: list[bytes]) -> Any:
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(vocabulary.stops)
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    return XgrammarBackend(
        library=xgrammar,
        compiler=compiler(list(vocabulary.tokens)),
        json_compiler=compiler(json_tokens(vocabulary)),
        leads=utf8_leads(vocabulary),
        whitespace=whitespace,
        endless=not vocabulary.stops,
    )


def json_tokens(vocabulary: Vocabulary) -> list[bytes]:
    """Without tokens that hold a control character but the line end, which no JSON needs.

    JSON has none inside strings, but the library lets some into strings of bounded length.
    """
    return [b"" if any(byte < 0x20 and byte != 0x0A for byte in token) else token for token in vocabulary.tokens]


def utf8_leads(vocabulary: Vocabulary) -> Utf8Leads:
    """Source: The Unicode Standard, table 3-7, well-formed UTF-8 byte sequences."""
    tokens, behind = vocabulary.tokens, dict[int, Int32Array]()
    words = (len(tokens) + 31) // 32
    first = np.array([token[0] if token else 0 for token in tokens], dtype=np.uint8)
    last = np.array([token[-1] if token else 0 for token in tokens], dtype=np.uint8)
    for lead, low, high in ((0xE0, 0xA0, 0xBF), (0xED, 0x80, 0x9F), (0xF0, 0x90, 0xBF), (0xF4, 0x80, 0x8F)):
        bits = np.zeros(words * 32, dtype=np.bool_)
        bits[: len(tokens)] = (first >= low) & (first <= high)
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        behind.update(dict.fromkeys(np.flatnonzero(last == lead).tolist(), mask))
    return Utf8Leads(behind=MappingProxyType(behind), words=words)


def _words(error: Exception) -> str:
    """The library's text without its time, its source lines and its stack."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    head, mark, tail = text.partition(": ")
    text = tail if mark and ".cc:" in head else text
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", text)[:500]
