"""The few facts of a ``tokenizer.json`` that are needed before a tokenizer is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import msgspec

from tokenspeed.errors import ModelError


@attrs.frozen(kw_only=True, eq=False)
class JsonVocabulary:
    """Tokens and their ids.

    Attributes:
        size: the largest id plus one.
        prefix_ids: what the file's own post-processor puts before a text; None: it has none.
    """

    ids: Mapping[str, int]
    added: Mapping[str, int]
    prefix_ids: tuple[int, ...] | None

    @property
    def size(self) -> int:
        return max((*self.ids.values(), *self.added.values()), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        found = self.added.get(token)
        return self.ids.get(token) if found is None else found


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict)


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = msgspec.field(default_factory=list)
    post_processor: msgspec.Raw = msgspec.Raw(b"null")


class _SpecialIds(msgspec.Struct):
    ids: list[int]


class _Processor(msgspec.Struct):
    type: str
    processors: list[_Processor] = msgspec.field(default_factory=list)
    single: list[dict[str, dict[str, object]]] | dict[str, object] | str = ""
    special_tokens: dict[str, _SpecialIds] = msgspec.field(default_factory=dict)


def read_vocabulary(path: Path) -> JsonVocabulary:
    """Raises: ModelError: the file is no tokenizer in this format."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        processor = msgspec.json.decode(file.post_processor, type=_Processor | None)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ModelError(f"{path}: cannot be read as a tokenizer: {fault}") from fault
    vocab = file.model.vocab
    ids = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    prefix = None if processor is None else _prefix(processor, path)
    return JsonVocabulary(
        ids=MappingProxyType(ids),
        added=MappingProxyType({one.content: one.id for one in file.added_tokens}),
        prefix_ids=prefix,
    )


def _prefix(processor: _Processor, path: Path) -> tuple[int, ...]:
    """Ids of the special tokens that a template puts before the first sequence."""
    if processor.type not in ("Sequence", "TemplateProcessing", "ByteLevel"):
        raise ModelError(
            f"{path}: post_processor has type {processor.type!r};"
            " supported are ByteLevel, TemplateProcessing and a Sequence of them"
        )
    ids: list[int] = []
    for inner in processor.processors:
        ids.extend(_prefix(inner, path))
    if processor.type == "TemplateProcessing" and isinstance(processor.single, list):
        for piece in processor.single:
            if "SpecialToken" not in piece:
                break
            special = processor.special_tokens.get(str(piece["SpecialToken"].get("id")))
            ids.extend(special.ids if special else [])
    return tuple(ids)
