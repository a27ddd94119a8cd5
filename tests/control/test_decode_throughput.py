"""Tokens counted for decode throughput are those that requests got, the stop token included."""

from __future__ import annotations

import attrs
import pytest
from rig import hand_rig, request

from tokenspeed.plane.messages import OutputBatch, SamplingParams
from tokenspeed.telemetry.meters import NullMeter


@attrs.frozen(kw_only=True, eq=False)
class Counting(NullMeter):
    seen: list[int] = attrs.field(factory=list)

    def committed(self, *, decode_tokens: int, **_: object) -> None:
        self.seen.append(decode_tokens)


def outputs(rig: object, rid: str) -> list[int]:
    sent = [message for message in rig.link.sent if isinstance(message, OutputBatch)]  # type: ignore[attr-defined]
    return [
        token
        for message in sent
        for at, name in enumerate(message.rids)
        if name == rid
        for token in message.output_ids[at]
    ]


@pytest.mark.contract("OL-8", "KM-7")
@pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])
def test_a_forward_behind_a_requests_stop_counts_nothing(overlap: bool) -> None:
    probe = hand_rig(overlap=overlap)
    probe.put(request("p", 10, max_new=8))
    probe.settle()
    wanted = outputs(probe, "p")
    stop = next(i for i, token in enumerate(wanted) if i >= 3 and token not in wanted[:i])

    meter = Counting()
    rig = hand_rig(overlap=overlap, meter=meter)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(wanted[stop],))
    rig.put(request("a", 10, max_new=8, sampling=sampling), request("b", 20, max_new=8))
    rig.settle()
    got = {rid: outputs(rig, rid) for rid in ("a", "b")}
    assert got["a"] == wanted[: stop + 1]
    assert len(got["b"]) == 8
    # The first token of each comes out of prefill.
    assert sum(meter.seen) == len(got["a"]) - 1 + len(got["b"]) - 1
