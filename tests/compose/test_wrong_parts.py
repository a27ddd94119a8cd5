"""Parts that do not fit: where an engine is put together, and what it says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import pytest
import torch

from tokenspeed import Engine, SamplingOptions
from tokenspeed.compose.control import ControlContainer
from tokenspeed.compose.parts import misfit
from tokenspeed.control.pd import NoPeer
from tokenspeed.device.sampling.base import SampledTokens
from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.plan import Seat
from tokenspeed.plane.scheduling import SchedulingPolicy
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.scheduler.policy import Fcfs
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings
from tokenspeed.testing import RecordingLink, ScriptedPlane

TINY = Settings(model=ModelSettings(source="random:tiny-llama"), device=DeviceSettings(kv_pool_tokens=2048))
SPECS = DeviceSpecs(
    backend="none",
    model_name="scripted",
    dtype="float32",
    vocab_size=1000,
    max_model_len=64,
    num_pages=17,
    page_tokens=16,
    max_num_seqs=4,
    max_batched_tokens=64,
)


class NoCommit(ScriptedPlane):
    commit = None  # type: ignore[assignment]


class StrangeRole(NoPeer):
    role = "strange"  # type: ignore[assignment]


class OnlyRole:
    role = "plain"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"polciy": Fcfs()}, "no part is called 'polciy'; did you mean policy?"),
        ({"policy": Fcfs}, "part 'policy' does not fit SchedulingPolicy: key"),
        ({"plane": NoCommit()}, "part 'plane' does not fit DataPlane: NoCommit has no commit"),
        ({"frontend": object()}, "part 'frontend' does not fit FrontendLink: object has no receive"),
        ({"pd": StrangeRole()}, "part 'pd': 'strange' is not allowed as role; expected one of plain, prefill, decode"),
        ({"pd": OnlyRole()}, "part 'pd' does not fit Pd: OnlyRole has no started"),
    ],
)
def test_a_control_plane_is_not_put_together_from_what_does_not_fit(parts: dict[str, object], text: str) -> None:
    whole: dict[str, object] = {
        "settings": Settings(),
        "specs": SPECS,
        "plane": ScriptedPlane(),
        "frontend": RecordingLink(),
        "pd": NoPeer(),
    }
    assert ControlContainer(**whole).loop().pd is whole["pd"]
    with pytest.raises(SettingsError) as caught:
        ControlContainer(**{**whole, **parts}).loop()
    assert str(caught.value).startswith(text)


def test_a_method_where_a_value_belongs_is_no_fit() -> None:
    class AsMethod(Fcfs):
        def wants_cached_tokens(self) -> bool:  # type: ignore[override]
            return False

    assert misfit(AsMethod(), SchedulingPolicy) == "wants_cached_tokens is a method, not a value"


@attrs.frozen(kw_only=True, eq=False)
class Draws:
    """A sampler that returns what `made` makes of the likeliest tokens and of the rows with a NaN."""

    made: Callable[[torch.Tensor, torch.Tensor], object]
    slots: int
    vocab_size: int

    def seat(self, seat: Seat) -> None:
        return None

    def release(self, slot: int) -> None:
        return None

    def sample(self, logits: torch.Tensor, *, slots: object, positions: object, masks: object = None) -> object:
        return self.made(logits[:, : self.vocab_size].argmax(-1), logits.isnan().any(-1))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            lambda tokens, nan: SampledTokens(tokens=tokens[:-1], nan=nan),
            "wanted='torch.int64 [1]', got='torch.int64 [0]'",
        ),
        (lambda tokens, nan: SampledTokens(tokens=tokens[:, None], nan=nan), "got='torch.int64 [1, 1]'"),
        (lambda tokens, nan: SampledTokens(tokens=tokens.float(), nan=nan), "got='torch.float32 [1]'"),
        (lambda tokens, nan: SampledTokens(tokens=tokens, nan=nan.float()), "field='nan'"),
        (lambda tokens, nan: (tokens, nan), "got='tuple'"),
    ],
)
def test_a_sampler_of_wrong_shapes_is_named_with_what_was_wanted(made: Callable[..., object], text: str) -> None:
    with pytest.raises(InvariantBroken) as caught:
        Engine(TINY, sampler=functools.partial(Draws, made=made))
    assert str(caught.value).startswith("Draws.sample returned no SampledTokens of 1 rows")
    assert text in str(caught.value)


def test_a_sampler_of_right_shapes_serves() -> None:
    def likeliest(tokens: torch.Tensor, nan: torch.Tensor) -> SampledTokens:
        return SampledTokens(tokens=tokens, nan=nan)

    greedy = SamplingOptions(max_tokens=4, temperature=0.0)
    with Engine(TINY, sampler=functools.partial(Draws, made=likeliest)) as engine:
        (mine,) = engine.generate("hello", greedy)
    with Engine(TINY) as engine:
        (own,) = engine.generate("hello", greedy)
    assert mine.token_ids == own.token_ids


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"sampler": 3}, "part 'sampler' does not fit SamplerFactory: int has no __call__"),
        ({"sampler": lambda slots: None}, "part 'sampler' does not fit SamplerFactory: __call__(slots, vocab_size)"),
        ({"sampler": lambda *, slots, vocab_size: None}, "part 'sampler' makes what does not fit Sampler: NoneType"),
        ({"model": lambda: None}, "part 'model' does not fit ModelFactory: function has no expected_bytes"),
    ],
)
def test_a_part_of_the_device_that_does_not_fit_is_refused_by_name(parts: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Engine(TINY, **parts)  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)
