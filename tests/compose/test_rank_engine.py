"""The bootstrap: what it keeps of the device build, what runs where, what a failed build leaves behind."""

from __future__ import annotations

import gc
import pickle
import threading

import attrs
import pytest
import torch
from rig import request
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.compose.engine import rank_engine
from tokenspeed.device.build import DeviceBuild
from tokenspeed.device.data_plane import HostDataPlane
from tokenspeed.device.kv.layout import CacheGroup, attention_group
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import FrontendLink, Wakeup
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings
from tokenspeed.settings.observing import KvEventSettings
from tokenspeed.testing import RecordingLink

TINY = Settings(model=ModelSettings(source="random:tiny-llama"), device=DeviceSettings(kv_pool_tokens=2048))


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ts-"))


@pytest.mark.contract("DP-32", "DP-28", "DP-27")
def test_of_the_device_build_only_specs_and_the_data_plane_outlive_the_bootstrap() -> None:
    link = RecordingLink()
    with rank_engine(TINY, connect=lambda info, wakeup: link) as engine:
        assert pickle.loads(pickle.dumps(engine.specs)) == engine.specs
        assert isinstance(engine.loop.plane, HostDataPlane)
        gc.collect()
        assert not any(type(item) is DeviceBuild for item in gc.get_objects())


@pytest.mark.parametrize("port", ["*", "0"])
def test_a_rank_tells_its_frontend_where_cache_events_can_be_heard(port: str) -> None:
    told: list[EngineInfo] = []

    def connect(info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
        told.append(info)
        return RecordingLink()

    address = f"tcp://127.0.0.1:{port}"
    events = KvEventSettings(endpoint=address, replay_endpoint=address, topic="kv", keep_batches=5)
    with rank_engine(attrs.evolve(TINY, kv_events=events), connect=connect):
        feed = told[0].kv_events
        assert feed is not None
        assert (feed.topic, feed.keep_batches) == ("kv", 5)
        for bound in (feed.endpoint, feed.replay_endpoint):
            assert bound is not None
            host, _, picked = bound.rpartition(":")
            assert host == "tcp://127.0.0.1"
            assert int(picked) > 0
        assert feed.endpoint != feed.replay_endpoint


class NoTensors(TorchDispatchMode):
    """Raises on any tensor operation of this thread."""

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError(f"{func} on thread {threading.current_thread().name}")


@pytest.mark.contract("PT-7", "DP-8", "ER-7")
def test_rounds_run_on_a_thread_where_every_tensor_operation_raises() -> None:
    link = RecordingLink()
    with rank_engine(TINY, connect=lambda info, wakeup: link) as engine:
        with NoTensors():
            with pytest.raises(AssertionError):
                torch.ones(1)
            link.put(*(request(f"r{i}", 5 + 7 * i, max_new=8) for i in range(6)))
            for _ in range(60):
                engine.loop.round()
        assert all(len(link.tokens(f"r{i}")) == 8 for i in range(6))


@attrs.frozen(eq=False)
class Unreadable:
    """A model factory whose weights cannot be read."""

    def expected_bytes(self, config: ModelConfig) -> int:
        return 0

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        return attention_group(config, page_tokens)

    def load(self, checkpoint: object, progress: object) -> object:
        raise OSError("planted: the disk is gone")

    def bind(self, weights: object, *, num_pages: int, page_tokens: int) -> object:
        raise AssertionError


def test_a_build_that_fails_leaves_no_thread_behind() -> None:
    before = ours()
    with pytest.raises(OSError, match="planted"), rank_engine(TINY, connect=_never, model=Unreadable()):
        pass
    assert ours() == before


def test_a_frontend_that_cannot_be_reached_closes_the_device_again() -> None:
    def unreachable(info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
        raise ConnectionError("planted: nobody answers")

    before = ours()
    with pytest.raises(ConnectionError, match="planted"), rank_engine(TINY, connect=unreachable):
        pass
    assert ours() == before


def _never(info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
    raise AssertionError("connected before the device was there")
