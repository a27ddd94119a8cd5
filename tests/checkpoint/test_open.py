"""What an opened checkpoint says: ends, beginnings, defaults, templates, files."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from model_files import (
    HF_CONFIG,
    byte_level_tokenizer,
    resolved,
    with_bos_template,
    write_folder,
    write_gguf,
)
from tokenizers.processors import BertProcessing

from tokenspeed.checkpoint.config import RopeKind
from tokenspeed.checkpoint.open import Checkpoint, open_checkpoint
from tokenspeed.checkpoint.random_models import RANDOM_MODELS
from tokenspeed.checkpoint.resolved import CheckpointKind, ResolvedModel
from tokenspeed.errors import ModelError
from tokenspeed.plane.messages import SamplingParams


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(resolved(folder))


def opened_gguf(tmp_path: Path, **kwargs: object) -> Checkpoint:
    path = write_gguf(tmp_path / "m.gguf", **kwargs)  # type: ignore[arg-type]
    return open_checkpoint(resolved(path, CheckpointKind.GGUF))


def test_every_end_id_of_a_folder_counts_once(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "m",
        config={**HF_CONFIG, "eos_token_id": 7},
        generation={"eos_token_id": [5, 7]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    assert opened(folder).eos_token_ids == (5, 7, 2)


def test_a_folder_without_any_end_id_has_none(tmp_path: Path) -> None:
    config = {key: value for key, value in HF_CONFIG.items() if key != "eos_token_id"}
    assert opened(write_folder(tmp_path / "m", config=config)).eos_token_ids == ()


def test_the_post_processor_decides_about_bos_and_the_tokenizer_config_where_there_is_none(tmp_path: Path) -> None:
    adds, silent = with_bos_template(byte_level_tokenizer()), byte_level_tokenizer()
    for wish in (None, True, False):
        asked = {"add_bos_token": wish, "bos_token": "<bos>"}
        found = opened(write_folder(tmp_path / f"a{wish}", tokenizer=adds, tokenizer_config=asked))
        assert (found.bos_token_id, found.add_bos, found.tokenizer.prefix_ids) == (0, True, (0,))
    wish_only = {"add_bos_token": True, "bos_token": "<|im_end|>"}
    told_to = opened(write_folder(tmp_path / "b", tokenizer=silent, tokenizer_config=wish_only))
    assert (told_to.bos_token_id, told_to.add_bos, told_to.tokenizer.prefix_ids) == (2, True, (2,))
    neither = opened(write_folder(tmp_path / "c", tokenizer=silent))
    assert (neither.bos_token_id, neither.add_bos, neither.tokenizer.prefix_ids) == (0, False, ())


def test_a_bos_that_is_wanted_and_not_named_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tokenizer_config={"add_bos_token": True})
    with pytest.raises(ModelError, match="add_bos_token is True; then bos_token"):
        opened(folder)


def test_a_post_processor_of_another_kind_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = BertProcessing(("<eos>", 1), ("<bos>", 0))
    with pytest.raises(ModelError, match="post_processor has type 'BertProcessing'"):
        opened(write_folder(tmp_path / "m", tokenizer=tokenizer))


def test_special_tokens_are_named_for_the_chat_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tokenizer_config={"bos_token": "<bos>", "eos_token": {"content": "<eos>"}})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<x>", "pad_token": "<eos>"}))
    assert dict(opened(folder).special_tokens) == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}


def test_the_tokenizer_and_the_embedding_may_differ_in_size(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(size=300)
    tokenizer.add_tokens(["<added>"])
    checkpoint = opened(write_folder(tmp_path / "m", tokenizer=tokenizer))
    assert (checkpoint.tokenizer_vocab_size, checkpoint.config.vocab_size) == (301, 512)


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.1,
    }
    folder = write_folder(tmp_path / "m", generation=generation)
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0, repetition_penalty=1.1)
    assert opened(folder).generation == expected
    unwanted = attrs.evolve(resolved(folder), generation_defaults=False)
    assert open_checkpoint(unwanted).generation == SamplingParams()


def test_a_greedy_generation_config_means_temperature_zero(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", generation={"do_sample": False, "temperature": 0.7})
    assert opened(folder).generation.temperature == 0.0


@pytest.mark.parametrize(
    ("generation", "says"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [1, None]}, "eos_token_id is"),
    ],
)
def test_a_default_no_request_could_have_is_refused(tmp_path: Path, generation: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        opened(write_folder(tmp_path / "m", generation=generation))
    assert "generation_config.json" in str(caught.value)


def test_a_template_is_found_wherever_writers_put_it(tmp_path: Path) -> None:
    assert opened(write_folder(tmp_path / "none")).chat_template is None
    by_text = write_folder(tmp_path / "text", tokenizer_config={"chat_template": "one"})
    assert opened(by_text).chat_template == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert opened(write_folder(tmp_path / "list", tokenizer_config={"chat_template": named})).chat_template == "three"
    (by_text / "chat_template.json").write_text(json.dumps({"chat_template": "four"}))
    assert opened(by_text).chat_template == "four"
    (by_text / "chat_template.jinja").write_text("five")
    assert opened(by_text).chat_template == "five"


def test_the_operators_template_replaces_the_checkpoints(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages }}")
    model = attrs.evolve(resolved(write_folder(tmp_path / "m")), chat_template_file=mine)
    assert open_checkpoint(model).chat_template == "{{ messages }}"
    with pytest.raises(ModelError, match=r"model\.chat_template: .*gone\.jinja"):
        open_checkpoint(attrs.evolve(model, chat_template_file=tmp_path / "gone.jinja"))


def test_weight_files_are_those_of_the_index_and_all_of_them_are_there(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert opened(folder).weight_files == (folder / "model.safetensors",)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"b": names[1], "a": names[0], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / names[0]).touch()
    with pytest.raises(ModelError, match=f"1 of 2 weight files .* missing: {names[1]}"):
        opened(folder)
    (folder / names[1]).touch()
    assert opened(folder).weight_files == tuple(folder / name for name in names)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="file names without folders"):
        opened(folder)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", weights=False)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"neither model\.safetensors .*; there is pytorch_model\.bin"):
        opened(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"tokenizer\.json: the file is missing \(tokenizer\.model alone"):
        opened(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        opened(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: holds list"):
        opened(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        opened(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: the file is missing"):
        opened(folder)


def test_a_gguf_file_says_the_same_things(tmp_path: Path) -> None:
    checkpoint = opened_gguf(
        tmp_path,
        metadata={
            "tokenizer.ggml.eot_token_id": 4,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ bos_token }}",
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 10,
        },
    )
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id, checkpoint.add_bos) == ((1, 4), 0, True)
    assert checkpoint.tokenizer.prefix_ids == (0,)
    assert checkpoint.chat_template == "{{ bos_token }}"
    assert checkpoint.generation == SamplingParams(temperature=0.5, top_k=10)
    assert dict(checkpoint.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (checkpoint.weight_files, checkpoint.tokenizer_vocab_size) == ((tmp_path / "m.gguf",), 5)
    assert checkpoint.gguf is not None


def test_a_turn_end_counts_also_where_the_file_does_not_name_it(tmp_path: Path) -> None:
    tokens = ("<s>", "</s>", "a", "b", "ab", "<|eot_id|>", "<|im_end|>")
    assert opened_gguf(tmp_path, tokens=tokens, kinds=(3, 3, 1, 1, 1, 3, 1)).eos_token_ids == (1, 5)


@pytest.mark.parametrize(
    ("model", "pre", "adds"),
    [("gpt2", "smollm", False), ("gpt2", "llama-bpe", True), ("gpt2", "qwen2", False), ("llama", "default", True)],
)
def test_a_gguf_file_that_does_not_speak_of_bos_means_its_familys_habit(
    tmp_path: Path, model: str, pre: str, adds: bool
) -> None:
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre}
    assert opened_gguf(tmp_path, metadata=metadata).add_bos is adds


def test_unused_ids_at_the_end_of_a_gguf_vocabulary_do_not_count(tmp_path: Path) -> None:
    checkpoint = opened_gguf(
        tmp_path, tokens=("<s>", "</s>", "a", "b", "ab", "[P1]", "[P2]"), kinds=(3, 3, 1, 1, 1, 5, 5)
    )
    assert (checkpoint.tokenizer_vocab_size, checkpoint.config.vocab_size) == (5, 7)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer.ggml.eos_token_id": 5}, "eos_token_id is 5; an id below 5"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or no list of texts"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has 2 entries for 5 tokens"),
    ],
)
def test_a_gguf_vocabulary_that_does_not_fit_together_is_refused(
    tmp_path: Path, metadata: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        opened_gguf(tmp_path, metadata=metadata)


def test_an_id_that_says_none_is_none(tmp_path: Path) -> None:
    checkpoint = opened_gguf(tmp_path, metadata={"tokenizer.ggml.bos_token_id": (1 << 32) - 1})
    assert (checkpoint.bos_token_id, checkpoint.add_bos) == (None, False)


def preset(name: str) -> Checkpoint:
    return open_checkpoint(
        ResolvedModel(kind=CheckpointKind.RANDOM, path=None, name=name, served_name=name, origin=f"random:{name}")
    )


def test_presets_cover_the_families_and_differ_in_their_weights() -> None:
    found = [preset(name) for name in RANDOM_MODELS]
    assert {one.config.model_type for one in found} == {"llama", "qwen2", "qwen3", "gemma3", "gated_delta_hybrid"}
    assert len({one.seed for one in found}) == len(found)
    assert all(one.tokenizer_vocab_size <= one.config.vocab_size for one in found)
    scalings = {one.config.rope_scaling.kind for one in found if one.config.rope_scaling}
    assert scalings == {RopeKind.LLAMA3}


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ModelError, match="random:nope: no such preset; there are tiny-llama"):
        preset("nope")
