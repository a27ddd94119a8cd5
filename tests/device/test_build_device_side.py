"""`build_device_side`: five fields, plain specs, parts that can be replaced, nothing left open after a failure."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch
from device_doubles import DECODE, TINY_CONFIG, CountingWakeup, batch, checkpoint, granted, plan, seat

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device import build as build_module
from tokenspeed.device.attention_build import AttentionBuild, CacheStorage, HostCacheFacts
from tokenspeed.device.build import OPENERS, DeviceBuild, build_device_side
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.gc_hooks import GcHooks
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.machine import Machine
from tokenspeed.device.memory import GIB
from tokenspeed.device.parts import DeviceParts
from tokenspeed.device.toy import NEVER_WRITTEN, ToyModel, ToySampler, hash_context
from tokenspeed.errors import InvariantBroken, ModelError, NotSupported, SettingsError
from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.plan import Dispatch
from tokenspeed.plane.ports import DeviceHandle
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs
from tokenspeed.settings.model import Backend, DeviceSettings, ModelSettings, SchedulerSettings, Settings

SETTINGS = Settings(
    device=DeviceSettings(kv_pool_tokens=512, memory_gib=0.25),
    scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=64),
)
MACHINE = Machine(available_bytes=GIB, memory_source="a test", cpus=1, cpu_source="a test")


@attrs.define(eq=False)
class RecordingModel:
    """A `ModelFactory` in front of another; notes the step and its thread."""

    inner: ToyModel = attrs.field(factory=lambda: ToyModel(vocab_size=TINY_CONFIG.vocab_size))
    log: list[tuple[str, str]] = attrs.field(factory=list)
    fail: str = ""
    made: list[object] = attrs.field(factory=list)

    def _note(self, step: str) -> None:
        self.log.append((step, threading.current_thread().name))
        if self.fail == step:
            raise ModelError(f"planted in {step}")

    def expected_bytes(self, config: object) -> int:
        return self.inner.expected_bytes(config)

    def cache_groups(self, config: object, page_tokens: int) -> tuple[CacheGroup, ...]:
        return self.inner.cache_groups(config, page_tokens)

    def load(self, opened: object, progress: object) -> object:
        self._note("load")
        progress.step("weights", 1, 1)
        return self.inner.load(opened, progress)

    def bind(self, weights: object, *, num_pages: int, page_tokens: int) -> object:
        self._note("bind")
        self.made.append(self.inner.bind(weights, num_pages=num_pages, page_tokens=page_tokens))
        return self.made[-1]


@attrs.define(eq=False)
class RecordingProgress:
    steps: list[tuple[str, int, int]] = attrs.field(factory=list)

    def step(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))


def toy_sampler(*, slots: int, vocab_size: int) -> ToySampler:
    return ToySampler()


def parts(model: object = None, **changes: object) -> DeviceParts:
    return DeviceParts(model=model or RecordingModel(), sampler=toy_sampler, machine=MACHINE, **changes)


@contextmanager
def built(settings: Settings = SETTINGS, given: DeviceParts | None = None, **changes: object) -> Iterator[DeviceBuild]:
    made = build_device_side(settings, checkpoint(**changes), given or parts())
    try:
        yield made
    finally:
        made.handle.close()


def stream_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("ts-exec", "ts-write", "ts-load", "ts-forward")]


@pytest.mark.contract("DP-26", "DP-48")
def test_a_build_has_five_fields_and_cannot_be_changed() -> None:
    with built() as made:
        names = [field.name for field in attrs.fields(DeviceBuild)]
        assert names == ["specs", "handle", "transfer", "host_cache", "encoder_model_facts"]
        assert isinstance(made.handle, DeviceHandle)
        assert made.transfer is None
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            made.handle = made.handle


@pytest.mark.contract("DP-26")
def test_nothing_of_a_build_stays_in_the_module() -> None:
    before = {name: id(value) for name, value in vars(build_module).items()}
    with built():
        assert {name: id(value) for name, value in vars(build_module).items()} == before


def plain(value: object) -> bool:
    if value is None or type(value) in (int, float, bool, str, bytes):
        return True
    if isinstance(value, tuple):
        return all(plain(item) for item in value)
    known = isinstance(value, DeviceSpecs | CacheGroupSpec | SamplingParams | HostCacheFacts | CacheStorage)
    frozen = known and attrs.inspect(type(value)).is_frozen
    return frozen and all(plain(getattr(value, field.name)) for field in attrs.fields(type(value)))


@pytest.mark.contract("DP-27", "DP-30")
def test_specs_and_host_facts_are_plain_values_that_pickle() -> None:
    with built() as made:
        for value in (made.specs, made.host_cache):
            assert plain(value)
            assert pickle.loads(pickle.dumps(value)) == value


def test_the_specs_say_what_settings_checkpoint_and_memory_decided() -> None:
    with built(tokenizer_vocab_size=90, eos_token_ids=(7, 9)) as made:
        specs = made.specs
    assert (specs.backend, specs.executor, specs.dtype, specs.model_name) == ("cpu", "streams", "float32", "toy")
    assert (specs.vocab_size, specs.eos_token_ids) == (90, (7, 9))
    assert (specs.num_pages, specs.page_tokens, specs.max_model_len) == (33, 16, 128)
    assert (specs.max_num_seqs, specs.max_batched_tokens, specs.max_logprobs) == (4, 64, 20)
    assert specs.groups == (CacheGroupSpec(block_tokens=16, layers=1, bytes_per_block=128),)
    assert specs.kv_pool_bytes == 33 * 128
    assert specs.sampling_defaults == SamplingParams(temperature=0.5)
    without = attrs.evolve(SETTINGS, model=ModelSettings(generation_defaults=False, served_name="mine"))
    with built(without) as made:
        assert (made.specs.sampling_defaults, made.specs.model_name) == (SamplingParams(), "mine")


@pytest.mark.contract("DP-31")
def test_encoder_facts_of_a_text_model_are_refused() -> None:
    with built() as made, pytest.raises(NotSupported, match="toy reads text only"):
        made.encoder_model_facts()


def test_loading_binding_and_warming_up_happen_on_the_thread_that_computes() -> None:
    model, samplers, progress = RecordingModel(), list[ToySampler](), RecordingProgress()

    def make(*, slots: int, vocab_size: int) -> ToySampler:
        model.log.append((f"sampler of {slots} slots, {vocab_size} ids", threading.current_thread().name))
        samplers.append(ToySampler())
        return samplers[0]

    given = DeviceParts(model=model, sampler=make, machine=MACHINE)
    made = build_device_side(SETTINGS, checkpoint(), given, progress)
    made.handle.close()
    assert model.log == [
        ("load", "ts-exec"),
        ("bind", "ts-exec"),
        ("sampler of 8 slots, 97 ids", "ts-exec"),
    ]
    assert samplers[0].log == [("seat", 0), ("sample", 0), ("sample", 0), ("release", 0)]
    assert progress.steps == [("weights", 1, 1), ("warm-up", 0, 1), ("warm-up", 1, 1)]


@pytest.mark.contract("DP-33")
def test_a_built_handle_serves_at_once_behind_a_data_plane() -> None:
    made = build_device_side(SETTINGS, checkpoint(), parts())
    plane = open_data_plane(made.handle, CountingWakeup())
    prompt = [5, 6, 7]
    work = plan(work=batch((2, 0, prompt)), grants=granted((2, 0, 4)))
    ticket = plane.execute(work, Dispatch(seats=(seat(2),)))
    result = plane.commit(ticket)
    plane.close()
    assert result.tokens == [hash_context(prompt) % TINY_CONFIG.vocab_size]
    assert stream_threads() == []


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-llama3", "tiny-qwen2", "tiny-qwen3"])
def test_the_builds_own_model_and_sampler_give_the_same_tokens_however_the_prompt_is_cut(preset: str) -> None:
    settings = attrs.evolve(SETTINGS, device=DeviceSettings(kv_pool_tokens=512, memory_gib=0.5))
    made = build_device_side(settings, open_random_checkpoint(preset, served_name=preset), DeviceParts(machine=MACHINE))
    plane = open_data_plane(made.handle, CountingWakeup(), check=Strict())
    assert made.specs.weights_bytes > 0
    assert made.specs.vocab_size == 264
    prompt = [(17 * i) % 250 for i in range(40)]

    def generate(slot: int, chunks: list[int], first_block: int) -> list[int]:
        seats, grants, begin = (seat(slot),), granted(*((slot, i, first_block + i) for i in range(4))), 0
        tickets = []
        for count in chunks:
            end = begin + count
            work = batch((slot, begin, prompt[begin:end]), samples=[end == len(prompt)])
            tickets.append(plane.execute(plan(work=work, grants=grants), Dispatch(seats=seats)))
            seats, grants, begin = (), (), end
        tickets += [plane.execute(plan(work=batch((slot, len(prompt) + i, DECODE))), Dispatch()) for i in range(9)]
        return [token for ticket in tickets for token in plane.commit(ticket).tokens]

    whole = generate(0, [40], 1)
    assert len(whole) == 10
    assert generate(1, [16, 16, 8], 10) == whole
    assert generate(2, [1, 30, 9], 20) == whole
    plane.close()


@pytest.mark.contract("DP-36", "DP-38")
def test_the_record_of_attention_is_frozen_and_does_not_leave_the_build() -> None:
    names = {field.name for field in attrs.fields(AttentionBuild)}
    assert names == {"backend", "step", "pool", "storage", "placement"}
    assert attrs.inspect(AttentionBuild).is_frozen
    with built() as made:
        gc.collect()
        assert [item for item in gc.get_objects() if type(item) is AttentionBuild] == []
        assert made.host_cache == HostCacheFacts(
            storage=CacheStorage(num_pages=33, page_tokens=16, page_bytes=128),
            groups=("full",),
            layers=1,
            attention="paged",
            numerics=made.host_cache.numerics,
        )
        assert "torch" in made.host_cache.numerics


@pytest.mark.parametrize("fail", ["load", "bind"])
def test_a_failed_step_surfaces_and_closes_what_was_opened(fail: str) -> None:
    with pytest.raises(ModelError, match=f"planted in {fail}"):
        build_device_side(SETTINGS, checkpoint(), parts(RecordingModel(fail=fail)))
    assert stream_threads() == []


def test_a_sampler_that_cannot_be_made_closes_what_was_opened() -> None:
    def refuse(*, slots: int, vocab_size: int) -> ToySampler:
        raise InvariantBroken("planted")

    with pytest.raises(InvariantBroken, match="planted"):
        build_device_side(SETTINGS, checkpoint(), DeviceParts(model=RecordingModel(), sampler=refuse, machine=MACHINE))
    assert stream_threads() == []


def test_weights_that_compute_no_numbers_are_found_before_serving() -> None:
    broken = RecordingModel(inner=ToyModel(vocab_size=97, nan_after=frozenset({0})))
    with pytest.raises(ModelError, match="toy: the model's output is not a number"):
        build_device_side(SETTINGS, checkpoint(), parts(broken))
    assert stream_threads() == []


def test_memory_that_does_not_suffice_is_refused_and_closes_what_was_opened() -> None:
    small = attrs.evolve(SETTINGS, device=DeviceSettings(kv_pool_tokens=100_000_000, memory_gib=0.25))
    with pytest.raises(SettingsError, match=r"device.memory_gib: a pool of 100,000,000 tokens needs"):
        build_device_side(small, checkpoint(), parts())
    assert stream_threads() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is missed here")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    asked = attrs.evolve(SETTINGS, device=DeviceSettings(backend=Backend.CUDA))
    with pytest.raises(NotSupported, match=r"device.backend: cuda (needs a torch built with CUDA|finds no usable)"):
        build_device_side(asked, checkpoint(), parts())
    assert set(OPENERS) == {Backend.CPU, Backend.CUDA}
    assert stream_threads() == []


def test_pool_and_longest_request_are_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), built():
        pass
    assert "KV pool: 32 pages x 16 tokens = 0.0 MiB; longest request 128 tokens" in caplog.messages
    assert "compute: 1 threads (a test)" in caplog.messages


def test_the_warm_up_leaves_slots_and_pages_as_they_were() -> None:
    model = RecordingModel()
    with built(given=parts(model)) as made:
        pages = model.made[0].pool.pages
        # The last job of the warm-up may still be queued; a plan behind it has landed when it is done.
        made.handle.execute(
            plan(work=batch((1, 0, [5])), grants=granted((1, 0, 9))), Dispatch(seats=(seat(1),)), ()
        ).result()
        assert pages[9, 0] == 5
        assert (pages != NEVER_WRITTEN).any(1).nonzero().tolist() == [[9]]


def test_a_rank_process_has_its_forwarded_rounds_counted() -> None:
    hooks = GcHooks()
    with built(given=parts(rounds=hooks)) as made:
        made.handle.note_forwarded()
    assert hooks.rounds.count == 1
