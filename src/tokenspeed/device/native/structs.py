"""The structures of c/native.h."""

# A class of ctypes declares its fields by a class attribute whose base type is wider than any list.
# mypy: disable-error-code="mutable-override"

from __future__ import annotations

import ctypes as c
import enum


class Format(enum.IntEnum):
    """`ts_format`: how a panel's weights are stored."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8 = 3
    Q4M = 4
    Q8M = 5
    Q8K = 6
    Q4K = 7


class Gate(enum.IntEnum):
    """`ts_activation`."""

    SILU = 0
    GELU_TANH = 1


class Status(enum.IntEnum):
    """`ts_status`: why a step was refused."""

    OK = 0
    BAD_LAYERS = 1
    BAD_ROWS = 2
    BAD_TOKEN = 3
    BAD_PAGE = 4
    BAD_LOGITS = 5
    BAD_WORKSPACE = 6
    BAD_FORMAT = 7


class LinearStruct(c.Structure):
    _fields_ = [
        ("format", c.c_int32),
        ("out_features", c.c_int32),
        ("in_features", c.c_int32),
        ("unused", c.c_int32),
        ("panels", c.c_void_p),
        ("bias", c.c_void_p),
    ]


class LayerStruct(c.Structure):
    _fields_ = [
        ("attn_norm", c.c_void_p),
        ("mlp_norm", c.c_void_p),
        ("attn_post_norm", c.c_void_p),
        ("mlp_post_norm", c.c_void_p),
        ("qk_norm", c.c_void_p),
        ("cache", c.c_int32),
        ("index", c.c_int32),
        ("rope", c.c_int32),
        ("activation", c.c_int32),
        ("q", LinearStruct),
        ("k", LinearStruct),
        ("v", LinearStruct),
        ("o", LinearStruct),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
    ]


class RopeStruct(c.Structure):
    _fields_ = [
        ("frequencies", c.c_void_p),
        ("magnitude", c.c_float),
        ("unused", c.c_int32),
    ]


class ModelStruct(c.Structure):
    _fields_ = [
        ("num_layers", c.c_int32),
        ("hidden", c.c_int32),
        ("heads", c.c_int32),
        ("kv_heads", c.c_int32),
        ("head_dim", c.c_int32),
        ("intermediate", c.c_int32),
        ("vocab", c.c_int32),
        ("num_ropes", c.c_int32),
        ("rms_eps", c.c_float),
        ("embedding_scale", c.c_float),
        ("query_scale", c.c_float),
        ("unused", c.c_int32),
        ("ropes", c.POINTER(RopeStruct)),
        ("norm", c.c_void_p),
        ("embedding", LinearStruct),
        ("head", LinearStruct),
        ("layers", c.POINTER(LayerStruct)),
    ]


class CacheStruct(c.Structure):
    _fields_ = [
        ("pages", c.c_void_p),
        ("page_bytes", c.c_int64),
        ("num_pages", c.c_int32),
        ("page_tokens", c.c_int32),
        ("layers", c.c_int32),
        ("window", c.c_int32),
    ]


class PoolStruct(c.Structure):
    _fields_ = [
        ("caches", c.POINTER(CacheStruct)),
        ("num_caches", c.c_int32),
        ("format", c.c_int32),
    ]


class TableStruct(c.Structure):
    _fields_ = [
        ("blocks", c.c_void_p),
        ("max_blocks", c.c_int64),
    ]


class RowsStruct(c.Structure):
    _fields_ = [
        ("tokens", c.c_int64),
        ("rows", c.c_int64),
        ("wanted", c.c_int64),
        ("token_ids", c.c_void_p),
        ("positions", c.c_void_p),
        ("offsets", c.c_void_p),
        ("contexts", c.c_void_p),
        ("tables", c.POINTER(TableStruct)),
        ("logit_tokens", c.c_void_p),
    ]


class CallStruct(c.Structure):
    _fields_ = [
        ("first", c.c_int32),
        ("last", c.c_int32),
        ("threads", c.c_int32),
        ("unused", c.c_int32),
        ("layers_ready", c.c_void_p),
        ("hidden", c.c_void_p),
        ("logits", c.c_void_p),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64),
    ]


MIRRORED = (
    LinearStruct,
    LayerStruct,
    RopeStruct,
    ModelStruct,
    CacheStruct,
    PoolStruct,
    TableStruct,
    RowsStruct,
    CallStruct,
)
"""In the order of `ts_layout`."""
