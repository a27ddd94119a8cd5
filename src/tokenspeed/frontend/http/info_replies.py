"""The shapes of what the server tells about itself; names are those that routers and load clients read."""

from __future__ import annotations

import msgspec


class ServerLoad(msgspec.Struct, kw_only=True):
    """`server_load`: sequences in flight."""

    server_load: int


class EngineLoad(msgspec.Struct, kw_only=True):
    """One engine's latest report. `token_usage`: share of the KV pool in use by requests, 0 to 1."""

    dp_rank: int
    alive: bool
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    num_cached_tokens: int
    max_total_num_tokens: int
    token_usage: float


class LoadSum(msgspec.Struct, kw_only=True):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    total_used_tokens: int
    avg_token_usage: float


class Loads(msgspec.Struct, kw_only=True):
    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[EngineLoad]
    aggregate: LoadSum


class ModelInfo(msgspec.Struct, kw_only=True):
    """`model_path`: what other programs load the model and its tokenizer by, as the server was started with it."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True
    max_model_len: int
    vocab_size: int
    dtype: str
    model_type: str
    architectures: list[str]
    has_chat_template: bool
    tool_parser: str
    reasoning_parser: str | None
    weight_version: str


class WeightVersion(msgspec.Struct, kw_only=True):
    """Of the weights that serve; more than one, separated by commas, while engines differ."""

    weight_version: str


class EngineReply(msgspec.Struct, kw_only=True):
    """What an engine registered with, and its load."""

    engine_index: int
    alive: bool
    role: str
    instance_id: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    max_waiting: int
    max_logprobs: int
    max_total_num_tokens: int
    load: EngineLoad


class ServerInfo(msgspec.Struct, kw_only=True):
    """`server`: the settings of the HTTP server, without secrets."""

    version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    max_model_len: int
    dp_size: int
    max_total_num_tokens: int
    server: dict[str, object]
    internal_states: list[EngineReply]
