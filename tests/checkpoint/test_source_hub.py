"""``hf:`` against a hub on loopback."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from fake_hub import fake_hub
from model_files import resolved, write_folder

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.source_hub import HubSource
from tokenspeed.errors import ModelError


@attrs.define(eq=False)
class Watched:
    steps: list[tuple[str, int, int]] = attrs.field(factory=list[tuple[str, int, int]])

    def step(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))


def test_a_repository_is_fetched_once_and_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "repo", generation={"eos_token_id": [1, 2]})
    (folder / "model.bin").write_bytes(b"another copy of the weights")
    with fake_hub(folder) as hub:
        source = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint)
        watched = Watched()
        found = source.locate("hf:org/name", watched)
        assert (found.kind, found.name, found.hub) == (CheckpointKind.SAFETENSORS, "org/name", True)
        assert sorted(hub.log.downloads) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        again = source.locate("hf:org/name", NoProgress())
        assert again.path == found.path
        assert len(hub.log.downloads) == 4
    assert found.path is not None
    assert open_checkpoint(resolved(found.path)).eos_token_ids == (1, 2)
    done = [step for step in watched.steps if step[1]]
    total = sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".bin")
    assert done[-1] == ("downloading", total, total)


def test_offline_works_with_a_warm_cache_and_says_so_with_a_cold_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "repo")
    with fake_hub(folder) as hub:
        found = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint).locate("hf:org/name", NoProgress())
        asked = hub.log.requests
        offline = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint, offline=True)
        assert offline.locate("hf:org/name", NoProgress()).path == found.path
        with pytest.raises(ModelError, match=r"hf:org/other: the network is switched off .* does not hold"):
            offline.locate("hf:org/other", NoProgress())
        assert hub.log.requests == asked


def test_a_broken_off_download_leaves_nothing_that_passes_for_a_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "repo")
    with fake_hub(folder) as hub:
        hub.log.cut = "tokenizer.json"
        source = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint)
        with pytest.raises(ModelError, match="hf:org/name"):
            source.locate("hf:org/name", NoProgress())
        offline = attrs.evolve(source, offline=True)
        with pytest.raises(ModelError, match="does not hold the whole model"):
            offline.locate("hf:org/name", NoProgress())
        hub.log.cut, hub.log.refuse = None, False
        found = source.locate("hf:org/name", NoProgress())
    assert found.path is not None
    assert (found.path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_hub_that_is_gone_serves_from_the_cache(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "repo")
    with fake_hub(folder) as hub:
        source = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint)
        found = source.locate("hf:org/name", NoProgress())
    assert source.locate("hf:org/name", NoProgress()).path == found.path
    with pytest.raises(ModelError, match="hf:org/cold: the hub cannot be reached"):
        source.locate("hf:org/cold", NoProgress())


def test_unknown_names_and_revisions_are_told_apart(tmp_path: Path) -> None:
    with fake_hub(write_folder(tmp_path / "repo"), revisions=("main", "v1")) as hub:
        source = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint)
        assert source.locate("hf:org/name@v1", NoProgress()).path is not None
        with pytest.raises(ModelError, match="org/name has no revision v2"):
            source.locate("hf:org/name@v2", NoProgress())
        with pytest.raises(ModelError, match="no repository org/nome; check the name"):
            source.locate("hf:org/nome", NoProgress())
        with pytest.raises(ModelError, match="no repository org/nome and there is no folder org/nome here"):
            source.locate("org/nome", NoProgress())


def test_a_repository_without_config_json_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "model.Q4_0.gguf").write_bytes(b"GGUF")
    with fake_hub(folder) as hub:
        source = HubSource(folder=tmp_path / "cache", endpoint=hub.endpoint)
        with pytest.raises(ModelError, match=r"no config\.json"):
            source.locate("hf:org/name", NoProgress())


@pytest.mark.parametrize("source", ["hf:", "hf:name", "hf:a/b/c", "hf:org/na me", "hf:org/name@"])
def test_a_malformed_name_is_refused_with_the_form(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hf:ORG/NAME"):
        HubSource(folder=tmp_path).locate(source, NoProgress())
