"""Native models of the small presets, on a library of their own where a test changes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import torch
from paged_rows import PagedRun, paged_run

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.device.native.bind import NativeModelBound, bind_native
from tokenspeed.device.native.library import NativeLibrary, native_library, open_library
from tokenspeed.device.native.weights import load_native
from tokenspeed.settings.model import WeightsMode

KINDS = ("tiny-llama", "tiny-llama3", "tiny-qwen2", "tiny-qwen3")
MODES = (WeightsMode.EXACT, WeightsMode.FP16, WeightsMode.INT8G32)
NUM_PAGES = 128
SEED = 1


def own_library(folder: Path, instruction_set: str) -> NativeLibrary:
    """A second copy in the process, since the choice of instructions is a copy's own."""
    copy = folder / "copy.so"
    shutil.copyfile(native_library().path, copy)
    library = open_library(copy)
    library.use(instruction_set)
    return library


def checkpoint_of(kind: str, config: ModelConfig | None = None) -> Checkpoint:
    checkpoint = attrs.evolve(open_random_checkpoint(kind, served_name=kind), seed=SEED)
    return checkpoint if config is None else attrs.evolve(checkpoint, config=config)


def odd_config(kind: str) -> ModelConfig:
    """Sizes that are multiples of nothing: heads of 20, 3 heads a group, panels that are not full."""
    return attrs.evolve(
        RANDOM_MODELS[kind],
        hidden_size=72,
        intermediate_size=100,
        num_heads=6,
        num_kv_heads=2,
        head_dim=20,
        vocab_size=259,
        rope_scaling=None,
    )


def native_model(
    checkpoint: Checkpoint,
    mode: WeightsMode = WeightsMode.EXACT,
    *,
    page_tokens: int = 8,
    threads: int = 1,
    kv_dtype: torch.dtype = torch.float32,
    library: NativeLibrary | None = None,
) -> NativeModelBound:
    library = library or native_library()
    weights = load_native(library, checkpoint, mode, NoProgress())
    return bind_native(
        library, weights, num_pages=NUM_PAGES, page_tokens=page_tokens, threads=threads, kv_dtype=kv_dtype
    )


def native_run(model: NativeModelBound, *, seed: int = 0) -> PagedRun:
    return paged_run(model.step, num_pages=NUM_PAGES, page_tokens=model.step.page_tokens, seed=seed)


def prompt(length: int, *, seed: int, vocab: int = 256) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
