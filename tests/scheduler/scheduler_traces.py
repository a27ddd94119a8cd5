"""Random traces from a seed, for long soaks and for comparing schedulers across processes."""

from __future__ import annotations

import hashlib
import random

import attrs
from scheduler_rig import Rig, build, config, described
from toy_groups import some_groups

from tokenspeed.plane.results import Rejected
from tokenspeed.scheduler.config import Retraction, SchedulerConfig
from tokenspeed.scheduler.policy import AgedPriority, Fcfs

STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5], [1] * 20)


@attrs.define(eq=False)
class Seen:
    """Counters that show a trace was not vacuous."""

    rounds: int = 0
    preempted: int = 0
    finished: int = 0
    cut: int = 0
    stored: int = 0


def random_config(rng: random.Random) -> SchedulerConfig:
    chosen = _random_config(rng)
    name = rng.choice(("full", *some_groups(chosen.page_tokens)))
    groups = some_groups(chosen.page_tokens)[name]
    # Several groups need more parents for one request than one group does.
    return attrs.evolve(chosen, groups=groups, num_pages=chosen.num_pages + 4 * (len(groups) - 1))


def _random_config(rng: random.Random) -> SchedulerConfig:
    return config(
        max_num_seqs=rng.randint(2, 6),
        max_batched_tokens=rng.randint(3, 20),
        chunk_tokens=rng.randint(1, 9),
        page_tokens=rng.randint(2, 5),
        num_pages=rng.randint(8, 20),
        max_model_len=40,
        overlap_schedule_depth=rng.randint(0, 1),
        prefix=rng.random() < 0.8,
        retraction=(Retraction.ABORT,) if rng.random() < 0.2 else (Retraction.RECOMPUTE, Retraction.ABORT),
        zero_new_blocks=rng.random() < 0.3,
        resume_headroom_tokens=rng.randint(0, 6),
    )


def submit_some(rigs: tuple[Rig, ...], rng: random.Random) -> None:
    stem, copies = rng.choice(STEMS), rng.randint(1, 3)
    tokens = stem[: rng.randint(0, 20)] + [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]
    more = {
        "max_new": rng.randint(1, 18),
        "eos_ends": rng.random() < 0.3,
        "salt": rng.choice((b"", b"", b"s")),
        "priority": rng.randint(-2, 2),
        "prompt_from": rng.choice((-1, -1, -1, 0, 4)),
    }
    for rig in rigs:
        batch = [rig.add(tokens, **more) for _ in range(copies)]
        if isinstance(rig.submit(*batch), Rejected):
            for request in batch:
                rig.table.free(request.row)
                del rig.by_row[request.row]
                rig.requests.remove(request)


def step(rigs: tuple[Rig, ...], rng: random.Random, trace: hashlib._Hash) -> None:
    """One random action, on all rigs alike."""
    draw = rng.random()
    if draw < 0.22 and rigs[0].scheduler.sizes().held < 12:
        submit_some(rigs, rng)
    elif draw < 0.25:
        which = rng.random()
        for rig in rigs:
            live = [request for request in rig.requests if not request.retired]
            if live:
                rig.abort(live[int(which * len(live))])
    elif draw < 0.27:
        forward = rng.random() < 0.7
        for rig in rigs:
            rig.permit(forward=forward)
    elif draw < 0.29:
        for rig in rigs:
            rig.scheduler.clear_cache()
            rig.land(down_to=len(rig.queue))
    elif draw < 0.33 and rigs[0].depth and len(rigs[0].queue) < 2:
        _compare([described(rig.plan()) for rig in rigs], trace)
    else:
        _compare([described(rig.round()) for rig in rigs], trace)


def _compare(plans: list[object], trace: hashlib._Hash) -> None:
    assert all(plan == plans[0] for plan in plans)
    trace.update(repr(plans[0]).encode())


def soak(seed: int, *, steps: int, mirrors: int = 1) -> tuple[str, Seen]:
    """Run one trace to its idle end; returns a digest of all plans, and what happened."""
    rng = random.Random(seed)
    chosen = random_config(rng)
    policy = AgedPriority(rounds_per_level=2, patience_rounds=30) if rng.random() < 0.5 else Fcfs()
    rigs = tuple(build(chosen, policy=policy) for _ in range(mirrors))
    for rig in rigs[1:]:
        rig.audited = False
    trace = hashlib.sha256()
    for _ in range(steps):
        step(rigs, rng, trace)
        rigs[0].check_tokens()
    for rig in rigs:
        rig.permit(forward=True)
        rig.run(rounds=4000)
        rig.check_tokens()
        rig.check_idle()
    return trace.hexdigest(), seen(rigs[0])


def seen(rig: Rig) -> Seen:
    result = Seen(rounds=rig.rounds, stored=len(rig.events))
    for request in rig.requests:
        result.preempted += request.preempted
        result.finished += len(request.out) == request.max_new
        result.cut += request.finish.name == "ABORT"
        assert request.decodes <= request.max_new - 1
    return result
