"""Every kernel in Triton, for devices it compiles for; projections are torch's."""

from __future__ import annotations

from tokenspeed.device.kernels.linear import packed_linear
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.device.kernels.triton.gate_mul import gelu_tanh_mul, silu_mul
from tokenspeed.device.kernels.triton.gathered import gathered_attention
from tokenspeed.device.kernels.triton.kv_move import kv_gather, kv_write
from tokenspeed.device.kernels.triton.paged_decode import paged_decode
from tokenspeed.device.kernels.triton.paged_prefill import fresh_attention, paged_prefill
from tokenspeed.device.kernels.triton.pages import copy_pages, zero_pages
from tokenspeed.device.kernels.triton.rms_norm import gemma_rms_norm, rms_norm
from tokenspeed.device.kernels.triton.rotary import rotary
from tokenspeed.device.kernels.triton.sample import sample

TRITON_KERNELS = Kernels(
    linear=packed_linear,
    rms_norm=rms_norm,
    gemma_rms_norm=gemma_rms_norm,
    rotary=rotary,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    kv_write=kv_write,
    kv_gather=kv_gather,
    decode_attention=gathered_attention,
    prefill_attention=gathered_attention,
    fresh_attention=fresh_attention,
    paged_decode=paged_decode,
    paged_prefill=paged_prefill,
    sample=sample,
    copy_pages=copy_pages,
    zero_pages=zero_pages,
    follows_tables=True,
)
