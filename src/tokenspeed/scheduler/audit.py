"""What a scheduler holds, as plain values, and the rules that must hold between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.table import NO_SLOT, RequestTable
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.groups import Group, Kind, model_groups
from tokenspeed.scheduler.host.audit import HostSnapshot, audit_host, host_snapshot
from tokenspeed.scheduler.host.images import Images
from tokenspeed.scheduler.kept_states import KeptStates, StateKeeper
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefix import PrefixCache
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.states import OWNS, Life, Owned, State
from tokenspeed.scheduler.storage import Storage
from tokenspeed.scheduler.tier import Tier


@attrs.frozen(kw_only=True, eq=False)
class GroupSnapshot:
    """One cache group, copied.

    Attributes:
        tables: blocks by row, of the rows that hold pages, from `first` of the row on.
        first: table index of the first block held, by row.
        displaced: blocks that only forwards in flight still use.
        pinned: blocks that open cache operations read or write, once for each.
        references: by block, active ones only.
        idle: findable blocks nobody references, next to be evicted first.
        promised: blocks promised to seated prompts.
        index: block by name.
    """

    tables: Mapping[int, tuple[int, ...]]
    first: Mapping[int, int]
    displaced: tuple[int, ...]
    pinned: tuple[int, ...]
    references: Mapping[int, int]
    idle: tuple[int, ...]
    promised: int
    index: Mapping[bytes, int]


@attrs.frozen(kw_only=True, eq=False)
class SchedulerSnapshot:
    """Copied at one moment. The properties are those of group 0.

    Attributes:
        states: by row, without FREE ones.
        empty: parents that hold nothing.
    """

    states: Mapping[int, State]
    groups: tuple[GroupSnapshot, ...]
    empty: tuple[int, ...]
    host: HostSnapshot

    @property
    def tables(self) -> Mapping[int, tuple[int, ...]]:
        return self.groups[0].tables

    @property
    def displaced(self) -> tuple[int, ...]:
        return self.groups[0].displaced

    @property
    def references(self) -> Mapping[int, int]:
        return self.groups[0].references

    @property
    def idle(self) -> tuple[int, ...]:
        return self.groups[0].idle

    @property
    def promised(self) -> int:
        return self.groups[0].promised

    @property
    def index(self) -> Mapping[bytes, int]:
        return self.groups[0].index


def take_snapshot(
    table: RequestTable,
    life: Life,
    pool: Pool,
    cache: PrefixCache,
    residents: Residents,
    kept: KeptStates,
    tier: Tier,
    images: Images,
    storage: Storage,
) -> SchedulerSnapshot:
    states: dict[int, State] = {}
    for state in OWNS:
        if state is not State.FREE:
            states.update(dict.fromkeys(life.rows(state), state))
    seated = {row: int(table.schedule.slot[row]) for row, state in states.items() if Owned.PAGES in OWNS[state]}
    held, contents = pool.contents(), cache.contents()
    left = list(kept.state.left.values()) if isinstance(kept, StateKeeper) else []
    numbers = [group.number for group in kept.groups] if isinstance(kept, StateKeeper) else []
    host = host_snapshot(tier, images, storage, pool.groups)
    groups = []
    for number, lines in enumerate(residents.state.groups):
        moved = tuple(blocks[numbers.index(number)] for blocks in left) if number in numbers else ()
        groups.append(
            GroupSnapshot(
                tables={
                    row: tuple(lines.blocks[slot, int(lines.first[slot]) : int(lines.held[slot])].tolist())
                    for row, slot in seated.items()
                },
                first={row: int(lines.first[slot]) for row, slot in seated.items()},
                displaced=tuple(block for _, group, block in residents.state.displaced if group == number) + moved,
                pinned=host.device_pins[number],
                references=held.references[number],
                idle=held.idle[number],
                promised=held.promised[number],
                index=contents[number],
            )
        )
    return SchedulerSnapshot(states=states, groups=tuple(groups), empty=held.empty, host=host)


def audit(snapshot: SchedulerSnapshot, config: SchedulerConfig, table: RequestTable) -> None:
    """Raises: InvariantBroken: blocks, tables and states do not fit each other."""
    groups = model_groups(config)
    for group, spec in zip(groups, config.specs, strict=True):
        _audit_blocks(snapshot.groups[group.number], config.num_pages * spec.blocks_per_parent, spec.blocks_per_parent)
    _audit_parents(snapshot, config)
    audit_host(snapshot.host, snapshot.states, config.images)
    for row, state in snapshot.states.items():
        _audit_row(snapshot, config, groups, table, row, state)


def _audit_blocks(snapshot: GroupSnapshot, blocks: int, per_parent: int) -> None:
    wanted = Counter(block for table in snapshot.tables.values() for block in table)
    wanted.update(snapshot.displaced)
    wanted.update(snapshot.pinned)
    if wanted != Counter(snapshot.references):
        raise InvariantBroken("reference counts", counted=dict(wanted), kept=snapshot.references)
    if set(snapshot.idle) & set(snapshot.references):
        raise InvariantBroken("a block idle and active", idle=snapshot.idle)
    used = [*snapshot.references, *snapshot.idle]
    if used and not per_parent <= min(used) <= max(used) < blocks:
        raise InvariantBroken("a block outside the pool, or of the null parent", blocks=sorted(used))
    found = set(snapshot.index.values())
    if len(found) != len(snapshot.index) or not set(snapshot.idle) <= found or not found <= set(used):
        raise InvariantBroken("idle blocks are findable, empty ones are not", found=sorted(found))
    for row, table in snapshot.tables.items():
        if len(set(table)) != len(table):
            raise InvariantBroken("a block twice in one table", row=row, blocks=table)


def _audit_parents(snapshot: SchedulerSnapshot, config: SchedulerConfig) -> None:
    """Each parent belongs to one group or is empty (SP-53)."""
    owned: dict[int, int] = {}
    for number, (group, spec) in enumerate(zip(snapshot.groups, config.specs, strict=True)):
        for block in (*group.references, *group.idle):
            if owned.setdefault(block // spec.blocks_per_parent, number) != number:
                raise InvariantBroken("a parent with blocks of two groups", parent=block // spec.blocks_per_parent)
    if sorted([*owned, *snapshot.empty]) != list(range(1, config.num_pages)):
        raise InvariantBroken("each parent in exactly one class", owned=sorted(owned), empty=sorted(snapshot.empty))


def _audit_row(
    snapshot: SchedulerSnapshot,
    config: SchedulerConfig,
    groups: tuple[Group, ...],
    table: RequestTable,
    row: int,
    state: State,
) -> None:
    schedule, identity = table.schedule, table.identity
    scheduled, landed = int(schedule.scheduled[row]), int(schedule.landed[row])
    facts = {"row": row, "state": state.name, "scheduled": scheduled, "landed": landed}
    limit = int(identity.prompt_len[row]) + int(identity.max_new[row]) - 1
    if not 0 <= landed <= scheduled <= limit:
        raise InvariantBroken("0 <= landed <= scheduled <= limit", limit=limit, **facts)
    if Owned.SLOT not in OWNS[state] and schedule.slot[row] != NO_SLOT:
        raise InvariantBroken("a slot in a state that owns none", **facts)
    for group in groups:
        if row in snapshot.groups[group.number].tables:
            _audit_table(snapshot.groups[group.number], config, group, row, scheduled, landed, limit)


def _audit_table(
    snapshot: GroupSnapshot, config: SchedulerConfig, group: Group, row: int, scheduled: int, landed: int, limit: int
) -> None:
    """The tokens scheduled (of a window: those still seen), and at most what is reserved to run ahead."""
    first, end = snapshot.first[row], snapshot.first[row] + len(snapshot.tables[row])
    least = group.blocks_for(scheduled)
    most = group.blocks_for(min(scheduled + config.ahead_tokens + config.early_tokens, limit))
    if not least <= end <= most:
        raise InvariantBroken("a table covers exactly the scheduled tokens", row=row, least=least, most=most, end=end)
    if group.kind is Kind.WINDOW and first > group.first_seen(landed):
        raise InvariantBroken("a block given up that a forward may read", row=row, first=first, landed=landed)
    if group.kind is not Kind.WINDOW and first:
        raise InvariantBroken("a table that does not begin at its beginning", row=row, first=first)
