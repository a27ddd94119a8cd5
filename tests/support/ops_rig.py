"""A real rank on a small random model, its rounds run by the test's own thread, and folders of other weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
from safetensors.torch import save, save_file

from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.compose.engine import RankEngine, rank_engine
from tokenspeed.control.wakeup import ThreadWakeup
from tokenspeed.device.weights.random_source import RandomSource
from tokenspeed.device.weights.shapes import tensor_shapes
from tokenspeed.plane.messages import ControlReply, FrontendMessage, GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.settings.model import CacheSettings, DeviceSettings, ModelSettings, SchedulerSettings, Settings
from tokenspeed.testing import RecordingLink

MODEL = "tiny-llama"
TIMEOUT_S = 20.0


def tiny_settings(*, overlap: bool = True, pool_tokens: int = 512, **changes: object) -> Settings:
    settings = Settings(
        model=ModelSettings(source=f"random:{MODEL}", max_len_tokens=128),
        device=DeviceSettings(threads=1, kv_pool_tokens=pool_tokens),
        scheduler=SchedulerSettings(
            overlap=overlap, max_num_seqs=4, max_batched_tokens=64, chunk_tokens=32, max_waiting=16
        ),
        cache=CacheSettings(page_tokens=16),
    )
    return attrs.evolve(settings, **changes)


def random_tensors(seed: int | None = None, model: str = MODEL) -> dict[str, torch.Tensor]:
    """The tensors of the random model; another seed gives another model of the same shape."""
    checkpoint = open_random_checkpoint(model, served_name=model)
    source = RandomSource(checkpoint.seed if seed is None else seed, checkpoint.config)
    return {name: source.read(name) for name in tensor_shapes(checkpoint.config)}


def weights_folder(folder: Path, tensors: dict[str, torch.Tensor], model: str = MODEL) -> str:
    """`tensors` as a trainer saves them: safetensors and a config.json."""
    config = RANDOM_MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "architectures": list(config.architectures),
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(told))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def blob(tensors: dict[str, torch.Tensor]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def greedy(rid: str, ids: list[int], max_new: int = 8, **changes: object) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=frozen_tokens(ids), sampling=sampling, **changes)  # type: ignore[arg-type]


@attrs.define(eq=False)
class HandRank:
    """A rank and the test's end of its wire."""

    engine: RankEngine
    link: RecordingLink
    wakeup: ThreadWakeup
    calls: int = 0

    def round(self) -> bool:
        return self.engine.loop.round()

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def settle(self) -> None:
        """Rounds until one makes no progress and nothing is on its way."""
        until = time.monotonic() + TIMEOUT_S
        while self.round() or self.wakeup.wait(0.02):
            assert time.monotonic() < until, "the rank does not come to rest"

    def put(self, *messages: FrontendMessage) -> None:
        self.link.put(*messages)

    def call(self, make: type, **fields: object) -> ControlReply:
        """Carry out one operation, with as many rounds as it takes."""
        call_id = self.start(make, **fields)
        return self.answer(call_id)

    def start(self, make: type, **fields: object) -> int:
        self.calls += 1
        self.put(make(call_id=self.calls, **fields))
        return self.calls

    def answer(self, call_id: int) -> ControlReply:
        until = time.monotonic() + TIMEOUT_S
        while (reply := self.replied(call_id)) is None:
            assert time.monotonic() < until, "no answer"
            if not self.round():
                self.wakeup.wait(0.02)
        return reply

    def replied(self, call_id: int) -> ControlReply | None:
        return next((reply for reply in self.link.replies if reply.call_id == call_id), None)

    def run(self, *requests: GenerateRequest) -> list[list[int]]:
        """Tokens of these requests, run to their ends."""
        self.put(*requests)
        until = time.monotonic() + TIMEOUT_S
        while any(self.link.finish(request.rid) is None for request in requests):
            assert time.monotonic() < until, "requests do not end"
            if not self.round():
                self.wakeup.wait(0.02)
        self.settle()
        return [self.link.tokens(request.rid) for request in requests]

    def cached(self, rid: str) -> int:
        return max(
            cached
            for batch in self.link.sent
            for name, cached in zip(batch.rids, batch.cached_tokens, strict=True)
            if name == rid
        )

    def versions(self, rid: str) -> set[str]:
        """The weights' versions under which `rid` got tokens; a version is told when it changes."""
        version, found = "", set[str]()
        for batch in self.link.sent:
            version = batch.weight_version or version
            if any(name == rid and ids for name, ids in zip(batch.rids, batch.output_ids, strict=True)):
                found.add(version)
        return found


@contextmanager
def hand_rank(settings: Settings | None = None, **parts: object) -> Iterator[HandRank]:
    link, wakeup = RecordingLink(), ThreadWakeup()
    with rank_engine(
        settings or tiny_settings(), connect=lambda _info, _wakeup: link, wakeup=wakeup, **parts
    ) as engine:
        engine.serving.sync_debug.arm()  # as in a rank's own process: what waits in a round is found
        yield HandRank(engine=engine, link=link, wakeup=wakeup)


def oracle(source: str, prompts: list[list[int]], max_new: int = 8) -> list[list[int]]:
    """Greedy tokens of a fresh rank on `source`, each prompt alone, nothing cached, no overlap."""
    settings = tiny_settings(overlap=False)
    settings = attrs.evolve(
        settings,
        model=attrs.evolve(settings.model, source=source),
        cache=attrs.evolve(settings.cache, prefix=False),
    )
    with hand_rank(settings) as rank:
        return [rank.run(greedy(f"o{at}", ids, max_new))[0] for at, ids in enumerate(prompts)]
