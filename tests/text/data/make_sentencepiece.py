"""Writes sentencepiece.json: a small SentencePiece BPE vocabulary and what the library itself makes of some texts.

Needs the `sentencepiece` package (0.2.3 wrote the file that is here), which nothing else of this project uses:
``python make_sentencepiece.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
CORPUS = (
    "The quick brown fox jumps over the lazy dog. 1234567890 reasons, don't you think? "
    "def f(x):\n    return x ** 2\n naïve café 日本語 "
)
TEXTS = (
    "The quick brown fox",
    "the lazy   dog  ",
    "  two spaces first",
    "1234 reasons, don't",
    "def f(x):\n    return x\n\n",
    "naïve café 日本語 中文 😀",
    "\tTab and \u00a0 and \u200b",
    "foxfoxfox jumpsoverlazy",
    " ",
    "x",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus.txt").write_text(CORPUS * 50, encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=f"{folder}/corpus.txt",
            model_prefix=f"{folder}/m",
            vocab_size=420,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.995,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/m.model")
    ids = range(model.vocab_size())
    kinds = [
        2 if model.is_unknown(one) else 3 if model.is_control(one) else 6 if model.is_byte(one) else 1 for one in ids
    ]
    found = {
        "tokens": [model.id_to_piece(one) for one in ids],
        "scores": [model.get_score(one) for one in ids],
        "kinds": kinds,
        "cases": [[text, model.encode(text)] for text in TEXTS],
    }
    (HERE / "sentencepiece.json").write_text(json.dumps(found, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
