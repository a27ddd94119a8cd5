"""A checkpoint's tokenizer as a folder in the Hugging Face layout, for frontends that read nothing else.

Only what such a frontend reads: no weights, and of the configuration the few facts it computes with.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.tokenizer_data import TokenizerJson
from tokenspeed.frontend.text.tokenizer import built_tokenizer


def write_tokenizer_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, ``config.json`` and ``generation_config.json``.

    Raises: ModelError: the checkpoint's tokenizer cannot be used. OSError: `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    match checkpoint.tokenizer:
        case TokenizerJson(path=path):
            shutil.copyfile(path, folder / "tokenizer.json")
        case data:
            library = Tokenizer.from_str(built_tokenizer(data).library.to_str())
            _put_in_front(library, data.prefix_ids)
            library.save(str(folder / "tokenizer.json"))
    config = checkpoint.config
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": checkpoint.add_bos,
            "model_max_length": config.max_positions,
            "clean_up_tokenization_spaces": False,
            **dict(checkpoint.special_tokens),
            **({} if checkpoint.chat_template is None else {"chat_template": checkpoint.chat_template}),
        },
        "config.json": {
            "architectures": list(config.architectures),
            "model_type": config.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_positions,
            "bos_token_id": checkpoint.bos_token_id,
            "eos_token_id": list(checkpoint.eos_token_ids),
        },
        "generation_config.json": {
            "bos_token_id": checkpoint.bos_token_id,
            "eos_token_id": list(checkpoint.eos_token_ids),
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _put_in_front(library: Tokenizer, ids: tuple[int, ...]) -> None:
    """What a text prompt starts with, as the file's own post-processing."""
    if not ids:
        return
    names = [library.id_to_token(one) or "" for one in ids]
    library.post_processor = TemplateProcessing(
        single=" ".join((*names, "$A")), special_tokens=list(zip(names, ids, strict=True))
    )
