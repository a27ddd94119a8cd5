"""Open a folder in the Hugging Face layout: config.json, tokenizer.json, safetensors."""

from __future__ import annotations

from pathlib import Path

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config_hf import config_from_hf
from tokenspeed.checkpoint.facts import Facts, read_json, read_json_if_there
from tokenspeed.checkpoint.generation import generation_from_hf
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.tokenizer_data import TokenizerJson
from tokenspeed.checkpoint.tokenizer_json import JsonVocabulary, read_vocabulary
from tokenspeed.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def open_hf_checkpoint(path: Path, *, name: str, served_name: str) -> Checkpoint:
    """Read every small file of the folder `path`; weights are located, not read.

    Raises: ModelError.
    """
    config_file = path / "config.json"
    raw = read_json(config_file)
    config = config_from_hf(raw, str(config_file))
    facts = Facts(raw=raw, where=str(config_file))
    generation = Facts(
        raw=read_json_if_there(path / "generation_config.json"), where=str(path / "generation_config.json")
    )
    tokenizer_config = Facts(
        raw=read_json_if_there(path / "tokenizer_config.json"), where=str(path / "tokenizer_config.json")
    )
    vocabulary = _vocabulary(path)
    named = _named_tokens(tokenizer_config, read_json_if_there(path / "special_tokens_map.json"))
    bos = _id(vocabulary, named.get("bos_token"))
    prefix = _prefix(tokenizer_config, vocabulary, bos)
    return Checkpoint(
        kind=CheckpointKind.SAFETENSORS,
        path=path,
        name=name,
        served_name=served_name,
        config=config,
        weight_files=weight_files(path),
        generation=generation_from_hf(generation),
        eos_token_ids=_eos(generation, facts, _id(vocabulary, named.get("eos_token"))),
        bos_token_id=prefix[0] if prefix else bos if bos is not None else next(iter(facts.ids("bos_token_id")), None),
        add_bos=bool(prefix),
        tokenizer_vocab_size=vocabulary.size,
        chat_template=_chat_template(path, tokenizer_config),
        special_tokens=tuple(named.items()),
        tokenizer=TokenizerJson(path=path / "tokenizer.json", prefix_ids=prefix),
    )


def weight_index(path: Path) -> dict[str, str]:
    """The file of each tensor as the folder's index names it; empty: there is no index.

    Raises: ModelError: it cannot be read, or names no files of this folder.
    """
    if not (path / _INDEX).exists():
        return {}
    index = Facts(raw=read_json(path / _INDEX), where=str(path / _INDEX))
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise index.fail("weight_map", placed, "an object of tensor names and file names is needed")
    names = sorted({str(one) for one in placed.values()})
    if any(Path(one).name != one for one in names):
        raise index.fail("weight_map", names, "file names without folders are needed")
    return {str(tensor): str(file) for tensor, file in placed.items()}


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, all of which exist.

    Raises: ModelError: none, or some that the index names are missing.
    """
    placed = weight_index(path)
    if placed:
        names = sorted(set(placed.values()))
        missing = [one for one in names if not (path / one).is_file()]
        if missing:
            shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
            raise ModelError(
                f"{path}: {len(missing)} of {len(names)} weight files that {_INDEX} names are missing: {shown};"
                " the download is incomplete, fetch it again"
            )
        return tuple(path / one for one in names)
    if (path / _SINGLE).is_file():
        return (path / _SINGLE,)
    others = sorted(one.name for pattern in ("*.safetensors", "*.bin", "*.pth", "*.gguf") for one in path.glob(pattern))
    there = f"; there is {', '.join(others[:5])}" if others else ""
    raise ModelError(f"{path}: neither {_SINGLE} nor {_INDEX} is there{there}")


def _vocabulary(path: Path) -> JsonVocabulary:
    file = path / "tokenizer.json"
    if not file.exists():
        other = [one for one in ("tokenizer.model", "vocab.json", "tekken.json") if (path / one).exists()]
        hint = f" ({other[0]} alone is not supported; convert it with transformers' save_pretrained)" if other else ""
        raise ModelError(f"{file}: the file is missing{hint}")
    return read_vocabulary(file)


def _named_tokens(config: Facts, special_tokens_map: dict[str, object]) -> dict[str, str]:
    """Texts of the named special tokens; a token is written as text or as an object with `content`."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        value = special_tokens_map.get(name) if value is None and name not in config.raw else value
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _id(vocabulary: JsonVocabulary, token: str | None) -> int | None:
    return None if token is None else vocabulary.id_of(token)


def _prefix(config: Facts, vocabulary: JsonVocabulary, bos: int | None) -> tuple[int, ...]:
    """The post-processor of tokenizer.json decides; ``add_bos_token`` where the file has none.

    The two disagree in files that were edited by hand; current releases of transformers follow tokenizer.json.
    """
    if vocabulary.prefix_ids is not None:
        return vocabulary.prefix_ids
    wanted = config.flag("add_bos_token", default=False)
    if wanted and bos is None:
        raise config.fail("add_bos_token", True, "then bos_token has to name a token of the vocabulary")
    return (bos,) if wanted and bos is not None else ()


def _eos(generation: Facts, config: Facts, of_tokenizer: int | None) -> tuple[int, ...]:
    named = () if of_tokenizer is None else (of_tokenizer,)
    return tuple(dict.fromkeys((*generation.ids("eos_token_id"), *config.ids("eos_token_id"), *named)))


def _chat_template(path: Path, tokenizer_config: Facts) -> str | None:
    """A file of its own wins over ``tokenizer_config.json``, as writers of the newer layout mean it."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise ModelError(f"{file}: cannot be read as text: {fault}") from fault
    own = Facts(raw=read_json_if_there(path / "chat_template.json"), where=str(path / "chat_template.json"))
    facts = own if own.get("chat_template") is not None else tokenizer_config
    value = facts.get("chat_template")
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise facts.fail("chat_template", value, "a text, or a list that has a template named default")
    return value
