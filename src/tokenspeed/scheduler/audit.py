"""What a scheduler holds, as plain values, and the rules that must hold between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.table import NO_SLOT, RequestTable
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.pool import NULL_BLOCK, BlockPool
from tokenspeed.scheduler.prefix import PrefixCache
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.states import OWNS, Life, Owned, State


@attrs.frozen(kw_only=True, eq=False)
class SchedulerSnapshot:
    """Copied at one moment.

    Attributes:
        states: by row, without FREE ones.
        tables: block tables by row, of the rows that hold pages.
        displaced: blocks that only forwards in flight still use.
        references: by block, active ones only.
        empty: empty blocks. idle: findable blocks nobody references, next to be evicted first.
        promised: blocks promised to seated prompts.
        index: block by name.
    """

    states: Mapping[int, State]
    tables: Mapping[int, tuple[int, ...]]
    displaced: tuple[int, ...]
    references: Mapping[int, int]
    empty: tuple[int, ...]
    idle: tuple[int, ...]
    promised: int
    index: Mapping[bytes, int]


def take_snapshot(
    table: RequestTable, life: Life, pool: BlockPool, cache: PrefixCache, residents: Residents
) -> SchedulerSnapshot:
    seats, counts = residents.state, pool.state
    states: dict[int, State] = {}
    tables: dict[int, tuple[int, ...]] = {}
    for state in OWNS:
        if state is not State.FREE:
            states.update(dict.fromkeys(life.rows(state), state))
    for row, state in states.items():
        if Owned.PAGES in OWNS[state]:
            slot = int(table.schedule.slot[row])
            tables[row] = tuple(seats.blocks[slot, : int(seats.held[slot])].tolist())
    return SchedulerSnapshot(
        states=states,
        tables=tables,
        displaced=tuple(block for _, block in seats.displaced),
        references={block: int(counts.refs[block]) for block in counts.refs.nonzero()[0].tolist()},
        empty=tuple(counts.stack[: counts.top].tolist()),
        idle=tuple(counts.idle),
        promised=counts.promised,
        index=cache.contents(),
    )


def audit(snapshot: SchedulerSnapshot, config: SchedulerConfig, table: RequestTable) -> None:
    """Raises: InvariantBroken: blocks, tables and states do not fit each other."""
    _audit_blocks(snapshot, config)
    for row, state in snapshot.states.items():
        _audit_row(snapshot, config, table, row, state)


def _audit_blocks(snapshot: SchedulerSnapshot, config: SchedulerConfig) -> None:
    wanted = Counter(block for blocks in snapshot.tables.values() for block in blocks)
    wanted.update(snapshot.displaced)
    if wanted != Counter(snapshot.references):
        raise InvariantBroken("reference counts", counted=dict(wanted), kept=snapshot.references)
    classes = [*snapshot.references, *snapshot.idle, *snapshot.empty]
    if sorted(classes) != list(range(NULL_BLOCK + 1, config.num_pages)):
        raise InvariantBroken("each block in exactly one class", blocks=sorted(classes))
    if snapshot.promised > len(snapshot.idle) + len(snapshot.empty):
        raise InvariantBroken("more blocks promised than there are", promised=snapshot.promised)
    found = set(snapshot.index.values())
    if len(found) != len(snapshot.index) or not set(snapshot.idle) <= found or found & set(snapshot.empty):
        raise InvariantBroken("idle blocks are findable, empty ones are not", found=sorted(found))
    for row, blocks in snapshot.tables.items():
        if len(set(blocks)) != len(blocks):
            raise InvariantBroken("a block twice in one table", row=row, blocks=blocks)


def _audit_row(
    snapshot: SchedulerSnapshot, config: SchedulerConfig, table: RequestTable, row: int, state: State
) -> None:
    schedule, identity = table.schedule, table.identity
    scheduled, landed = int(schedule.scheduled[row]), int(schedule.landed[row])
    facts = {"row": row, "state": state.name, "scheduled": scheduled, "landed": landed}
    limit = int(identity.prompt_len[row]) + int(identity.max_new[row]) - 1
    if not 0 <= landed <= scheduled <= limit:
        raise InvariantBroken("0 <= landed <= scheduled <= limit", limit=limit, **facts)
    if (schedule.inflight[row] > 0) != (landed < scheduled):
        raise InvariantBroken("in flight exactly if scheduled is ahead", inflight=int(schedule.inflight[row]), **facts)
    if Owned.SLOT not in OWNS[state] and schedule.slot[row] != NO_SLOT:
        raise InvariantBroken("a slot in a state that owns none", **facts)
    blocks = snapshot.tables.get(row)
    if blocks is None:
        return
    # The tokens scheduled, and at most what is reserved for forwards that run ahead.
    least = config.blocks_for(scheduled)
    most = config.blocks_for(min(scheduled + config.overlap_schedule_depth, limit))
    if not least <= len(blocks) <= most:
        raise InvariantBroken(
            "a table covers exactly the scheduled tokens", least=least, most=most, blocks=blocks, **facts
        )
