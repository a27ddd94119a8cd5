"""Incremental decoding: whole characters only, and all of it equal to decoding at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, models

from tokenspeed.frontend.text.detok import open_stream
from tokenspeed.frontend.text.pieces import BYTE_SIGNS, ByteLevelPieces, SentencePieces
from tokenspeed.frontend.text.tokenizer import LibraryTokenizer, TextTokenizer
from tokenspeed.frontend.text.tokenizer_json import BuiltTokenizer


def byte_level() -> TextTokenizer:
    library = byte_level_tokenizer()
    library.add_special_tokens([AddedToken("<|é|>", special=True)])
    library.add_tokens([AddedToken("naïve ü", special=False)])
    return built(library, ByteLevelPieces(), strips=False)


def sentencepiece() -> TextTokenizer:
    """Byte tokens 0..255, then words with marks, then a special token."""
    words = ["▁Hello", "▁", "▁▁", "日", "本", "ok", "▁wor", "ld", "<0xZZ>", "é"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(words)}
    library = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    library.add_special_tokens([AddedToken("</s>", special=True)])
    return built(library, SentencePieces(byte_fallback=True), strips=True)


def built(library: Tokenizer, pieces: ByteLevelPieces | SentencePieces, *, strips: bool) -> TextTokenizer:
    return LibraryTokenizer(
        built=BuiltTokenizer(library=library, pieces=pieces, strips_leading_space=strips),
        vocab_size=library.get_vocab_size(),
        eos_token_ids=(1,),
        bos_token_id=None,
        added={number: token.special for number, token in library.get_added_tokens_decoder().items()},
        prefix_ids=(),
    )


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}


def chunks(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    found, at = [], 0
    for size in (*sizes, len(ids)):
        found.append(ids[at : at + size])
        at += size
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_are_the_whole_text_for_any_ids_in_any_chunks(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    stream = open_stream(tokenizer, skip_special_tokens=skip)
    deltas = [*(stream.push(chunk) for chunk in chunks(ids, sizes)), stream.flush()]
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_no_character_is_split_however_its_bytes_are_spread_over_tokens(text: str) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = open_stream(tokenizer, continues_text=True)
    seen = ""
    for byte in text.encode():
        seen += stream.push((byte,))
        assert text.startswith(seen)
    assert seen == text
    assert stream.flush() == ""


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_what_is_encoded_comes_back(text: str) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode(text)
    stream = open_stream(tokenizer, skip_special_tokens=False)
    assert "".join(stream.push((one,)) for one in ids) + stream.flush() == text


def test_an_unfinished_character_is_held_and_then_shown_as_broken() -> None:
    tokenizer = TOKENIZERS["byte level"]
    signs = [tokenizer.id_of(BYTE_SIGNS[byte]) for byte in "日".encode()]
    ids = [one for one in signs if one is not None]
    stream = open_stream(tokenizer)
    assert [stream.push((one,)) for one in ids] == ["", "", "日"]
    assert stream.push(ids[:2]) == ""
    assert stream.flush() == "�"


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    end = tokenizer.id_of("</s>")
    assert end is not None
    ids = [tokenizer.id_of("ok") or 0, end]
    assert open_stream(tokenizer).push(ids) == "ok"
    assert open_stream(tokenizer, skip_special_tokens=False).push(ids) == "ok</s>"


def test_the_space_of_the_first_word_goes_at_the_start_of_a_text_and_stays_in_its_middle() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello, world, ld = (tokenizer.id_of(piece) or 0 for piece in ("▁Hello", "▁wor", "ld"))
    stream = open_stream(tokenizer)
    assert [stream.push((one,)) for one in (hello, world, ld)] == ["Hello", " wor", "ld"]
    assert open_stream(tokenizer, continues_text=True).push((world, ld)) == " world"
    assert tokenizer.decode([tokenizer.id_of("▁▁") or 0, hello]) == "  Hello"


@attrs.define(eq=False)
class Counting:
    """A tokenizer that counts how often a token's bytes are asked for."""

    inner: TextTokenizer
    asked: int = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return self.inner.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return self.inner.is_special(token_id)

    @property
    def strips_leading_space(self) -> bool:
        return self.inner.strips_leading_space


def test_each_token_is_decoded_once() -> None:
    counting = Counting(TOKENIZERS["byte level"])
    stream = open_stream(counting)  # type: ignore[arg-type] # the decoder needs no more of a tokenizer
    for number in range(500):
        stream.push((number % 300 + 5,))
    assert counting.asked == 500
