"""Answers without a model: random tokens among those that a grammar allows, and what a schema says of the result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import check_jsonschema
import jsonschema
import numpy as np
import regress
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for

from tokenspeed.grammar.backend import TokenMatcher, XgrammarBackend
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource

BYTES = Vocabulary(tokens=(*(bytes([one]) for one in range(256)), b""), stops=(256,))
"""Every byte is a token; the last is the end."""

TELLING = frozenset(b'"\\/bnu0123456789-+.eE{}[]:, \naZ')
"""Bytes at which grammars of JSON decide something."""

CLOSING = (b'"', b"}", b"]")


@attrs.frozen(kw_only=True)
class Filled:
    """An answer. `ended`: its grammar has ended; `stuck`: no token was allowed."""

    text: bytes
    ended: bool
    stuck: bool = False


@attrs.frozen(kw_only=True, eq=False)
class RandomFiller:
    """Draws evenly among the allowed tokens, or half the time among those that decide something.

    Attributes:
        closing: ids of tokens that close a text, a list or an object.
        telling: bool ``[vocab]``.
    """

    vocabulary: Vocabulary
    backend: XgrammarBackend
    closing: tuple[int, ...]
    telling: np.ndarray

    def fill(self, source: GrammarSource, rng: random.Random, *, count: int, free: int, most: int) -> Iterator[Filled]:
        """`count` answers. From `free` tokens on what can be closed is closed; after `most` an answer is cut."""
        matcher = self.backend.compile(source).matcher()
        for _ in range(count):
            matcher.reset()
            yield self._one(matcher, rng, free, most)

    def _one(self, matcher: TokenMatcher, rng: random.Random, free: int, most: int) -> Filled:
        size, (end, *_) = len(self.vocabulary.tokens), self.vocabulary.stops
        words, text = np.zeros((1, (size + 31) // 32), dtype=np.int32), b""
        for number in range(most):
            matcher.fill(words, 0)
            bits = np.unpackbits(words[0].view(np.uint8), count=size, bitorder="little")
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                return Filled(text=text, ended=False, stuck=True)
            if bits[end] and (number >= free or len(allowed) == 1 or rng.random() < 0.2):
                assert matcher.accept(end)
                assert matcher.ended()
                return Filled(text=text, ended=True)
            allowed = allowed[allowed != end]
            closing = [one for one in self.closing if bits[one]] if number >= free else []
            telling = allowed[self.telling[allowed]] if rng.random() < 0.5 else ()
            among = closing or (telling if len(telling) else allowed)
            token = int(among[rng.randrange(len(among))])
            assert matcher.accept(token)
            text += self.vocabulary.tokens[token]
        return Filled(text=text, ended=False)


def random_filler(vocabulary: Vocabulary, load: Callable[[Vocabulary], XgrammarBackend]) -> RandomFiller:
    tokens = vocabulary.tokens
    return RandomFiller(
        vocabulary=vocabulary,
        backend=load(vocabulary),
        closing=tuple(tokens.index(one) for one in CLOSING),
        telling=np.array([bool(token) and frozenset(token) <= TELLING for token in tokens]),
    )


def disagreement(schema: object, text: bytes) -> str:
    """Why the ended answer is not an instance of the schema, or "". Patterns are read as ECMA-262 has them."""
    try:
        value = json.loads(text.decode())
    except ValueError as no:
        return f"{no}: {text!r}"
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = jsonschema.validators.extend(kind, {"pattern": _pattern})(schema)
    fault = next(checker.iter_errors(value), None)
    return "" if fault is None else f"{fault.message[:200]}: {text[:200]!r}"


def _pattern(_: object, pattern: str, value: object, schema: Mapping[str, object]) -> Iterator[ValidationError]:
    del schema
    if isinstance(value, str) and regress.Regex(pattern).find(value) is None:
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def vendored_schemas() -> dict[str, str]:
    """The text of each schema that comes with check-jsonschema, by the name of its file."""
    folder = Path(check_jsonschema.__file__).parent / "builtin_schemas"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.json"))}
