"""Puts the scheduler's parts together."""

from __future__ import annotations

import numpy as np

from tokenspeed.errors import SettingsError
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.admission import Admission
from tokenspeed.scheduler.config import SchedulerConfig
from tokenspeed.scheduler.decoding import Decoding
from tokenspeed.scheduler.draft import constants
from tokenspeed.scheduler.exits import Exits
from tokenspeed.scheduler.kv_log import NetKvLog, NullKvLog
from tokenspeed.scheduler.pool import BlockPool, block_pool
from tokenspeed.scheduler.prefill import Prefill
from tokenspeed.scheduler.prefix import IndexState, NullPrefixCache, PrefixCache, PrefixIndex
from tokenspeed.scheduler.pressure import Pressure
from tokenspeed.scheduler.residents import Residents, resident_state
from tokenspeed.scheduler.scheduler import PagedScheduler
from tokenspeed.scheduler.seniority import Seniority
from tokenspeed.scheduler.states import Life
from tokenspeed.scheduler.waiting import MatchedPrompts, WaitingQueue


def build_scheduler(config: SchedulerConfig, table: RequestTable, policy: SchedulingPolicy) -> PagedScheduler:
    """A scheduler over `table`, whose ``schedule`` columns it then writes.

    Raises: SettingsError: the table has fewer slots or shorter lines than the configuration needs.
    """
    slots, length = table.tokens.seated.shape
    if slots < config.max_num_seqs or length < config.max_model_len:
        raise SettingsError(
            f"scheduler: the request table has {slots} slots of {length} tokens, "
            f"needed are {config.max_num_seqs} of {config.max_model_len}"
        )
    life = Life(table=table)
    pool = block_pool(config.num_pages)
    cache = prefix_cache(config, table, pool)
    residents = Residents(config=config, table=table, pool=pool, cache=cache, state=resident_state(config))
    waiting = WaitingQueue(
        table=table,
        policy=policy,
        cached=MatchedPrompts(page_tokens=config.page_tokens, table=table, cache=cache),
    )
    seniority = Seniority()
    exits = Exits(table=table, life=life, cache=cache, residents=residents, waiting=waiting, seniority=seniority)
    pressure = Pressure(
        config=config,
        table=table,
        life=life,
        pool=pool,
        residents=residents,
        waiting=waiting,
        seniority=seniority,
        exits=exits,
    )
    admission = Admission(
        config=config,
        table=table,
        life=life,
        pool=pool,
        cache=cache,
        residents=residents,
        waiting=waiting,
        seniority=seniority,
    )
    return PagedScheduler(
        config=config,
        table=table,
        life=life,
        pool=pool,
        cache=cache,
        residents=residents,
        waiting=waiting,
        admission=admission,
        decoding=Decoding(config=config, table=table, life=life, pool=pool, residents=residents, pressure=pressure),
        prefill=Prefill(config=config, table=table, life=life, residents=residents, admission=admission),
        pressure=pressure,
        exits=exits,
        common=constants(config.max_num_seqs),
    )


def prefix_cache(config: SchedulerConfig, table: RequestTable, pool: BlockPool) -> PrefixCache:
    """The cache the configuration asks for."""
    if not config.prefix:
        return NullPrefixCache(pool=pool)
    return PrefixIndex(
        page_tokens=config.page_tokens,
        table=table,
        pool=pool,
        log=NetKvLog(block_tokens=config.page_tokens) if config.kv_events else NullKvLog(),
        state=IndexState(published=np.zeros(config.max_num_seqs, dtype=np.int32)),
    )
