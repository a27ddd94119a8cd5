"""The words an operator can choose from, one enumeration a key."""

from __future__ import annotations

import enum


class Backend(enum.Enum):
    """What runs the model."""

    CPU = "cpu"
    CUDA = "cuda"
    SIMULATED = "simulated"


class Executor(enum.Enum):
    """How forwards follow each other on the device."""

    STREAMS = "streams"
    FUTURES = "futures"


class Accelerator(enum.Enum):
    """A device whose data sheet the simulated backend knows."""

    H200 = "h200"
    H100 = "h100"
    A100 = "a100"
    L4 = "l4"
    TRN2 = "trn2"


class Dtype(enum.Enum):
    """Arithmetic of the forward."""

    FLOAT32 = "float32"


class WeightsMode(enum.Enum):
    """How weights are kept in memory."""

    AUTO = "auto"
    EXACT = "exact"
    FP16 = "fp16"
    NATIVE = "native"
    INT8G32 = "int8g32"


class Forward(enum.Enum):
    """What computes the forward on the CPU."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class KvDtype(enum.Enum):
    """Numbers of the KV pool."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


class ToolParser(enum.Enum):
    """How the model writes tool calls."""

    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    QWEN = "qwen"
    LLAMA3_JSON = "llama3_json"
    PYTHONIC = "pythonic"
    GEMMA = "gemma"


class ReasoningParser(enum.Enum):
    """How the model writes its reasoning."""

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek_r1"
    MISTRAL = "mistral"
    SEED = "seed"


class Policy(enum.Enum):
    """Order of the waiting queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LPM = "lpm"


class Retraction(enum.Enum):
    """What is tried for a running request that must give up its KV pages."""

    SNAPSHOT = "snapshot"
    RECOMPUTE = "recompute"
    ABORT = "abort"


class WritePolicy(enum.Enum):
    """When KV blocks are copied to the host tier: as they become findable, or as they are evicted."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


class StorageKind(enum.Enum):
    """Where pages of KV are kept outside the engine."""

    NONE = "none"
    FILES = "files"
    MOONCAKE = "mooncake"
    PART = "part"


class MooncakeProtocol(enum.Enum):
    """How a Mooncake store moves bytes."""

    TCP = "tcp"
    RDMA = "rdma"


class Gateway(enum.Enum):
    """Whose HTTP server serves: ours, or the SMG gateway."""

    OWN = "own"
    SMG = "smg"


class Transport(enum.Enum):
    """How frontend and engine speak: over ZeroMQ between processes, or within one process."""

    ZMQ = "zmq"
    MEMORY = "memory"


class KvEventFormat(enum.Enum):
    """Encoding of published cache events: maps with a `type` key, or arrays that begin with the name."""

    MAPS = "maps"
    ARRAYS = "arrays"


class GrammarBackend(enum.Enum):
    """What compiles grammars."""

    XGRAMMAR = "xgrammar"
    NONE = "none"


class GrammarFill(enum.Enum):
    """Who fills the token masks of a constrained batch, and when."""

    AUTO = "auto"
    FORWARD = "forward"
    EAGER = "eager"


class LogFormat(enum.Enum):
    """Shape of a log line."""

    TEXT = "text"
    JSON = "json"
