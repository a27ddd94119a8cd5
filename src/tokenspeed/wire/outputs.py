"""Output batches and control replies to the positional form and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from tokenspeed.plane.messages import (
    FINISH_WORDS,
    ControlReply,
    Finish,
    LoadReport,
    OneToken,
    OutputBatch,
    Refusal,
    TopLogprobs,
)
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.layouts import OUTPUT, OUTPUT_APPENDED, OUTPUT_FIELDS, REPLY, Layouts
from tokenspeed.wire.structs import OutputStruct, ReplyStruct, laid_out, named, typed, untagged

T = TypeVar("T")

_FINISH = {word: int(finish) for word, finish in zip(FINISH_WORDS, Finish, strict=True)}
NO_LOAD = LoadReport()
KNOWN_COLUMNS = frozenset(OUTPUT_FIELDS + OUTPUT_APPENDED)
LOGPROB_COLUMNS = (
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
)


def refused(refusal: Refusal, *, engine_index: int) -> OutputBatch:
    """A batch of one row that ends the request."""
    return OutputBatch(
        rids=[refusal.rid],
        output_ids=[[]],
        finished=[int(Finish.ABORT)],
        prompt_tokens=[0],
        completion_tokens=[0],
        cached_tokens=[0],
        logprobs=[[]],
        top_logprobs=[[]],
        prompt_logprobs=[[]],
        prompt_top_logprobs=[[]],
        status=[refusal.status],
        messages=[refusal.message],
        engine_index=engine_index,
    )


def encode_output(batch: OutputBatch, layouts: Layouts, *, engine_index: int) -> list[object]:
    """The tagged array. A batch without a load says so with zero pages in total."""
    load = batch.load or NO_LOAD
    values: dict[str, object] = {
        "rids": batch.rids,
        "output_ids": _token_lists(batch.output_ids),
        "finished_reasons": _words(batch.finished),
        "prompt_tokens": batch.prompt_tokens,
        "completion_tokens": batch.completion_tokens,
        "cached_tokens": batch.cached_tokens,
        "engine_index": engine_index,
        "num_running": load.running,
        "num_waiting": load.waiting,
        "kv_active_pages": load.active_blocks,
        "kv_total_pages": load.total_blocks,
        "finished_status_codes": _nil_if_none(batch.status),
        "finished_messages": _nil_if_none(batch.messages),
        "kv_resident_pages": load.resident_blocks,
        "weight_version": batch.weight_version,
        **_logprob_columns(batch),
    }
    return [OUTPUT, *laid_out(values, layouts.output)]


def decode_output(values: object, layouts: Layouts) -> OutputBatch:
    """Raises: WireError: names the column that cannot be read or has another length than `rids`."""
    fields = named(untagged(values, OUTPUT), layouts.output, OUTPUT)
    got = typed(fields, OutputStruct, OUTPUT)
    rows = len(got.rids)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) != rows and name in KNOWN_COLUMNS:
            raise WireError(name, f"{len(value)} entries for {rows} rows")
    tops = _tops("output_top_logprobs_idx", got.output_top_logprobs_idx, got.output_top_logprobs_val, rows)
    prompt_tops = _tops("input_top_logprobs_idx", got.input_top_logprobs_idx, got.input_top_logprobs_val, rows)
    return OutputBatch(
        rids=got.rids,
        output_ids=got.output_ids,
        finished=[_FINISH.get(word, int(Finish.STOP)) for word in got.finished_reasons],
        prompt_tokens=got.prompt_tokens,
        completion_tokens=got.completion_tokens,
        cached_tokens=got.cached_tokens,
        logprobs=got.output_token_logprobs_val,
        top_logprobs=tops,
        prompt_logprobs=got.input_token_logprobs_val or [[] for _ in range(rows)],
        prompt_top_logprobs=_absent_if_empty(prompt_tops),
        prompt_logprob_ids=got.input_token_logprobs_idx or [[] for _ in range(rows)],
        status=[status or 0 for status in got.finished_status_codes] or [0] * rows,
        messages=[message or "" for message in got.finished_messages] or [""] * rows,
        load=_load(got),
        engine_index=got.engine_index,
        weight_version=got.weight_version,
    )


def encode_reply(reply: ControlReply, layouts: Layouts, *, engine_index: int) -> list[object]:
    values: dict[str, object] = {
        "call_id": reply.call_id,
        "success": reply.success,
        "message": reply.message,
        "engine_index": engine_index,
    }
    return [REPLY, *laid_out(values, layouts.reply)]


def decode_reply(values: object, layouts: Layouts) -> ControlReply:
    got = typed(named(untagged(values, REPLY), layouts.reply, REPLY), ReplyStruct, REPLY)
    return ControlReply(call_id=got.call_id, success=got.success, message=got.message)


def _load(got: OutputStruct) -> LoadReport | None:
    if got.kv_total_pages == 0:
        return None
    return LoadReport(
        running=got.num_running,
        waiting=got.num_waiting,
        resident_blocks=got.kv_resident_pages,
        active_blocks=got.kv_active_pages,
        total_blocks=got.kv_total_pages,
    )


def _token_lists(column: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    return list(zip(column.tokens, strict=True)) if isinstance(column, OneToken) else column


def _nil_if_none(column: Sequence[T]) -> list[T | None]:
    """Zero and "" stand for none."""
    return [value or None for value in column] if any(column) else [None] * len(column)


def _words(finished: Sequence[int]) -> list[str]:
    return [FINISH_WORDS[finish] for finish in finished] if any(finished) else [""] * len(finished)


# Most batches have no log-probabilities at all: their columns of empty rows go as they are, in both directions.


def _logprob_columns(batch: OutputBatch) -> dict[str, object]:
    columns = (batch.logprobs, batch.top_logprobs, batch.prompt_logprobs, batch.prompt_top_logprobs)
    if not any(any(column) for column in {id(column): column for column in columns}.values()):
        return dict.fromkeys(LOGPROB_COLUMNS, batch.logprobs)  # often one column for all, looked through once
    ids = [ids if values else [] for ids, values in zip(batch.output_ids, batch.logprobs, strict=True)]
    tops, prompt_tops = batch.top_logprobs, batch.prompt_top_logprobs
    values = (
        batch.logprobs,
        ids,
        _top_values(tops),
        _top_ids(tops),
        batch.prompt_logprobs,
        batch.prompt_logprob_ids or [[]] * len(batch.rids),
        _top_values(prompt_tops),
        _top_ids(prompt_tops),
    )
    return dict(zip(LOGPROB_COLUMNS, values, strict=True))


def _top_ids(rows: Sequence[Sequence[TopLogprobs | None]]) -> list[list[object]]:
    """One list a position; empty where there are no alternatives (the first prompt position)."""
    return [[list(top.ids) if top else [] for top in row] for row in rows]


def _top_values(rows: Sequence[Sequence[TopLogprobs | None]]) -> list[list[object]]:
    return [[list(top.values) if top else [] for top in row] for row in rows]


def _absent_if_empty(rows: list[list[TopLogprobs]]) -> list[list[TopLogprobs | None]]:
    if not any(rows):
        return cast("list[list[TopLogprobs | None]]", rows)
    return [[top if top.ids else None for top in row] for row in rows]


def _tops(name: str, ids: list[list[list[int]]], values: list[list[list[float]]], rows: int) -> list[list[TopLogprobs]]:
    if not any(ids) and not any(values):
        return cast("list[list[TopLogprobs]]", ids) if ids else [[] for _ in range(rows)]
    try:
        return [
            [TopLogprobs(ids=tuple(i), values=tuple(v)) for i, v in zip(row_ids, row_values, strict=True)]
            for row_ids, row_values in zip(ids, values, strict=True)
        ]
    except ValueError:
        raise WireError(name, "ids and values have different lengths") from None


def refused_for_room(rid: str, limit: int, *, engine_index: int) -> OutputBatch:
    """The answer to a request that found the engine's receive queue full."""
    text = f"{limit} requests already wait to be received; retry later"
    return refused(Refusal(rid=rid, status=429, message=text), engine_index=engine_index)
