"""What an engine announces of itself, from its settings and what its device side decided."""

from __future__ import annotations

import secrets

from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.settings.model import Settings


def engine_info(settings: Settings, specs: DeviceSpecs, *, served_name: str) -> EngineInfo:
    return EngineInfo(
        model=served_name,
        dtype=specs.dtype,
        vocab_size=specs.vocab_size,
        max_model_len=specs.max_model_len,
        num_blocks=specs.num_pages - 1,
        block_size=specs.page_tokens,
        max_num_seqs=specs.max_num_seqs,
        max_batched_tokens=specs.max_batched_tokens,
        max_waiting=settings.scheduler.max_waiting,
        max_logprobs=specs.max_logprobs,
        eos_token_ids=specs.eos_token_ids,
        architectures=specs.architectures,
        model_type=specs.model_type,
        instance_id=secrets.token_hex(8),
        kv_capacity_tokens=(specs.num_pages - 1) * specs.page_tokens,
        defaults=specs.sampling_defaults,
    )
