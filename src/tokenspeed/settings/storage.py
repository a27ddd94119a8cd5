"""The keys of the storage tier (L3). A section of `settings.model.Settings`."""

from __future__ import annotations

import attrs
from attrs import validators as v

from tokenspeed.settings.choices import MooncakeProtocol, StorageKind


@attrs.frozen(kw_only=True)
class StorageSettings:
    """Pages of KV that outlive the engine, or that engines share: the tier behind the host tier."""

    backend: StorageKind = attrs.field(
        default=StorageKind.NONE,
        metadata={
            "help": "files: a folder; mooncake: a Mooncake store (the extra `mooncake`); part: the object that a"
            " program hands in as the part `storage`"
        },
    )
    path: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={"help": "of files: the folder; engines on several machines may share it"},
    )
    max_gib: float = attrs.field(
        default=16.0,
        validator=v.gt(0.0),
        metadata={
            "help": "of files: size of the folder, what was used longest ago makes room; of mooncake: memory that this"
            " engine lends to the store"
        },
    )
    namespace: str = attrs.field(
        default="", metadata={"help": "engines of another name, or another model, never see each other's pages"}
    )
    timeout_s: float = attrs.field(
        default=2.0,
        validator=v.gt(0.0),
        metadata={
            "help": "a look-up or fetch that takes longer is given up, and the request computes what did not arrive"
        },
    )
    threads: int = attrs.field(
        default=2, validator=[v.ge(1), v.le(64)], metadata={"help": "threads that look up and fetch; one more stores"}
    )
    min_tokens: int = attrs.field(
        default=64,
        validator=v.ge(0),
        metadata={"help": "prompts shorter than this are computed without a look-up"},
    )
    shutdown_s: float = attrs.field(
        default=5.0,
        validator=v.ge(0.0),
        metadata={"help": "how long an engine that stops waits for what is being stored"},
    )
    mooncake_master: str = attrs.field(
        default="127.0.0.1:50051", validator=v.min_len(1), metadata={"help": "host:port of mooncake_master"}
    )
    mooncake_metadata: str | None = attrs.field(
        default=None,
        validator=v.optional(v.min_len(1)),
        metadata={"help": "URL of Mooncake's metadata server; default: members ask each other"},
    )
    mooncake_host: str = attrs.field(
        default="127.0.0.1",
        validator=v.min_len(1),
        metadata={"help": "this machine's address, at which other members reach it"},
    )
    mooncake_protocol: MooncakeProtocol = attrs.field(
        default=MooncakeProtocol.TCP, metadata={"help": "how pages travel between members"}
    )
    mooncake_devices: str = attrs.field(default="", metadata={"help": "of rdma: names of the network devices"})
