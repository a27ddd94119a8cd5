"""The dispatch guard of the control thread."""

from __future__ import annotations

import threading

import pytest
import torch
from rig import request

from tokenspeed.compose.engine import rank_engine
from tokenspeed.device.control_guard import SWITCH, control_plane_guard
from tokenspeed.errors import InvariantBroken
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings
from tokenspeed.testing import RecordingLink

TINY = Settings(model=ModelSettings(source="random:tiny-llama"), device=DeviceSettings(kv_pool_tokens=2048))


@pytest.mark.contract("DP-20", "DP-21")
def test_an_operation_on_the_guarded_device_raises_and_a_view_passes() -> None:
    tensor, event = torch.arange(6.0), threading.Event()
    with control_plane_guard({}, device_type="cpu"):
        assert tensor.view(2, 3).shape == (2, 3)
        assert tensor[:2].shape == (2,)
        assert tensor.reshape(3, 2).t().shape == (2, 3)
        assert not event.wait(0)
        for operation in (lambda: tensor.add_(1), lambda: torch.ones(1) + 1, tensor.sum, tensor.clone):
            with pytest.raises(InvariantBroken, match="control thread"):
                operation()
    assert tensor.sum() == 15


@pytest.mark.contract("DP-20")
def test_the_guard_holds_its_own_thread_only_and_its_own_device_only() -> None:
    found: list[float] = []
    with control_plane_guard({}, device_type="cpu"):
        thread = threading.Thread(target=lambda: found.append(float((torch.ones(1) + 1).sum())), daemon=True)
        thread.start()
        thread.join(10)
    with control_plane_guard({}, device_type="cuda"):
        found.append(float((torch.ones(1) + 2).sum()))
    assert found == [2.0, 3.0]


@pytest.mark.contract("DP-22")
@pytest.mark.parametrize(("value", "raises"), [("0", False), ("1", True), ("", True), (None, True)])
def test_only_the_value_0_switches_the_guard_off(value: str | None, raises: bool) -> None:
    environ = {} if value is None else {SWITCH: value}
    with control_plane_guard(environ, device_type="cpu"):
        if raises:
            with pytest.raises(InvariantBroken):
                torch.ones(1)
        else:
            assert torch.ones(1).shape == (1,)


@pytest.mark.contract("DP-19")
def test_the_guard_surrounds_every_round_of_a_serving_rank_and_nothing_else() -> None:
    link = RecordingLink()
    tripped: list[str] = []

    class Touching:
        """A policy that computes with a tensor, as a careless part would."""

        wants_cached_tokens = False

        def key(
            self, *, order: int, priority: int, prompt_len: int, waited_rounds: int, cached_tokens: int
        ) -> tuple[float, ...]:
            try:
                return (float((torch.ones(1) * order).item()),)
            except InvariantBroken as error:
                tripped.append(str(error))
                return (order,)

    with rank_engine(TINY, connect=lambda info, wakeup: link, policy=Touching()) as engine:
        link.put(request("a", 3, max_new=2))
        thread = threading.Thread(target=engine.run, daemon=True)
        thread.start()
        for _ in range(200):
            if link.finish("a"):
                break
            threading.Event().wait(0.05)
        engine.stop()
        thread.join(20)
        assert len(link.tokens("a")) == 2
        assert tripped
        assert torch.ones(1).sum() == 1


def test_serving_a_batch_never_trips_it() -> None:
    link = RecordingLink()
    with rank_engine(TINY, connect=lambda info, wakeup: link) as engine:
        with control_plane_guard({}, device_type="cpu"):
            link.put(*(request(f"r{i}", 5 + 9 * i, max_new=6, return_logprob=True, top_logprobs=2) for i in range(5)))
            for _ in range(60):
                engine.loop.round()
        assert all(len(link.tokens(f"r{i}")) == 6 for i in range(5))
