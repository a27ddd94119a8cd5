"""Storage transactions without a scheduler around them: a toy host tier and an executor driven by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from tokenspeed.collective.solo import SoloMesh
from tokenspeed.control.l3 import AgreedStorage
from tokenspeed.plane.plan import Sampling, StorageOp, int32
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import RequestTable, request_table
from tokenspeed.scheduler.config import STORAGE_WAIT_S
from tokenspeed.scheduler.groups import groups_of
from tokenspeed.scheduler.names import Chains
from tokenspeed.scheduler.policy import Fcfs
from tokenspeed.scheduler.states import Event, Life, State
from tokenspeed.scheduler.storage import OpIds, Transactions
from tokenspeed.scheduler.storage_fetch import Fetch
from tokenspeed.scheduler.storage_keep import Keep
from tokenspeed.scheduler.storage_reach import StorageReach, StoredBlock
from tokenspeed.scheduler.waiting import WaitingQueue
from tokenspeed.testing.storage import ScriptedStorage

PAGE = 4


@attrs.define(eq=False)
class ToyShelf:
    """Host blocks 1 .. `size` of one group; meets `storage.Shelf`."""

    size: int
    names: dict[bytes, int] = attrs.field(factory=dict)
    written: set[int] = attrs.field(factory=set)
    pins: Counter[int] = attrs.field(factory=Counter)

    @property
    def empty(self) -> list[int]:
        used = set(self.names.values()) | {block for block, count in self.pins.items() if count}
        return [block for block in range(1, self.size + 1) if block not in used]

    @property
    def pinned(self) -> set[int]:
        return {block for block, count in self.pins.items() if count}

    def put(self, name: bytes) -> int:
        """A block that was written back."""
        block = self.names[name] = self.empty[0]
        self.written.add(block)
        return block

    def find(self, group: int, name: bytes) -> int | None:
        block = self.names.get(name)
        return block if block in self.written else None

    def holds(self, group: int, name: bytes) -> int | None:
        return self.names.get(name)

    def name(self, group: int, block: int) -> bytes | None:
        return next((name for name, own in self.names.items() if own == block), None)

    def fits(self, want: Sequence[int]) -> bool:
        return want[0] <= len(self.empty)

    def reserve(self, wanted: Sequence[tuple[int, Sequence[bytes]]]) -> tuple[int, ...]:
        names = [name for _, part in wanted for name in part]
        assert not set(names) & set(self.names)
        blocks = tuple(self.empty[: len(names)])
        assert len(blocks) == len(names)
        self.names.update(zip(names, blocks, strict=True))
        self.pins.update(blocks)
        return blocks

    def wrote(self, group: int, block: int) -> None:
        assert self.pins[block]
        self.written.add(block)

    def void(self, group: int, block: int) -> None:
        name = self.name(group, block)
        assert name is not None
        assert block not in self.written
        del self.names[name]

    def keep(self, group: int, name: bytes) -> int | None:
        block = self.find(group, name)
        if block is not None:
            self.pins[block] += 1
        return block

    def let_go(self, group: int, blocks: Sequence[int]) -> None:
        self.pins.subtract(blocks)
        assert min(self.pins.values()) >= 0


@attrs.define(eq=False)
class StorageRig:
    """Rounds of a scheduler that does nothing but storage: a head, then a plan."""

    table: RequestTable
    life: Life
    waiting: WaitingQueue
    chains: Chains
    shelf: ToyShelf
    device: set[bytes]
    storage: Transactions
    executor: ScriptedStorage
    l3: AgreedStorage
    rounds: int = 0

    def submit(self, prompt: Sequence[int], *, salt: bytes = b"") -> int:
        """A row, PREPARING or WAITING."""
        tokens = int32(prompt)
        row = self.table.add(rid=f"r{self.table.next_order}", tokens=tokens, max_new=4, sampling=Sampling(), salt=salt)
        if not self.storage.takes(row, most=len(prompt) - 1):
            self.life.move(row, Event.SUBMIT)
            self.waiting.add(row, round_id=self.rounds)
        return row

    def head(self, *, forward: bool = True) -> None:
        self.storage.advance(self.l3.agree(forward=forward), round_id=self.rounds)

    def plan(self) -> tuple[StorageOp, ...]:
        self.rounds += 1
        ops = self.storage.plan(round_id=self.rounds)
        self.l3.submit(ops)
        return ops

    def round(self, *, forward: bool = True) -> tuple[StorageOp, ...]:
        self.head(forward=forward)
        return self.plan()

    def state(self, row: int) -> State:
        return self.life.of(row)

    def name(self, row: int, pages: int) -> bytes:
        return self.chains.upto(row, pages)[pages]

    def store(self, row: int, *pages: int) -> None:
        """Storage has these blocks of the row's prompt."""
        self.executor.stored.update(StoredBlock(0, self.name(row, at)).key for at in pages)


def storage_rig(*, host_blocks: int = 16, page_tokens: int = PAGE) -> StorageRig:
    table = request_table(slots=1, max_len=8192)
    life, shelf, ids = Life(table=table), ToyShelf(host_blocks), OpIds()
    waiting = WaitingQueue(table=table, policy=Fcfs())
    chains = Chains(page_tokens=page_tokens, table=table)
    groups = groups_of(
        (CacheGroupSpec(block_tokens=page_tokens),),
        page_tokens=page_tokens,
        chunk_tokens=16,
        ahead_tokens=0,
        flights=1,
    )
    device: set[bytes] = set()
    fetch = Fetch(
        min_tokens=0,
        wait_s=STORAGE_WAIT_S,
        life=life,
        waiting=waiting,
        chains=chains,
        reach=StorageReach(page_tokens=page_tokens, groups=groups),
        known=lambda group, name: name in device,
        shelf=shelf,
        ids=ids,
    )
    executor = ScriptedStorage()
    return StorageRig(
        table=table,
        life=life,
        waiting=waiting,
        chains=chains,
        shelf=shelf,
        device=device,
        storage=Transactions(fetch=fetch, keep=Keep(shelf=shelf, ids=ids)),
        executor=executor,
        l3=AgreedStorage(mesh=SoloMesh(), workers=executor),
    )
