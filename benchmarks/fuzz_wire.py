"""Torment a whole engine and the wire's codec with hostile messages for as long as one likes.

    python benchmarks/fuzz_wire.py --minutes 120 [--seed 1]
    python benchmarks/fuzz_wire.py --minutes 10 --atheris      # coverage-guided, the codec alone

Stops at the first message after which the engine does not serve, holds a block, or has logged a fault of
ours, and prints the seeds of that round. ``--atheris`` needs that package, which is not among our extras.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]


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
    import atheris

    with atheris.instrument_imports(include=["tokenspeed.wire"]):
        from tokenspeed.wire.codec import EngineCodec, FrontendCodec
        from tokenspeed.wire.faults import WireError
        from tokenspeed.wire.handshake import decode_greeting, decode_init, decode_registration
        from tokenspeed.wire.layouts import LAYOUTS

    engine, frontend = EngineCodec(), FrontendCodec(layouts=LAYOUTS)

    def one(data: bytes) -> None:
        reads = (
            lambda: engine.decode([data[:1], data[1:]]),
            lambda: frontend.decode(data),
            lambda: decode_greeting(data),
            lambda: decode_init(data),
            lambda: decode_registration(data),
        )
        for read in reads:
            with contextlib.suppress(WireError):
                read()

    atheris.Setup([sys.argv[0], f"-max_total_time={int(minutes * 60)}", "-max_len=4096"], one)
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
