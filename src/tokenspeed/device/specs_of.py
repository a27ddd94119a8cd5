"""The numbers and names that planning gets to know of a built device side."""

from __future__ import annotations

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.device.kv.host_build import HostPlan
from tokenspeed.device.memory import MemoryPlan
from tokenspeed.device.sampling.registry import names_of
from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.settings.model import Settings


def vocabulary_of(checkpoint: Checkpoint) -> int:
    """Ids that have a text and a logit: embeddings are often padded, tokenizers sometimes grown."""
    return min(checkpoint.config.vocab_size, checkpoint.tokenizer_vocab_size)


def specs_of(settings: Settings, checkpoint: Checkpoint, memory: MemoryPlan, host: HostPlan) -> DeviceSpecs:
    """Settings and checkpoint as resolved by the build. Nothing in it can act."""
    config = checkpoint.config
    return DeviceSpecs(
        backend=settings.device.backend.value,
        executor=settings.device.executor.value,
        model_name=settings.model.served_name or checkpoint.served_name,
        model_type=config.model_type,
        architectures=config.architectures,
        dtype=settings.model.dtype.value,
        vocab_size=vocabulary_of(checkpoint),
        max_model_len=memory.max_model_len,
        num_pages=memory.num_pages,
        page_tokens=memory.layout.page_tokens,
        groups=memory.layout.groups,
        host_parents=host.parents,
        images=host.images,
        max_num_seqs=settings.scheduler.max_num_seqs,
        spare_slots=settings.spare_slots,
        max_batched_tokens=settings.scheduler.max_batched_tokens,
        max_logprobs=min(settings.sampling.max_logprobs, vocabulary_of(checkpoint)),
        logits_processors=names_of(settings.sampling.logits_processors),
        eos_token_ids=checkpoint.eos_token_ids,
        sampling_defaults=checkpoint.generation if settings.model.generation_defaults else SamplingParams(),
        weights_bytes=memory.weights_bytes,
        kv_pool_bytes=memory.pool_bytes,
    )
