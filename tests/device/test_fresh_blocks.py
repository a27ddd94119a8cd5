"""What a block held before belongs to nobody: a forward that reads it before it is written goes wrong visibly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch
from device_doubles import batch, cpu_backend, granted, seat
from toy_rig import EXECUTORS, MAX_LEN, PAGE_TOKENS, PAGES, SLOTS, VOCAB, toy_logprobs

from tokenspeed.device.capture import ENV_SWITCH
from tokenspeed.device.fresh_blocks import FreshBlocksPoisoned, fresh_blocks
from tokenspeed.device.handle import Executor
from tokenspeed.device.kv.layout import STATE, WINDOW
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.step import AllReady, ForwardStep, LayersReady, RaggedRows
from tokenspeed.device.toy import ToyBound, ToyModel, ToySampler, hash_context
from tokenspeed.plane.plan import Dispatch, ForwardBatch, Seat
from tokenspeed.plane.specs import CacheGroupSpec

GROUPS = (CacheGroupSpec(block_tokens=PAGE_TOKENS),)
POISONED = -1


@attrs.define(kw_only=True, eq=False)
class WritesTheFirstTokenOnly:
    """The planted fault, once `broken`: of a chunk's tokens only the first reaches the pool."""

    inner: ForwardStep
    broken: bool = False
    num_layers: int = 1

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.broken:
            return self.inner.run(rows, layers=layers, ready=ready)
        first = attrs.evolve(
            rows,
            token_ids=rows.token_ids[:1],
            positions=rows.positions[:1],
            offsets=torch.tensor([0, 1]),
            logit_tokens=torch.tensor([0]),
        )
        return self.inner.run(first, layers=layers, ready=ready)


@attrs.frozen(kw_only=True, eq=False)
class Rig:
    bound: ToyBound
    model: WritesTheFirstTokenOnly
    executor: Executor

    def forward(self, work: ForwardBatch, *, seats: tuple[Seat, ...] = (), blocks: tuple[int, ...] = ()) -> list[int]:
        grants = granted(*((seats[0].slot, index, block) for index, block in enumerate(blocks))) if blocks else ()
        return self.executor.forward(work, grants, Dispatch(seats=seats), AllReady()).result().tokens


@contextmanager
def rig(executor: str = "streams", environ: dict[str, str] | None = None) -> Iterator[Rig]:
    with cpu_backend() as backend:
        bound = ToyModel(vocab_size=VOCAB).bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
        model = WritesTheFirstTokenOnly(inner=bound.step)
        step = fresh_blocks(model, bound.pool, GROUPS, {ENV_SWITCH: "1"} if environ is None else environ)

        def make() -> Executor:
            return EXECUTORS[executor](
                backend=backend,
                step=step,
                pool=bound.pool,
                sampler=ToySampler(),
                logprobs=toy_logprobs,
                request_slots=SLOTS,
                max_model_len=MAX_LEN,
                num_pages=PAGES,
                groups=GROUPS,
            )

        made = on_stream(backend.exec_stream, make, "make")
        yield Rig(bound=bound, model=model, executor=made)
        backend.close()
        made.close()


OLD = list(range(20, 20 + PAGE_TOKENS + 3))
NEW = [5, 6, 7]


def freed_and_granted_anew(made: Rig, *, broken: bool = False) -> list[int]:
    """Blocks 1 and 2 hold the tokens of one request, then block 1 is another's."""
    made.forward(batch((0, 0, OLD)), seats=(seat(0, prompt_len=len(OLD)),), blocks=(1, 2))
    made.executor.release((0,), (0,))
    made.model.broken = broken
    return made.forward(batch((1, 0, NEW)), seats=(seat(1, prompt_len=len(NEW)),), blocks=(1,))


@pytest.mark.contract("DP-51")
@pytest.mark.parametrize("executor", ["streams", "futures"])
def test_a_block_that_is_begun_anew_holds_nothing_of_its_last_request(executor: str) -> None:
    with rig(executor) as made:
        assert freed_and_granted_anew(made) == [hash_context(NEW) % VOCAB]
        pages = made.bound.pool.pages
        assert pages[1].tolist() == NEW + [POISONED] * (PAGE_TOKENS - len(NEW))
        assert pages[2].tolist()[:3] == OLD[PAGE_TOKENS:]  # nobody has begun that one


@pytest.mark.contract("DP-51")
def test_a_block_that_holds_something_of_its_request_keeps_it() -> None:
    with rig() as made:
        tokens = made.forward(batch((0, 0, NEW)), seats=(seat(0, prompt_len=len(NEW)),), blocks=(1,))
        made.forward(batch((0, len(NEW), tokens)))
        assert made.bound.pool.pages[1].tolist()[:4] == NEW + tokens


@pytest.mark.contract("DP-51")
@pytest.mark.parametrize(
    ("environ", "found"), [({}, OLD[1:3]), ({ENV_SWITCH: "1"}, [POISONED] * 2)], ids=["unchecked", "checked"]
)
def test_planted_fault_tokens_that_were_never_written_are_no_tokens_of_somebody_else(
    environ: dict[str, str], found: list[int]
) -> None:
    with rig(environ=environ) as made:
        freed_and_granted_anew(made, broken=True)
        assert made.bound.pool.pages[1].tolist()[:3] == [NEW[0], *found]


def test_in_production_the_step_is_the_step() -> None:
    bound = ToyModel(vocab_size=VOCAB).bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
    assert fresh_blocks(bound.step, bound.pool, GROUPS, {}) is bound.step
    assert isinstance(fresh_blocks(bound.step, bound.pool, GROUPS, {ENV_SWITCH: "1"}), FreshBlocksPoisoned)


@attrs.frozen(eq=False)
class Nothing:
    """A step of which nothing is asked but to be called."""

    num_layers: int = 2

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.zeros(0)


@attrs.frozen(eq=False)
class Memory:
    """float32 numbers of three groups, ``[blocks, layers, numbers]`` each."""

    groups: tuple[torch.Tensor, ...]

    def layer_bytes(self, group: int) -> torch.Tensor:
        return self.groups[group].view(torch.uint8)


@pytest.mark.contract("DP-51")
def test_floats_of_every_group_are_no_numbers_but_states_are_left_alone() -> None:
    groups = (
        CacheGroupSpec(block_tokens=4),
        CacheGroupSpec(name="window", kind=WINDOW, block_tokens=4, window_tokens=4, blocks_per_parent=2),
        CacheGroupSpec(name="state", kind=STATE, block_tokens=4),
    )
    memory = Memory(tuple(torch.zeros(8, 2, 3) for _ in groups))
    step = FreshBlocksPoisoned(inner=Nothing(), blocks=memory, groups=groups)
    rows = RaggedRows(
        token_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.arange(3, 9),
        offsets=torch.tensor([0, 6]),
        contexts=torch.tensor([9]),
        block_tables=torch.tensor([[5, 6, 7]], dtype=torch.int32),
        more_tables=(torch.tensor([[0, 3, 1]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)),
        logit_tokens=torch.tensor([5]),
    )
    step.run(rows, layers=range(1, 2), ready=AllReady())
    assert not any(group.isnan().any() for group in memory.groups)  # the first layers' run did that already
    step.run(rows, layers=range(1), ready=AllReady())
    spoilt = [group.isnan().flatten(1).all(1).nonzero().flatten().tolist() for group in memory.groups]
    assert spoilt == [[6, 7], [3], []]  # block 1 of the window group is the null parent's
