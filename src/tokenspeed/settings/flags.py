"""Command-line spellings of keys; names that other engines of this kind use, where the meaning is the same."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Flag:
    """One option of ``tokenspeed serve``.

    Attributes:
        names: spellings; the first is the one shown.
        key: dotted key it sets.
        value: text it sets when given; None: the option takes a value.
    """

    names: tuple[str, ...]
    key: str
    value: str | None = None


def _flag(key: str, *names: str, value: str | None = None) -> Flag:
    return Flag(names=names, key=key, value=value)


FLAGS: tuple[Flag, ...] = (
    _flag("model.source", "--model", "--model-path"),
    _flag("model.served_name", "--served-model-name"),
    _flag("model.max_len_tokens", "--max-model-len", "--context-length"),
    _flag("model.dtype", "--dtype"),
    _flag("model.chat_template", "--chat-template"),
    _flag("model.cache_dir", "--download-dir"),
    _flag("model.offline", "--offline", value="true"),
    _flag("device.backend", "--device", "--backend"),
    _flag("device.executor", "--executor"),
    _flag("device.threads", "--threads"),
    _flag("device.memory_gib", "--memory-gib"),
    _flag("device.memory_fraction", "--memory-fraction", "--gpu-memory-utilization", "--mem-fraction-static"),
    _flag("device.kv_pool_tokens", "--max-total-tokens"),
    _flag("device.kv_dtype", "--kv-cache-dtype"),
    _flag("scheduler.policy", "--scheduling-policy", "--schedule-policy"),
    _flag("scheduler.max_num_seqs", "--max-num-seqs", "--max-running-requests"),
    _flag("scheduler.max_batched_tokens", "--max-num-batched-tokens"),
    _flag("scheduler.chunk_tokens", "--chunk-tokens", "--chunked-prefill-size"),
    _flag("scheduler.max_waiting", "--max-waiting", "--max-queued-requests"),
    _flag("device.async_scheduling", "--async-scheduling", value="true"),
    _flag("device.async_scheduling", "--no-async-scheduling", value="false"),
    _flag("scheduler.overlap", "--disable-overlap-schedule", value="false"),
    _flag("cache.page_tokens", "--block-size", "--page-size"),
    _flag("cache.prefix", "--enable-prefix-caching", value="true"),
    _flag("cache.prefix", "--no-enable-prefix-caching", "--disable-radix-cache", value="false"),
    _flag("cache.host_gib", "--host-cache-gib"),
    _flag("cache.write_policy", "--kvstore-write-policy", "--hicache-write-policy"),
    _flag("parallel.tensor", "--tensor-parallel-size", "--tp-size", "-tp"),
    _flag("parallel.pipeline", "--pipeline-parallel-size", "--pp-size", "-pp"),
    _flag("parallel.data", "--data-parallel-size", "--dp-size", "-dp"),
    _flag("server.host", "--host"),
    _flag("server.port", "--port"),
    _flag("server.api_key", "--api-key"),
    _flag("server.admin_key", "--admin-key", "--admin-api-key"),
    _flag("server.allowed_origins", "--allowed-origins"),
    _flag("server.gateway", "--gateway"),
    _flag("server.request_timeout_s", "--request-timeout"),
    _flag("server.shutdown_timeout_s", "--shutdown-timeout"),
    _flag("server.tool_parser", "--tool-call-parser"),
    _flag("server.reasoning_parser", "--reasoning-parser"),
    _flag("wire.handshake", "--handshake-address"),
    _flag("grammar.backend", "--grammar-backend"),
    _flag("tracing.endpoint", "--otlp-traces-endpoint"),
    _flag("log.level", "--log-level"),
    _flag("log.format", "--log-format"),
    _flag("log.requests", "--enable-log-requests", "--log-requests", value="true"),
    _flag("log.requests", "--disable-log-requests", "--no-enable-log-requests", value="false"),
    _flag("log.async_logging", "--enable-async-logging", value="true"),
    _flag("log.async_logging", "--no-async-logging", value="false"),
)


def familiar_names() -> tuple[tuple[str, str], ...]:
    """(name with underscores, key) for every spelling above: what people write in a file by habit."""
    return tuple((name.lstrip("-").replace("-", "_"), flag.key) for flag in FLAGS for name in flag.names)
