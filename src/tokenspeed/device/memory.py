"""How much memory the engine takes and what it is for: weights, working memory, KV pool."""

from __future__ import annotations

from bisect import bisect_right

import attrs

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.kv.layout import CacheLayout
from tokenspeed.device.machine import Machine
from tokenspeed.errors import SettingsError
from tokenspeed.settings.model import DeviceSettings, SchedulerSettings, Settings

GIB = 1 << 30
MIB = 1 << 20
FLOAT_BYTES = 4

UNASKED_POOL_BYTES = 4 * GIB
"""The KV pool takes no more than this unless a budget was set: main memory is shared with other programs."""


@attrs.frozen(kw_only=True)
class Budget:
    """Bytes the engine may use, and in words why that many."""

    total_bytes: int
    why: str


@attrs.frozen(kw_only=True)
class ModelNeeds:
    """What a loaded model asks for.

    Attributes:
        layout: of the pool.
        scratch_per_page: working memory that grows with the pages in use: attention of one layer
            over a batch of decode rows gathers their pages, padded to at most twice their number.
        max_positions: longest sequence the model was made for.
    """

    weights_bytes: int
    layout: CacheLayout
    scratch_per_page: int
    max_positions: int


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """The decision.

    Attributes:
        num_pages: LCM parents, the null parent (id 0) included.
        max_model_len: tokens, prompt and output, of the longest request.
    """

    budget: Budget
    weights_bytes: int
    working_bytes: int
    layout: CacheLayout
    num_pages: int
    max_model_len: int

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.layout.parent_bytes

    def lines(self) -> tuple[str, ...]:
        """What is printed at start."""
        takes = f"weights {_mib(self.weights_bytes)}, working memory {_mib(self.working_bytes)}"
        pool = f"{self.num_pages - 1:,} {_pages(self.layout)} = {_mib(self.pool_bytes)}"
        return (
            f"memory: {_mib(self.budget.total_bytes)} ({self.budget.why}); {takes}",
            f"KV pool: {pool}; longest request {self.max_model_len:,} tokens",
        )


def memory_budget(device: DeviceSettings, machine: Machine) -> Budget:
    """`device.memory_gib`, or `device.memory_fraction` of what is available.

    Raises: SettingsError: more than is available, or nothing tells what is.
    """
    there = machine.available_bytes
    if device.memory_gib is not None:
        wanted = int(device.memory_gib * GIB)
        if there is not None and wanted > there:
            raise SettingsError(
                f"device.memory_gib: {device.memory_gib:g} GiB are not there; at most {there / GIB:.2f} GiB are "
                f"available ({machine.memory_source})"
            )
        return Budget(total_bytes=wanted, why=f"device.memory_gib {device.memory_gib:g}")
    if there is None:
        raise SettingsError(f"device.memory_gib: must be set, since {machine.memory_source}")
    why = (
        f"device.memory_fraction {device.memory_fraction:g} of {there / GIB:.2f} GiB available, {machine.memory_source}"
    )
    return Budget(total_bytes=int(there * device.memory_fraction), why=why)


def working_bytes(config: ModelConfig, scheduler: SchedulerSettings, longest: int) -> int:
    """What a forward needs beside weights, pool and the scratch that goes with pages, at most.

    Activations of a full batch; raw logits of every token of a batch of prompts with
    log-probabilities, and the sampler's copies and sort of one row for every slot; mask, keys and
    values of one chunk against the longest context.
    """
    tokens, chunk = scheduler.max_batched_tokens, min(scheduler.chunk_tokens, scheduler.max_batched_tokens)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    activations = tokens * (4 * config.hidden_size + 3 * config.intermediate_size + 2 * heads)
    logits = (tokens + 6 * scheduler.max_num_seqs) * config.vocab_size
    context = longest * (chunk + 2 * config.num_kv_heads * config.head_dim)
    return FLOAT_BYTES * (activations + logits + context)


def check_weights_fit(budget: Budget, expected: int) -> None:
    """Before the weights are read, so that a model that cannot fit fails at once and not by exhaustion.

    Raises: SettingsError.
    """
    if expected > budget.total_bytes:
        raise SettingsError(
            f"device.memory_gib: the model's weights take {_mib(expected)} in float32; the budget is "
            f"{_mib(budget.total_bytes)} ({budget.why}). Raise device.memory_gib or device.memory_fraction, or take a "
            f"smaller model"
        )


def longest_wanted(settings: Settings, max_positions: int) -> int:
    """Tokens of the longest request before the pool has its say.

    Raises: SettingsError: the model cannot do what `model.max_len_tokens` asks.
    """
    asked = settings.model.max_len_tokens
    if asked is not None and asked > max_positions:
        raise SettingsError(
            f"model.max_len_tokens: {asked:,} is more than the {max_positions:,} positions the model was made for"
        )
    return asked or max_positions


def plan_memory(settings: Settings, budget: Budget, needs: ModelNeeds, working: int) -> MemoryPlan:
    """Decide pool size and longest request.

    The pool gets what the budget leaves, but no more than `max_num_seqs` longest requests can use,
    and no more than `UNASKED_POOL_BYTES` where no `device.memory_gib` was set, as long as one
    longest request fits; `device.kv_pool_tokens` decides it outright.

    Raises: SettingsError: it does not fit; the text has the numbers and what to change.
    """
    layout, requests = needs.layout, settings.scheduler.max_num_seqs
    flying = _flying(settings.scheduler)
    longest = longest_wanted(settings, needs.max_positions)
    left = budget.total_bytes - needs.weights_bytes - working
    fitting = left // (layout.parent_bytes + needs.scratch_per_page)
    asked = settings.device.kv_pool_tokens
    if asked is not None:
        num_pages = layout.parents_for(asked, flying=flying, requests=requests) + 1
        if num_pages > fitting:
            raise SettingsError(_too_small(budget, needs, working, f"a pool of {asked:,} tokens", num_pages))
    else:
        one_request = layout.parents_for(longest, flying=flying) + 1
        num_pages = min(fitting, requests * (one_request - 1) + 1)
        if settings.device.memory_gib is None:
            num_pages = min(num_pages, max(one_request, UNASKED_POOL_BYTES // layout.parent_bytes))
        smallest = layout.parents_for(1, flying=flying) + 1
        if num_pages < smallest:
            raise SettingsError(_too_small(budget, needs, working, "the smallest KV pool", smallest))
    room = _room(layout, num_pages - 1, flying=flying, longest=longest)
    if settings.model.max_len_tokens is not None and longest > room:
        if asked is not None:
            raise SettingsError(
                f"model.max_len_tokens: {longest:,} does not fit a pool of device.kv_pool_tokens {asked:,}; "
                f"at most {room:,} do"
            )
        text = f"one request of model.max_len_tokens {longest:,}"
        raise SettingsError(_too_small(budget, needs, working, text, layout.parents_for(longest, flying=flying) + 1))
    return MemoryPlan(
        budget=budget,
        weights_bytes=needs.weights_bytes,
        working_bytes=working,
        layout=layout,
        num_pages=num_pages,
        max_model_len=min(longest, room),
    )


def _flying(scheduler: SchedulerSettings) -> int:
    """Tokens of one request in forwards at once: a chunk in each, and the token of a decode ahead of each but one."""
    forwards = 2 if scheduler.overlap else 1
    return forwards * (min(scheduler.chunk_tokens, scheduler.max_batched_tokens) + 1) - 1


def _room(layout: CacheLayout, parents: int, *, flying: int, longest: int) -> int:
    """Tokens of the longest request, of at most `longest`, that `parents` parents have room for."""
    return bisect_right(range(1, longest + 1), parents, key=lambda tokens: layout.parents_for(tokens, flying=flying))


def _pages(layout: CacheLayout) -> str:
    if len(layout.groups) == 1:
        return f"pages x {layout.page_tokens} tokens"
    blocks = ", ".join(f"{group.blocks_per_parent} x {group.block_tokens} {group.name}" for group in layout.groups)
    return f"pages of {layout.parent_bytes:,} bytes, each for tokens of one group ({blocks})"


def _too_small(budget: Budget, needs: ModelNeeds, working: int, what: str, pages: int) -> str:
    pool = pages * (needs.layout.parent_bytes + needs.scratch_per_page)
    need = needs.weights_bytes + working + pool
    return (
        f"device.memory_gib: {what} needs {_mib(need)}: weights {_mib(needs.weights_bytes)}, working memory "
        f"{_mib(working)}, {pages:,} pages {_mib(pool)}; the budget is {_mib(budget.total_bytes)} ({budget.why}). "
        f"Raise device.memory_gib to {need / GIB + 0.005:.2f} or device.memory_fraction, or lower "
        f"scheduler.max_batched_tokens, scheduler.max_num_seqs or model.max_len_tokens"
    )


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
