"""Tokenizers: from every kind of checkpoint, with the ids the original gives."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import (
    byte_level_tokenizer,
    resolved,
    with_bos_template,
    write_folder,
    write_gguf,
)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.errors import ModelError, RequestError
from tokenspeed.frontend.text.pieces import BYTE_SIGNS, ByteLevelPieces
from tokenspeed.frontend.text.tokenizer import TextTokenizer, load_tokenizer, tokenizer_of_bytes
from tokenspeed.settings.model import ModelSettings

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"

LIBRARY = byte_level_tokenizer()

TRICKY = (
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "1234567 3.14",
    "I'll DON'T we've",
    "naïve café — “quotes” …",
    "日本語のテキスト 한국어",
    "😀👩‍👩‍👧 emoji",
    "\n\nlines\r\n\t tab\u00a0nbsp\u200b",
    "def f(x):\n    return x**2  # ok\n",
)


def of_folder(folder: Path) -> TextTokenizer:
    return load_tokenizer(open_checkpoint(resolved(folder)))


def of_gguf(path: Path) -> TextTokenizer:
    return load_tokenizer(open_checkpoint(resolved(path, CheckpointKind.GGUF)))


def of_preset(name: str) -> TextTokenizer:
    return load_tokenizer(open_checkpoint(resolve_model(ModelSettings(source=f"random:{name}"), NoProgress())))


def gguf_twin(path: Path, library: Tokenizer, *, pre: str, metadata: dict[str, object] | None = None) -> Path:
    """A GGUF file with the vocabulary and merges of a byte-level BPE."""
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token.content for token in library.get_added_tokens_decoder().values()}
    return write_gguf(
        path,
        tokens=tokens,
        kinds=[3 if token in special else 1 for token in tokens],
        metadata={
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
            **(metadata or {}),
        },
    )


def test_both_file_layouts_of_one_vocabulary_give_the_same_ids(tmp_path: Path) -> None:
    library = byte_level_tokenizer()
    hf = of_folder(write_folder(tmp_path / "hf", tokenizer=library))
    gguf = of_gguf(gguf_twin(tmp_path / "m.gguf", library, pre="gpt-2"))
    for text in (*TRICKY, "<bos>a<|im_end|>b"):
        ids = hf.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert ids == gguf.encode(text)
        assert hf.decode(ids, skip_special_tokens=False) == gguf.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pattern", "nfc"),
    [
        ("smollm", r"\p{N}|[^\p{N}]+", False),
        (
            "llama-bpe",
            CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            False,
        ),
        (
            "qwen2",
            CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            True,
        ),
    ],
)
def test_a_named_pre_tokenizer_cuts_as_the_family_does(tmp_path: Path, pre: str, pattern: str, nfc: bool) -> None:
    library = byte_level_tokenizer(size=600)
    expected = Tokenizer.from_str(library.to_str())
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm"),
        ]
    )
    if nfc:
        expected.normalizer = normalizers.NFC()
    ours = of_gguf(gguf_twin(tmp_path / "m.gguf", library, pre=pre, metadata={"tokenizer.ggml.add_bos_token": False}))
    for text in (*TRICKY, unicodedata.normalize("NFD", "naïve café"), "12345 a1b22 ½"):
        assert ours.encode(text) == expected.encode(text, add_special_tokens=False).ids


def test_a_word_of_the_vocabulary_is_taken_whole_where_the_family_does(tmp_path: Path) -> None:
    vocabulary = ("<s>", "</s>", *BYTE_SIGNS.values(), "abc", "xy")
    for pre, pieces in (("llama-bpe", [b"abc"]), ("qwen2", [b"a", b"b", b"c"])):
        path = write_gguf(
            tmp_path / f"{pre}.gguf",
            tokens=vocabulary,
            kinds=(3, 3, *[1] * 258),
            metadata={"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["x y"]},
        )
        tokenizer = of_gguf(path)
        ids = tokenizer.encode("abc", add_special_tokens=False)
        assert [tokenizer.token_bytes(one) for one in ids] == pieces


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = gguf_twin(tmp_path / "m.gguf", byte_level_tokenizer(), pre="tekken")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'tekken'; supported are gpt-2, smollm"):
        of_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer.ggml.model": "t5"}, "model is 't5'; supported are gpt2 and llama"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges has 'ab'"),
        ({"tokenizer.ggml.merges": ["x y"]}, "do not fit together"),
        ({"tokenizer.ggml.merges": 3}, "merges is missing or no list"),
        ({"tokenizer.ggml.tokens": ["<s>", "</s>", "a", "a", "ab"]}, "the same token twice"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
    ],
)
def test_damaged_tokenizer_metadata_is_refused_by_key(tmp_path: Path, metadata: dict[str, object], says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=says) as caught:
        of_gguf(path)
    assert str(path) in str(caught.value)


def test_sentencepiece_data_give_sentencepieces_ids(tmp_path: Path) -> None:
    data = json.loads((Path(__file__).parent / "data" / "sentencepiece.json").read_text())
    path = write_gguf(
        tmp_path / "m.gguf",
        tokens=data["tokens"],
        kinds=data["kinds"],
        metadata={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": data["scores"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
    )
    tokenizer = of_gguf(path)
    assert tokenizer.strips_leading_space
    for text, ids in data["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode([1, *ids]) == text


def test_bos_is_added_once(tmp_path: Path) -> None:
    tokenizer = of_folder(write_folder(tmp_path / "m", tokenizer=with_bos_template(byte_level_tokenizer())))
    bare = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [0, *bare]
    assert tokenizer.encode("<bos>hi") == [0, *bare]
    assert tokenizer.encode("<bos>hi", add_special_tokens=False) == [0, *bare]
    assert tokenizer.encode("") == [0]


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    library = byte_level_tokenizer()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    tokenizer = of_folder(write_folder(tmp_path / "m", tokenizer=library))
    text = "the quick brown fox jumps over"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_the_clients_fault() -> None:
    with pytest.raises(RequestError, match=r"'\\ud83d'\) at character 2"):
        of_preset("tiny-llama").encode("ab\ud83d!")


def test_the_preset_tokenizer_is_bytes_and_specials() -> None:
    tokenizer = of_preset("tiny-llama")
    text = "aé日😀<|user|>"
    ids = tokenizer.encode(text)
    assert ids == [256, *"aé日😀".encode(), 260]
    assert tokenizer.decode(ids) == "aé日😀"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>" + text
    assert [tokenizer.token_bytes(number) for number in range(256)] == [bytes([number]) for number in range(256)]
    assert [tokenizer.is_special(number) for number in (255, 256, 263, 264)] == [False, True, True, False]
    assert (tokenizer.id_of("<|eos|>"), tokenizer.id_of("nothing"), tokenizer.vocab_size) == (257, None, 264)
    assert [tokenizer.token_bytes(number) for number in (264, 9999, -1, 1 << 40)] == [b""] * 4


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30), skip=st.booleans())
def test_decoding_by_bytes_is_what_the_library_decodes(ids: list[int], skip: bool) -> None:
    library, pieces = LIBRARY, ByteLevelPieces()
    added = library.get_added_tokens_decoder()
    kept = [one for one in ids if not (skip and one in added)]
    joined = b"".join(pieces.to_bytes(library.id_to_token(one) or "", added=one in added) for one in kept)
    assert joined.decode("utf-8", "replace") == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            True,
        ),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), False),
    ],
)
def test_decoders_with_marked_spaces_are_understood(tmp_path: Path, decoder: decoders.Decoder, strips: bool) -> None:
    library = Tokenizer(models.BPE({"<eos>": 0, "▁a": 1, "▁": 2, "b": 3, "<0x0A>": 4}, []))
    library.decoder = decoder
    tokenizer = of_folder(write_folder(tmp_path / "m", tokenizer=library))
    assert tokenizer.strips_leading_space is strips
    for ids in ([1, 3, 1], [3, 1], [2, 1, 3], [2]):
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])]
)
def test_a_decoder_that_is_more_than_bytes_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    library = byte_level_tokenizer()
    library.decoder = decoder  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder is"):
        of_folder(write_folder(tmp_path / "m", tokenizer=library))


def test_a_damaged_tokenizer_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    checkpoint = open_checkpoint(resolved(folder))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(checkpoint)


@pytest.mark.model
def test_the_default_model_splits_digits_and_round_trips() -> None:
    checkpoint = open_checkpoint(resolve_model(ModelSettings(), NoProgress()))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("Hello world") == [19556, 905]
    digits = tokenizer.encode("1234567890")
    assert [tokenizer.token_bytes(one) for one in digits] == [bytes([sign]) for sign in b"1234567890"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert [tokenizer.is_special(one) for one in (0, 1, 2, 19556)] == [True, True, True, False]
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_tokenizer_of_bytes_keeps_none_of_the_texts_it_saw() -> None:
    library = tokenizer_of_bytes(()).library

    def resident_kib(texts: range) -> int:
        for number in texts:
            library.encode_batch([f"{number:05} " * 20])
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4

    before = resident_kib(range(500))
    assert resident_kib(range(500, 5000)) - before < 8192
