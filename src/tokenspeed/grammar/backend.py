"""The one door to xgrammar, which is imported with the first grammar and not before.

Source: Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine", arXiv:2411.15100.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs

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


@attrs.frozen(eq=False)
class XgrammarMatcher:
    inner: Any

    def fill(self, words: Int32Array, row: int) -> None:
        if not self.inner.fill_next_token_bitmask(words, row):
            words[row] = -1

    def accept(self, token: int) -> bool:
        return bool(self.inner.accept_token(token))

    def ended(self) -> bool:
        return bool(self.inner.is_terminated())

    def reset(self) -> None:
        self.inner.reset()


@attrs.frozen(kw_only=True, eq=False)
class XgrammarCompiled:
    """`endless`: the vocabulary has no stop token, so that a match of the whole grammar is the end."""

    library: Any
    inner: Any
    endless: bool

    @property
    def nbytes(self) -> int:
        return int(self.inner.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self.library.GrammarMatcher(self.inner, terminate_without_stop_token=self.endless))


@attrs.frozen(kw_only=True, eq=False)
class XgrammarBackend:
    """`compiler` and `json_compiler` differ in their vocabularies, see `json_tokens`."""

    library: Any
    compiler: Any
    json_compiler: Any
    whitespace: int
    endless: bool

    def compile(self, source: GrammarSource) -> XgrammarCompiled:
        compiler = self.compiler
        try:
            match source.kind:
                case "json_schema":
                    bounded = {"max_whitespace_cnt": self.whitespace} if self.whitespace else {}
                    inner = self.json_compiler.compile_json_schema(
                        source.text, any_whitespace=bool(self.whitespace), **bounded
                    )
                case "regex":
                    inner = compiler.compile_regex(source.text)
                case "ebnf":
                    inner = compiler.compile_grammar(source.text)
                case "structural_tag":
                    inner = compiler.compile_structural_tag(source.text)
                case kind:
                    raise GrammarRefused(f"no grammar is called {kind!r}")
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # how the library says no
            raise GrammarRefused(_words(error)) from error
        return XgrammarCompiled(library=self.library, inner=inner, endless=self.endless)


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
        whitespace=whitespace,
        endless=not vocabulary.stops,
    )


def json_tokens(vocabulary: Vocabulary) -> list[bytes]:
    """Without tokens that hold a control character but the line end, which no JSON needs.

    JSON has none inside strings, but the library lets some into strings of bounded length.
    """
    return [b"" if any(byte < 0x20 and byte != 0x0A for byte in token) else token for token in vocabulary.tokens]


def _words(error: Exception) -> str:
    """The library's text without its time, its source lines and its stack."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    head, mark, tail = text.partition(": ")
    return (tail if mark and ".cc:" in head else text)[:500]
