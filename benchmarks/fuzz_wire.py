"""Torment a whole engine and the wire's codec with hostile messages for as long as one likes.

    python benchmarks/fuzz_wire.py --minutes 120 [--seed 1]
    python benchmarks/fuzz_wire.py --minutes 10 --atheris      # coverage-guided, the codec alone

Stops at the first message after which the engine does not serve, holds a block, or has logged a fault of
ours, and prints the seeds of that round. ``--atheris`` needs that package, which is not among our extras,
and neither torch nor a model.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

KINDS = (b"\x00", b"\x01", b"\x02", b"\x03")
"""Of messages to an engine."""


def whole_engine(minutes: float, seed: int, per_round: int) -> int:
    from fuzz_rig import fuzzed_engine

    random, until_s = Random(seed), time.monotonic() + minutes * 60
    rounds = 0
    with fuzzed_engine() as engine:
        while time.monotonic() < until_s:
            seeds = [random.randrange(1 << 48) for _ in range(random.randrange(1, per_round))]
            try:
                engine.torment(seeds)
            except BaseException:
                traceback.print_exc()
                print(f"after {rounds} good rounds; the messages of this one: {seeds}")
                return 1
            rounds += 1
            if rounds % 100 == 0:
                print(f"{rounds} rounds, nothing found", flush=True)
    print(f"{rounds} rounds of up to {per_round} messages in {minutes:g} minutes: nothing found")
    return 0


def codec_by_coverage(minutes: float) -> int:
    """The first byte of an input says whose message the rest is; msgpack inputs are changed as values, too."""
    import atheris

    with atheris.instrument_imports(include=["tokenspeed.wire"]):
        from tokenspeed.plane.messages import EngineInfo, OutputBatch
        from tokenspeed.wire.codec import EngineCodec, FrontendCodec
        from tokenspeed.wire.faults import WireError
        from tokenspeed.wire.handshake import (
            DataAddresses,
            decode_greeting,
            decode_init,
            decode_registration,
            encode_greeting,
            encode_init,
            encode_registration,
        )
        from tokenspeed.wire.layouts import LAYOUTS

    from hostile_messages import hostile_output, mutated, valid
    from raw_frontend import pack, unpack

    engine, frontend = EngineCodec(), FrontendCodec(layouts=LAYOUTS)
    others = (frontend.decode, decode_greeting, decode_init, decode_registration)

    def one(data: bytes) -> None:
        kind, payload = data[:1], data[1:]
        with contextlib.suppress(WireError):
            if kind in KINDS:
                arrival = engine.decode([kind, payload])
                assert arrival.message is not None or arrival.answer is not None
                if arrival.answer is not None:
                    engine.encode(arrival.answer)
            elif kind:
                event = others[kind[0] % len(others)](payload)
                if isinstance(event, OutputBatch):
                    lengths = {len(column) for column in event if isinstance(column, list)}
                    assert lengths <= {len(event.rids)}, lengths

    def changed(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        try:
            value = unpack(data[1:])
            fresh = data[:1] + pack(mutated(random, value))
        except (ValueError, TypeError, RecursionError):
            return bytes(atheris.Mutate(data, most))
        return fresh if len(fresh) <= most else bytes(atheris.Mutate(data, most))

    info = EngineInfo(
        model="m", dtype="float32", vocab_size=9, max_model_len=9, num_blocks=9, block_size=1, max_num_seqs=1,
        max_batched_tokens=9, max_waiting=1, max_logprobs=1, eos_token_ids=(1,), architectures=("A",), model_type="t",
        instance_id="i", kv_capacity_tokens=9,
    )  # fmt: skip
    seeds = [b"\x05" + encode_greeting("HELLO", info), b"\x06" + encode_init(DataAddresses(input="i", output="o"))]
    seeds += [b"\x07" + encode_registration(info, LAYOUTS), *(b"\x04" + hostile_output(at) for at in range(60))]
    for at in range(200):
        kind, value = valid(Random(at))
        seeds.append(bytes([kind]) + pack(value))
    with tempfile.TemporaryDirectory() as corpus:
        for at, seed in enumerate(seeds):
            (Path(corpus) / str(at)).write_bytes(seed)
        limits = [f"-max_total_time={int(minutes * 60)}", "-max_len=8192", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, corpus], one, custom_mutator=changed)
        atheris.Fuzz()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-round", type=int, default=40, help="messages before the engine is looked at, at most")
    parser.add_argument("--atheris", action="store_true", help="coverage-guided, the codec alone")
    options = parser.parse_args()
    if options.atheris:
        return codec_by_coverage(options.minutes)
    return whole_engine(options.minutes, options.seed, options.per_round)


if __name__ == "__main__":
    sys.exit(main())
