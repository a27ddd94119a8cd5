"""Puts the scheduler's parts together."""

from __future__ import annotations

import numpy as np

from tokenspeed.errors import SettingsError
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.admission import Admission
from tokenspeed.scheduler.config import Role, SchedulerConfig
from tokenspeed.scheduler.decoding import Decoding
from tokenspeed.scheduler.draft import constants
from tokenspeed.scheduler.exits import Exits
from tokenspeed.scheduler.groups import Group, model_groups
from tokenspeed.scheduler.host.blocks import host_blocks
from tokenspeed.scheduler.host.images import Images, NoImages
from tokenspeed.scheduler.host.operations import Operations
from tokenspeed.scheduler.host.snapshots import snapshot_images
from tokenspeed.scheduler.host.tier import HostTier, host_tier
from tokenspeed.scheduler.index import GroupIndex
from tokenspeed.scheduler.kept_states import KeptStates, NoStates, StateKeeper
from tokenspeed.scheduler.kv_log import KvLog, NetKvLog, NullKvLog
from tokenspeed.scheduler.names import Chains
from tokenspeed.scheduler.packed import make_pool
from tokenspeed.scheduler.pool import Pool
from tokenspeed.scheduler.prefill import Prefill
from tokenspeed.scheduler.prefix import NullPrefixCache, PrefixCache
from tokenspeed.scheduler.prefix_index import PrefixIndex, PublishState
from tokenspeed.scheduler.pressure import Pressure
from tokenspeed.scheduler.reach import Reach, nothing
from tokenspeed.scheduler.remote import NoRemote, Receiver, Remote, Sender
from tokenspeed.scheduler.residents import Residents, resident_state
from tokenspeed.scheduler.scheduler import PagedScheduler
from tokenspeed.scheduler.seniority import Seniority
from tokenspeed.scheduler.states import Life
from tokenspeed.scheduler.storage import NoStorage, OpIds, Storage, Transactions
from tokenspeed.scheduler.storage_fetch import Fetch
from tokenspeed.scheduler.storage_keep import Keep
from tokenspeed.scheduler.storage_reach import StorageReach
from tokenspeed.scheduler.storage_shelf import HostShelf
from tokenspeed.scheduler.tier import NoTier, Tier
from tokenspeed.scheduler.waiting import WaitingQueue


def build_scheduler(config: SchedulerConfig, table: RequestTable, policy: SchedulingPolicy) -> PagedScheduler:
    """A scheduler over `table`, whose ``schedule`` columns it then writes.

    Raises: SettingsError: the table has fewer slots or shorter lines than the configuration needs.
    """
    slots, length = table.tokens.seated.shape
    if slots < config.request_slots or length < config.max_model_len:
        raise SettingsError(
            f"scheduler: the request table has {slots} slots of {length} tokens, "
            f"needed are {config.request_slots} of {config.max_model_len}"
        )
    life = Life(table=table)
    groups = model_groups(config)
    pool = make_pool(config.num_pages, tuple(spec.blocks_per_parent for spec in config.specs))
    tier = tier_below(config, pool)
    cache = prefix_cache(config, table, groups, pool, tier)
    residents = Residents(
        config=config,
        groups=groups,
        table=table,
        pool=pool,
        cache=cache,
        state=resident_state(config, groups),
    )
    images = retraction_images(config, groups, table, residents, cache, tier)
    states = kept_states(config, groups, residents, pool, cache)
    waiting = WaitingQueue(table=table, policy=policy, cached=cache)
    seniority = Seniority()
    storage = storage_of(config, groups, life, waiting, cache, tier)
    exits = Exits(
        table=table,
        life=life,
        cache=cache,
        residents=residents,
        waiting=waiting,
        seniority=seniority,
        states=states,
        images=images,
        storage=storage,
    )
    pressure = Pressure(
        config=config,
        table=table,
        life=life,
        pool=pool,
        residents=residents,
        waiting=waiting,
        seniority=seniority,
        exits=exits,
        states=states,
        tier=tier,
        images=images,
    )
    admission = Admission(
        config=config,
        groups=groups,
        table=table,
        life=life,
        pool=pool,
        cache=cache,
        residents=residents,
        waiting=waiting,
        seniority=seniority,
        tier=tier,
        images=images,
        storage=storage,
    )
    return PagedScheduler(
        config=config,
        table=table,
        life=life,
        pool=pool,
        cache=cache,
        tier=tier,
        images=images,
        residents=residents,
        states=states,
        waiting=waiting,
        admission=admission,
        decoding=Decoding(
            config=config,
            groups=groups,
            table=table,
            life=life,
            pool=pool,
            residents=residents,
            pressure=pressure,
            states=states,
            common=constants(config.max_num_seqs),
        ),
        prefill=Prefill(config=config, table=table, life=life, residents=residents, admission=admission, states=states),
        pressure=pressure,
        exits=exits,
        storage=storage,
        remote=remote_of(config, groups, table, life, residents, admission, seniority, exits),
    )


def tier_below(config: SchedulerConfig, pool: Pool) -> Tier:
    """The host tier, if the device side has made one."""
    if config.host_parents < 2:  # the null parent alone holds nothing
        return NoTier()
    host = host_blocks(config.host_parents, tuple(spec.blocks_per_parent for spec in config.specs))
    return host_tier(config.write_policy, pool, host, Operations())


def retraction_images(
    config: SchedulerConfig,
    groups: tuple[Group, ...],
    table: RequestTable,
    residents: Residents,
    cache: PrefixCache,
    tier: Tier,
) -> Images:
    """Images need a snapshot pool, and the host tier for the pages that have names."""
    if not config.images or not isinstance(tier, HostTier):
        return NoImages()
    return snapshot_images(
        config.images,
        specs=config.specs,
        groups=groups,
        table=table,
        residents=residents,
        cache=cache,
        tier=tier,
    )


def prefix_cache(
    config: SchedulerConfig, table: RequestTable, groups: tuple[Group, ...], pool: Pool, tier: Tier
) -> PrefixCache:
    """The cache the configuration asks for."""
    none = nothing(groups)
    if not config.prefix:
        return NullPrefixCache(pool=pool, nothing=none)
    chains = Chains(page_tokens=config.page_tokens, table=table)
    indexes = tuple(GroupIndex() for _ in groups)
    has_states = any(not group.by_position for group in groups)
    return PrefixIndex(
        page_tokens=config.page_tokens,
        table=table,
        pool=pool,
        groups=groups,
        chains=chains,
        indexes=indexes,
        logs=tuple(_log(config, group) for group in groups),
        tier=tier,
        reach=Reach(
            page_tokens=config.page_tokens,
            groups=groups,
            chains=chains,
            indexes=indexes,
            tier=tier,
            nothing=none,
            # With state groups a hit ends where a state was kept, which may be anywhere.
            least=1 if has_states else (config.page_tokens + 1) // 2,
        ),
        state=PublishState(published=np.zeros((len(groups), config.request_slots), dtype=np.int64)),
    )


def storage_of(
    config: SchedulerConfig,
    groups: tuple[Group, ...],
    life: Life,
    waiting: WaitingQueue,
    cache: PrefixCache,
    tier: Tier,
) -> Storage:
    """Nothing without a backend, and on a decode node, which gets what it lacks from its prefill node (SP-56)."""
    if not config.storage or config.role is Role.DECODE:
        return NoStorage()
    if not isinstance(cache, PrefixIndex) or not isinstance(tier, HostTier):
        raise SettingsError("scheduler: storage is on, which needs the prefix cache and a host tier (host_parents)")
    ids, shelf = OpIds(), HostShelf(host=tier.host)
    fetch = Fetch(
        min_tokens=config.storage_min_tokens,
        wait_s=config.storage_wait_s,
        life=life,
        waiting=waiting,
        chains=cache.chains,
        reach=StorageReach(page_tokens=config.page_tokens, groups=groups),
        known=lambda group, name: cache.indexes[group].block(name) is not None,
        shelf=shelf,
        ids=ids,
    )
    return Transactions(fetch=fetch, keep=Keep(shelf=shelf, ids=ids))


def remote_of(
    config: SchedulerConfig,
    groups: tuple[Group, ...],
    table: RequestTable,
    life: Life,
    residents: Residents,
    admission: Admission,
    seniority: Seniority,
    exits: Exits,
) -> Remote:
    if config.role is Role.DECODE:
        return Receiver(
            table=table,
            life=life,
            groups=groups,
            residents=residents,
            admission=admission,
            seniority=seniority,
            exits=exits,
        )
    if config.role is Role.PREFILL:
        return Sender(table=table, life=life, groups=groups, residents=residents, exits=exits)
    return NoRemote()


def kept_states(
    config: SchedulerConfig, groups: tuple[Group, ...], residents: Residents, pool: Pool, cache: PrefixCache
) -> KeptStates:
    """Nothing, for a model without state groups or without a cache to keep states in."""
    running = tuple(group for group in groups if not group.by_position)
    if not running or not config.prefix:
        return NoStates()
    paged = tuple(group for group in groups if group.by_position)
    return StateKeeper(groups=running, paged=paged, residents=residents, pool=pool, cache=cache)


def _log(config: SchedulerConfig, group: Group) -> KvLog:
    if config.kv_events and group.by_position:
        return NetKvLog(block_tokens=group.block_tokens, group=group.number)
    return NullKvLog()
