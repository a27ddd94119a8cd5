"""SMG's gRPC servicer over an engine of ours, and a subscriber that rebuilds the cache from its events.

Both run in the test's process, on threads of their own; the wire between them is the real one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from ops_rig import tiny_settings
from smg_rig import MODEL, PATIENCE_S, reserved_ports, until

from tokenspeed.compose.engine import rank_engine
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import FrontendLink, Wakeup
from tokenspeed.settings.choices import KvEventFormat
from tokenspeed.settings.model import Settings
from tokenspeed.settings.observing import KvEventSettings
from tokenspeed.wire.zmq_engine import dial_frontend

BLOCK = 16
CONTEXT = 128


@attrs.define(eq=False)
class Mirror:
    """What a router knows of the cache; written by the subscriber's thread, read under `lock`.

    Attributes:
        blocks: parent and tokens of each block, by hash.
        faults: what no correct stream of events would say.
    """

    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = attrs.field(factory=dict)
    cleared: int = 0
    faults: list[str] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def take(self, batch: Any) -> None:
        with self.lock:
            for event in batch.events:
                match event.WhichOneof("data"):
                    case "stored":
                        self._store(event.stored)
                    case "removed":
                        for name in event.removed.block_hashes:
                            if self.blocks.pop(name, None) is None:
                                self.faults.append(f"{name} was removed and is not known")
                    case _:
                        self.blocks.clear()
                        self.cleared += 1

    def _store(self, stored: Any) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        for block in stored.blocks:
            if parent is not None and parent not in self.blocks:
                self.faults.append(f"{block.block_hash} was stored under {parent}, which is not known")
            if block.block_size != len(block.token_ids):
                self.faults.append(f"{block.block_hash} has {len(block.token_ids)} tokens")
            self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
            parent = block.block_hash

    def cached(self, prompt: list[int]) -> int:
        """Tokens of the prompt's beginning that the engine must have."""
        with self.lock:
            known = {place: name for name, place in self.blocks.items()}
        parent, found = None, 0
        while (name := known.get((parent, tuple(prompt[found : found + BLOCK])))) is not None:
            parent, found = name, found + BLOCK
        return found


@attrs.frozen(kw_only=True, eq=False)
class Servicer:
    """A ready servicer at `address`. `stub` speaks ``tokenspeed.grpc.scheduler.TokenSpeedScheduler``."""

    address: str
    stub: Any

    def generate(self, rid: str, ids: list[int], *, max_new: int = 2) -> Any:
        """The `GenerateComplete` of a greedy request."""
        from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as words

        request = words.GenerateRequest(
            request_id=rid,
            tokenized=words.TokenizedInput(input_ids=ids),
            sampling_params=words.SamplingParams(temperature=0.0, max_new_tokens=max_new, ignore_eos=True, n=1),
        )
        (last,) = [one.complete for one in self.stub.Generate(request, timeout=30.0) if one.HasField("complete")]
        return last

    def flush(self) -> None:
        from smg_grpc_proto.generated import common_pb2 as words

        answer = self.stub.FlushCache(words.FlushCacheRequest(timeout_s=5.0), timeout=30.0)
        assert answer.success, answer.message

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[Mirror]:
        """A mirror that follows the events meanwhile; it must have seen no fault."""
        import grpc
        from smg_grpc_proto.generated import common_pb2 as words

        mirror, call = Mirror(), self.stub.SubscribeKvEvents(words.SubscribeKvEventsRequest())

        def follow() -> None:
            with contextlib.suppress(grpc.RpcError):  # cancelled
                for batch in call:
                    mirror.take(batch)

        following = threading.Thread(target=follow, name="test-subscriber")
        following.start()
        try:
            yield mirror
            assert mirror.faults == []
        finally:
            call.cancel()
            following.join(10.0)


@contextlib.contextmanager
def servicer(scratch: Path, event_format: KvEventFormat, *, pool_tokens: int) -> Iterator[Servicer]:
    """A servicer whose relay has subscribed to the engine's events."""
    import grpc
    from smg.servicer import TokenSpeedGrpcServer
    from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as services

    with reserved_ports(3) as ports:
        handshake, events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        server = TokenSpeedGrpcServer(
            "127.0.0.1:0",
            f"ipc://{scratch}/wire",
            handshake,
            MODEL,
            max_context_length=CONTEXT,
            vocab_size=264,
            max_running_requests=4,
            kv_events_endpoint=events,
            kv_events_replay_endpoint=replay,
        )
        chosen = KvEventSettings(endpoint=events, replay_endpoint=replay, format=event_format)
        try:
            with dialled(handshake, tiny_settings(pool_tokens=pool_tokens, kv_events=chosen)):

                def ready() -> bool:
                    assert not server.last_error, server.last_error
                    return bool(server.engine_ready and server.kv_relay_subscribed)

                until(ready, "the servicer's engine and its events")
                server.set_serving(True)
                with grpc.insecure_channel(server.address) as channel:
                    yield Servicer(address=server.address, stub=services.TokenSpeedSchedulerStub(channel))
        finally:
            server.stop(1.0)


@contextlib.contextmanager
def dialled(handshake: str, settings: Settings) -> Iterator[None]:
    """A rank on a thread that serves whoever binds `handshake`."""

    def connect(info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
        return dial_frontend(handshake, info, wakeup=wakeup, timeout_s=PATIENCE_S)

    with rank_engine(settings, connect=connect) as engine:
        serving = threading.Thread(target=engine.run, name="ts-control")
        serving.start()
        try:
            yield
        finally:
            engine.stop()
            serving.join(PATIENCE_S)
            assert not serving.is_alive(), "the engine did not end"
