"""The keys of what an operator sees: cache events, metrics, traces, logs. Sections of `settings.model.Settings`."""

from __future__ import annotations

import attrs
from attrs import validators as v

from tokenspeed.settings.choices import KvEventFormat, LogFormat


@attrs.frozen(kw_only=True)
class KvEventSettings:
    """Publication of prefix-cache events for routers that follow what an engine holds."""

    endpoint: str | None = attrs.field(
        default=None,
        validator=v.optional(v.matches_re(r"(tcp|ipc)://.+")),
        metadata={"help": "ZeroMQ address to publish on, tcp:// or ipc://; default: no events"},
    )
    replay_endpoint: str | None = attrs.field(
        default=None,
        validator=v.optional(v.matches_re(r"(tcp|ipc)://.+")),
        metadata={"help": "address where a subscriber asks for batches it missed; default: no replay"},
    )
    topic: str = attrs.field(default="", metadata={"help": "first frame of every message"})
    format: KvEventFormat = attrs.field(
        default=KvEventFormat.MAPS, metadata={"help": "maps: vLLM's subscribers; arrays: TokenSpeed's"}
    )
    keep_batches: int = attrs.field(
        default=10_000, validator=[v.ge(1), v.le(1 << 20)], metadata={"help": "batches kept for replay"}
    )


@attrs.frozen(kw_only=True)
class MetricsSettings:
    """What is measured, and who gets it."""

    engine: bool = attrs.field(
        default=True, metadata={"help": "measure rounds in the ranks, too; false: the frontend's metrics only"}
    )
    host: str = attrs.field(
        default="127.0.0.1",
        validator=v.min_len(1),
        metadata={"help": "address of metrics.port; 0.0.0.0: all interfaces"},
    )
    port: int | None = attrs.field(
        default=None,
        validator=v.optional(v.and_(v.ge(0), v.le(65535))),
        metadata={
            "help": "HTTP port of the relay's own /metrics, for headless engines; default: none; 0: the kernel picks"
        },
    )
    outputs: tuple[str, ...] = attrs.field(
        default=(),
        metadata={
            "help": "where events go besides: jsonl=FILE, an entry point's name, or package.module:attribute, each with"
            " =ARGUMENT if it takes one"
        },
    )
    queue: int = attrs.field(
        default=1024,
        validator=[v.ge(1), v.le(1 << 20)],
        metadata={
            "help": "messages (a round's events each) that may wait for slow outputs; more are dropped and counted"
        },
    )


@attrs.frozen(kw_only=True)
class TracingSettings:
    """OpenTelemetry spans of requests."""

    endpoint: str | None = attrs.field(
        default=None,
        validator=v.optional(v.matches_re(r"https?://.+")),
        metadata={
            "help": "OTLP/HTTP address of a collector, such as http://127.0.0.1:4318/v1/traces; default: no traces"
        },
    )
    sample: float = attrs.field(
        default=1.0,
        validator=[v.ge(0.0), v.le(1.0)],
        metadata={"help": "share of requests traced, by request id; a caller's traceparent decides for its own"},
    )
    provider: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={"help": "who names a request's trace: a registered provider, or package.module:attribute"},
    )
    queue: int = attrs.field(
        default=2048, validator=[v.ge(1), v.le(1 << 20)], metadata={"help": "ended requests that may wait for export"}
    )
    timeout_s: float = attrs.field(default=10.0, validator=v.gt(0.0), metadata={"help": "how long one export may take"})


@attrs.frozen(kw_only=True)
class LogSettings:
    """What is written down, and how."""

    level: str = attrs.field(
        default="info",
        validator=v.in_(("debug", "info", "warning", "error")),
        metadata={"help": "least severity that is written"},
    )
    format: LogFormat = attrs.field(
        default=LogFormat.TEXT, metadata={"help": "lines for people, or one JSON object a line"}
    )
    interval_s: float = attrs.field(
        default=10.0, validator=v.gt(0.0), metadata={"help": "seconds of work between batch lines; silent when idle"}
    )
    requests: bool = attrs.field(
        default=False,
        metadata={"help": "one line for each ended call, with its ids, and one for each of its sequences"},
    )
    async_logging: bool = attrs.field(
        default=True,
        metadata={
            "help": "lines are written by a thread of their own, which loses them if the output stalls; false: whoever"
            " logs writes, and waits"
        },
    )
