"""Open a GGUF file as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config_gguf import config_from_gguf
from tokenspeed.checkpoint.facts import Facts
from tokenspeed.checkpoint.generation import generation_from_gguf
from tokenspeed.checkpoint.gguf_header import GgufFile, open_gguf
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.tokenizer_data import (
    BOS_BY_DEFAULT,
    GGUF_CONTROL,
    GGUF_UNUSED,
    TokenizerGguf,
)
from tokenspeed.errors import ModelError

_TOKENIZER = "tokenizer.ggml."
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
_TEMPLATE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
)


def open_gguf_checkpoint(path: Path, *, name: str, served_name: str) -> Checkpoint:
    """Read the header of `path` and make sense of it.

    Raises: ModelError.
    """
    gguf = open_gguf(path)
    facts = Facts(raw=gguf.metadata, where=str(path))
    config = config_from_gguf(gguf)
    tokens = _strings(gguf, f"{_TOKENIZER}tokens")
    bos, adds_bos = _bos(facts, len(tokens))
    return Checkpoint(
        kind=CheckpointKind.GGUF,
        path=path,
        name=name,
        served_name=served_name,
        config=config,
        weight_files=(path,),
        generation=generation_from_gguf(facts),
        eos_token_ids=_eos(facts, tokens),
        bos_token_id=bos,
        add_bos=adds_bos,
        tokenizer_vocab_size=_used_ids(gguf, len(tokens)),
        chat_template=facts.text("tokenizer.chat_template"),
        special_tokens=tuple(
            (shown, tokens[token_id])
            for shown, key in _TEMPLATE_NAMES.items()
            if (token_id := _id(facts, key, len(tokens))) is not None
        ),
        tokenizer=TokenizerGguf(gguf=gguf, prefix_ids=(bos,) if adds_bos and bos is not None else ()),
        gguf=gguf,
    )


def _strings(gguf: GgufFile, key: str) -> tuple[str, ...]:
    value = gguf.metadata.get(key)
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise ModelError(f"{gguf.path}: {key} is missing or no list of texts; the file carries no tokenizer")
    return tuple(str(one) for one in value)


def _id(facts: Facts, key: str, num_tokens: int) -> int | None:
    """A token id, or None where there is none (writers also say so with a negative or 2**32 - 1)."""
    value = facts.get(f"{_TOKENIZER}{key}")
    if value is None or value in (-1, (1 << 32) - 1):
        return None
    if type(value) is not int or not 0 <= value < num_tokens:
        raise facts.fail(f"{_TOKENIZER}{key}", value, f"an id below {num_tokens} is needed")
    return value


def _eos(facts: Facts, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """End of sequence, of turn and of message, then known turn ends of files whose writer left the keys out."""
    found = [_id(facts, key, len(tokens)) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    kinds = facts.get(f"{_TOKENIZER}token_type")
    if isinstance(kinds, tuple) and len(kinds) == len(tokens):
        found += [at for text in _TURN_ENDS if text in tokens and kinds[at := tokens.index(text)] == GGUF_CONTROL]
    return tuple(dict.fromkeys(one for one in found if one is not None))


def _bos(facts: Facts, num_tokens: int) -> tuple[int | None, bool]:
    bos = _id(facts, "bos_token_id", num_tokens)
    model, pre = facts.text(f"{_TOKENIZER}model"), facts.text(f"{_TOKENIZER}pre")
    default = model == "llama" or (model == "gpt2" and pre in BOS_BY_DEFAULT)
    adds = facts.flag(f"{_TOKENIZER}add_bos_token", default=default)
    return bos, adds and bos is not None


def _used_ids(gguf: GgufFile, num_tokens: int) -> int:
    """Ids up to the last one that is in use: some files pad the vocabulary with unused tokens."""
    kinds = gguf.metadata.get(f"{_TOKENIZER}token_type")
    if kinds is None:
        return num_tokens
    if not isinstance(kinds, tuple) or len(kinds) != num_tokens:
        found = len(kinds) if isinstance(kinds, tuple) else kinds
        raise ModelError(f"{gguf.path}: {_TOKENIZER}token_type has {found!r} entries for {num_tokens} tokens")
    last = num_tokens
    while last > 1 and kinds[last - 1] == GGUF_UNUSED:
        last -= 1
    return last
