"""Everything a forward reads, as numpy arrays made from the plan; ``ts-forward``, no tensor."""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.device.executors.slots import SlotState
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import Int32Array
from tokenspeed.plane.plan import FROM_DEVICE, ForwardBatch, LogprobPlan
from tokenspeed.plane.table import Int64Array


@attrs.frozen(kw_only=True, eq=False)
class PromptRows:
    """Prompt tokens whose log-probabilities are wanted; logits rows behind the sampled ones.

    Attributes:
        targets: int64 ``[p]``, the tokens, row after row.
        parts: (batch index, first position, tokens, alternatives) of each row, in the order of `targets`.
        top: the most alternatives any row wants.
    """

    targets: Int64Array
    parts: tuple[tuple[int, int, int, int], ...]
    top: int


@attrs.frozen(kw_only=True, eq=False)
class SampledLogprobs:
    """Sampled rows whose token's log-probability is wanted.

    Attributes:
        among: int64 ``[q]``, indices into the sampled rows.
        wanted: (batch index, alternatives) of each.
    """

    among: Int64Array
    wanted: tuple[tuple[int, int], ...]
    top: int


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """Inputs of one forward: arrays of its own, which nobody writes after `prepare` returned.

    Shapes with `n` rows, `T` tokens, `s` sampled rows, `f` tokens that are still on the device.

    Attributes:
        token_ids: int64 ``[T]``; 0 at `late`.
        late, late_slots: int64 ``[f]``, places in `token_ids` and the slots whose token goes there.
        positions, offsets, contexts, tables, more_tables: as in `device.step.RaggedRows`.
        logit_tokens: int64 ``[s + p]``, the sampled rows' last tokens, then those of `prompt`.
        sampled: int64 ``[s]``, batch indices; `sampled_slots` and `sampled_positions` (the position
            the new token will have) go with them.
    """

    token_ids: Int64Array
    late: Int64Array
    late_slots: Int64Array
    positions: Int64Array
    offsets: Int64Array
    contexts: Int64Array
    tables: Int32Array
    more_tables: tuple[Int32Array, ...]
    logit_tokens: Int64Array
    sampled: Int64Array
    sampled_slots: Int64Array
    sampled_positions: Int64Array
    logprobs: SampledLogprobs | None
    prompt: PromptRows | None


def prepare(batch: ForwardBatch, logprobs: LogprobPlan, slots: SlotState) -> Prepared:
    """Build a forward's inputs and note in `slots` which slots will have a sampled token.

    Raises: InvariantBroken: the batch contradicts itself or the slots.
    """
    counts, starts = batch.counts.astype(np.int64), batch.starts.astype(np.int64)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    total = int(offsets[-1])
    if not len(counts) or counts.min() < 1 or total != len(batch.input_ids):
        raise InvariantBroken("a batch whose counts do not fit its tokens", counts=counts, tokens=len(batch.input_ids))
    contexts = starts + counts
    tables = slots.gather(batch.rows, batch.slots, starts, contexts)
    token_ids = batch.input_ids.astype(np.int64)
    late = np.flatnonzero(token_ids == FROM_DEVICE)
    late_slots = batch.slots[np.searchsorted(offsets, late, side="right") - 1].astype(np.int64)
    if not slots.sampled[late_slots].all():
        raise InvariantBroken("an input on the device that no forward sampled", slots=late_slots)
    token_ids[late] = 0
    sampled = np.flatnonzero(batch.samples)
    sampled_slots = batch.slots[sampled].astype(np.int64)
    slots.sampled[sampled_slots] = True
    prompt, prompt_tokens = _prompt_rows(logprobs, starts, counts, offsets)
    return Prepared(
        token_ids=token_ids,
        late=late,
        late_slots=late_slots,
        positions=np.arange(total) + np.repeat(starts - offsets[:-1], counts),
        offsets=offsets,
        contexts=contexts,
        tables=tables[0],
        more_tables=tables[1:],
        logit_tokens=np.concatenate((offsets[sampled + 1] - 1, prompt_tokens)),
        sampled=sampled,
        sampled_slots=sampled_slots,
        sampled_positions=contexts[sampled],
        logprobs=_sampled_logprobs(logprobs, sampled),
        prompt=prompt,
    )


NO_TOKENS: Int64Array = np.zeros(0, dtype=np.int64)


def _sampled_logprobs(plan: LogprobPlan, sampled: Int64Array) -> SampledLogprobs | None:
    if not plan.sampled:
        return None
    wanted = np.array([index for index, _ in plan.sampled], dtype=np.int64)
    if not np.isin(wanted, sampled).all():
        raise InvariantBroken("log-probabilities of a row that is not sampled", wanted=plan.sampled, sampled=sampled)
    top = max(alternatives for _, alternatives in plan.sampled)
    return SampledLogprobs(among=np.searchsorted(sampled, wanted), wanted=plan.sampled, top=top)


def _prompt_rows(
    plan: LogprobPlan, starts: Int64Array, counts: Int64Array, offsets: Int64Array
) -> tuple[PromptRows | None, Int64Array]:
    """The wanted prompt tokens, and the indices of the batch's tokens whose logits predict them."""
    if not plan.prompt:
        return None, NO_TOKENS
    if len(plan.prompt) != len(plan.prompt_targets):
        raise InvariantBroken("prompt log-probabilities without their tokens", rows=plan.prompt)
    parts, tokens = [], []
    for (index, first, alternatives), targets in zip(plan.prompt, plan.prompt_targets, strict=True):
        # The logits at position p predict the token at p + 1.
        ahead = first - 1 - starts[index]
        if ahead < 0 or ahead + len(targets) > counts[index]:
            raise InvariantBroken("this chunk does not predict those tokens", index=index, first=first, of=len(targets))
        parts.append((index, first, len(targets), alternatives))
        tokens.append(offsets[index] + ahead + np.arange(len(targets)))
    flat = np.array([token for targets in plan.prompt_targets for token in targets], dtype=np.int64)
    top = max(alternatives for _, _, alternatives in plan.prompt)
    return PromptRows(targets=flat, parts=tuple(parts), top=top), np.concatenate(tokens)
