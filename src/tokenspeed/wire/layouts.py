"""Field order of the structs that travel as arrays, and how two versions of it meet.

An engine announces the order it reads and writes (FW-10); its frontend follows that order, so the
two sides need not share a version. Our own fields stand behind the fixed positions, never between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from tokenspeed.wire.faults import WireError

REQUEST = "TokenizedGenerateReqInput"
SAMPLING = "SamplingParams"
OUTPUT = "BatchTokenIDOutSlim"
REPLY = "ControlReplySlim"

REQUEST_FIELDS: tuple[str, ...] = (
    "rid",
    "http_worker_ipc",
    "input_text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "stream",
    "input_embeds",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "created_time",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "input_multi_ids",
    "input_extra_infos",
    "input_ids_unpadded",
    "multimodal_inputs",
    "validation_error",
)
REQUEST_APPENDED: tuple[str, ...] = ("cache_salt", "priority", "kind", "unsupported", "trace")

SAMPLING_FIELDS: tuple[str, ...] = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "thinking_budget",
    "custom_params",
    "stream_interval",
    "logit_bias",
    "seed",
    "logprobs",
    "n",
    "stop_strs",
    "stop_str_max_len",
    "is_normalized",
)

OUTPUT_FIELDS: tuple[str, ...] = (
    "rids",
    "output_ids",
    "finished_reasons",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "engine_index",
    "num_running",
    "num_waiting",
    "kv_active_pages",
    "kv_total_pages",
)
OUTPUT_APPENDED: tuple[str, ...] = (
    "finished_status_codes",
    "finished_messages",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "kv_resident_pages",
    "weight_version",
)

REPLY_FIELDS: tuple[str, ...] = ("call_id", "success", "message", "engine_index")

_NEEDED: Mapping[str, tuple[str, ...]] = {
    REQUEST: ("rid", "input_ids", "sampling_params"),
    SAMPLING: (),
    OUTPUT: OUTPUT_FIELDS[:8],
    REPLY: ("call_id", "success"),
}


@attrs.frozen(kw_only=True)
class Layouts:
    """Field names in the order of their positions; tagged structs without the tag."""

    request: tuple[str, ...] = REQUEST_FIELDS
    sampling: tuple[str, ...] = SAMPLING_FIELDS
    output: tuple[str, ...] = OUTPUT_FIELDS
    reply: tuple[str, ...] = REPLY_FIELDS

    def announced(self) -> dict[str, list[str]]:
        """The form in which a registration carries them."""
        return {
            REQUEST: list(self.request),
            SAMPLING: list(self.sampling),
            OUTPUT: list(self.output),
            REPLY: list(self.reply),
        }


LAYOUTS = Layouts(request=REQUEST_FIELDS + REQUEST_APPENDED, output=OUTPUT_FIELDS + OUTPUT_APPENDED)
"""What this build announces."""


def layouts_of(announced: Mapping[str, Sequence[str]] | None) -> Layouts:
    """The order a peer announced; a struct it does not mention has the fixed positions only.

    Raises: WireError: a layout repeats a name or lacks one that every message needs.
    """
    told = announced or {}
    base = Layouts()
    return Layouts(
        request=_checked(told, REQUEST, base.request),
        sampling=_checked(told, SAMPLING, base.sampling),
        output=_checked(told, OUTPUT, base.output),
        reply=_checked(told, REPLY, base.reply),
    )


def _checked(told: Mapping[str, Sequence[str]], struct: str, fixed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(told.get(struct, fixed))
    if len(set(names)) != len(names):
        raise WireError(f"positional_layouts.{struct}", "names a field twice")
    missing = [name for name in _NEEDED[struct] if name not in names]
    if missing:
        raise WireError(f"positional_layouts.{struct}", f"lacks {', '.join(missing)}")
    return names
