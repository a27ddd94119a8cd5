"""What a frontend and an engine say to each other, as plain values.

The wire room turns these into frames and back; ingress and output are the only control modules
that read or make them. A request is known by its ``rid`` and by nothing else (FW-14).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, overload

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.plane.operations import AskOp, CloseGroupOp, DrainedOp, OpenGroupOp, ProfileOp, ResumeMemoryOp

Int32Array: TypeAlias = npt.NDArray[np.int32]
IndexArray: TypeAlias = npt.NDArray[np.int64]
"""Rows or slots that index columns; numpy converts an index of any other type at every use."""
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_TOP_K = 1 << 30
"""``top_k`` at or above this means: no restriction (the value frontends of this family send)."""

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow float32 logits."""


def frozen_tokens(ids: npt.ArrayLike) -> Int32Array:
    """A private, read-only int32 copy of `ids` (shape ``[tokens]``)."""
    array = np.array(ids, dtype=np.int32).reshape(-1)
    array.setflags(write=False)
    return array


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How one request wants to be sampled, as received; None means: the engine's default.

    Attributes:
        max_new_tokens: tokens to generate at most; None: as many as fit the context.
        min_new_tokens: no end of any kind before this many tokens.
        temperature: below :data:`GREEDY_BELOW` is greedy.
        top_k: keep the k likeliest tokens; None, -1, 0 or at least :data:`NO_TOP_K`: all.
        logit_bias: pairs (token id, value added to that logit).
        seed: repeats a request's draws in any batch; None: derived from the rid.
        stop_token_ids: ids that end the request besides the model's own EOS ids.
        ignore_eos: the model's EOS ids do not end the request (ids in `stop_token_ids` still do).
        json_schema, regex, ebnf, structural_tag: a grammar; at most one.
        bad_words: token sequences that are not completed.
        allowed_token_ids: no other token is drawn; (): all.
        processors: registered logits processors, by name, each with its argument as JSON text.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    processors: tuple[tuple[str, str], ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class GenerateRequest:
    """One sequence to generate.

    Attributes:
        rid: the client's id; unique among live requests.
        input_ids: int32 ``[prompt_tokens]``, read-only.
        return_logprob: send the log-probability of each new token.
        top_logprobs: alternatives to send for each new token (0: none).
        prompt_logprobs: first prompt position to send log-probabilities for; -1: none.
        kind: request type; this build serves ``generate`` only and refuses the rest.
        cache_salt: separates prefix-cache entries; b"" is the shared cache.
        priority: lower is served earlier under the priority policy.
        created_s: sender's wall clock, for logs only.
    """

    rid: str
    input_ids: Int32Array
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    return_logprob: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int = -1
    stream: bool = True
    kind: str = "generate"
    cache_salt: bytes = b""
    priority: int = 0
    created_s: float = 0.0
    unsupported: tuple[str, ...] = ()
    """Names of wire fields that were set and that this build does not serve (images, LoRA, …)."""
    trace: str = ""
    """What the request's spans belong to, a W3C ``traceparent``; "": nothing."""


@attrs.frozen(kw_only=True)
class AbortRequest:
    """The client no longer wants these; unknown ids are ignored.

    Attributes:
        prefixes: requests whose ids begin with one of these are meant, too.
        every: all requests that arrived before this message.
    """

    rids: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    every: bool = False


class PauseMode(enum.Enum):
    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@attrs.frozen(kw_only=True)
class PauseOp:
    call_id: int
    mode: PauseMode


@attrs.frozen(kw_only=True)
class ResumeOp:
    call_id: int


@attrs.frozen(kw_only=True)
class FlushCacheOp:
    call_id: int
    timeout_s: float = 0.0


@attrs.frozen(kw_only=True)
class UnsupportedOp:
    """A known control method that this build does not carry out; answered with an error."""

    call_id: int
    method: str


ControlOp: TypeAlias = (
    PauseOp
    | ResumeOp
    | FlushCacheOp
    | DrainedOp
    | ResumeMemoryOp
    | OpenGroupOp
    | CloseGroupOp
    | AskOp
    | ProfileOp
    | UnsupportedOp
)
FrontendMessage: TypeAlias = GenerateRequest | AbortRequest | ControlOp


class Finish(enum.IntEnum):
    """Why a request ended; RUNNING is 0 so that a zeroed column means "not yet"."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


FINISH_WORDS: tuple[str, ...] = ("", "stop", "length", "abort")


@attrs.frozen(kw_only=True)
class Refusal:
    """Why a request was not accepted, or was ended by the engine.

    Attributes:
        rid: the request.
        status: HTTP status that says the same: 400 client, 409 id still held, 429 queue full,
            500 engine, 503 not now.
        message: names the field, the value and what is allowed.
        field: the offending field, or "".
    """

    rid: str
    status: int
    message: str
    field: str = ""


@attrs.frozen(kw_only=True)
class TopLogprobs:
    """Alternatives at one position: token ids and their log-probabilities, best first."""

    ids: tuple[int, ...]
    values: tuple[float, ...]


@attrs.frozen(kw_only=True)
class LoadReport:
    """What routing needs to know of one engine (FW-24); counts of requests and of LCM parents."""

    running: int = 0
    waiting: int = 0
    resident_blocks: int = 0
    active_blocks: int = 0
    total_blocks: int = 0


@attrs.frozen(eq=False)
class OneToken(Sequence[list[int]]):
    """A column of new tokens in which every request has exactly one; equal to the list of lists it stands for.

    Attributes:
        tokens: one for each request.
    """

    tokens: Sequence[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[list[int]]:
        return ([token] for token in self.tokens)

    @overload
    def __getitem__(self, at: int) -> list[int]: ...

    @overload
    def __getitem__(self, at: slice) -> list[list[int]]: ...

    def __getitem__(self, at: int | slice) -> list[int] | list[list[int]]:
        return [self.tokens[at]] if isinstance(at, int) else [[token] for token in self.tokens[at]]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class OutputBatch(NamedTuple):
    """All that one round tells the frontend; columns of equal length, one entry a request.

    Columns are read and never changed: rounds share those that stay the same. A tuple, since each
    round makes one.

    Attributes:
        output_ids: new tokens only.
        finished: a :class:`Finish` value.
        completion_tokens: cumulative.
        logprobs: one float for each new token, or [] where not asked for.
        top_logprobs: one entry for each new token, or [].
        prompt_logprobs: values for prompt positions (null at position 0), sent once; or [].
        prompt_logprob_ids: the prompt's tokens at the positions of `prompt_logprobs`; empty: [] for every request.
        status, messages: for ABORT only; 0 and "" otherwise.
        load: the snapshot of the round's end; None: none taken.
        weight_version: of the weights that every token of this batch was computed with; "": not told.
    """

    rids: Sequence[str]
    output_ids: Sequence[Sequence[int]]
    finished: Sequence[int]
    prompt_tokens: Sequence[int]
    completion_tokens: Sequence[int]
    cached_tokens: Sequence[int]
    logprobs: Sequence[Sequence[float]]
    top_logprobs: Sequence[Sequence[TopLogprobs]]
    prompt_logprobs: Sequence[list[float | None]]
    prompt_top_logprobs: Sequence[list[TopLogprobs | None]]
    status: Sequence[int]
    messages: Sequence[str]
    load: LoadReport | None = None
    engine_index: int = 0
    weight_version: str = ""
    prompt_logprob_ids: Sequence[list[int]] = ()


@attrs.frozen(kw_only=True)
class ControlReply:
    """Attributes: `message`: why not, or what was asked for."""

    call_id: int
    success: bool
    message: str = ""


@attrs.frozen(kw_only=True)
class EngineGone:
    """The engine will send nothing more; `reason` is for people."""

    reason: str


EngineEvent: TypeAlias = OutputBatch | ControlReply | EngineGone


@attrs.frozen(kw_only=True)
class KvEventFeed:
    """Where an engine's cache events are published (KM-1).

    Attributes:
        endpoint, replay_endpoint: addresses that the engine has bound. As written in the settings, they are those of
            rank 0, and rank r's ports are r higher; a port that the kernel picked is told as picked.
        keep_batches: that a subscriber can ask for again.
        max_queued, high_water: batches that wait for the publishing thread, and for one slow subscriber, before more
            are dropped.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    keep_batches: int
    max_queued: int
    high_water: int


@attrs.frozen(kw_only=True)
class EngineInfo:
    """What an engine tells its frontend when it registers (FW-7..13).

    Attributes:
        vocab_size: token ids are in ``[0, vocab_size)``; the smaller of tokenizer and logits width.
        max_model_len: prompt plus output tokens of one request.
        num_blocks, block_size: KV pool in LCM parents, tokens of one.
        max_waiting: requests the engine queues before it answers 429.
        max_logprobs: alternatives a request may ask for.
        kv_capacity_tokens: tokens the whole KV pool holds in this layout; 0: not told.
        kv_events: told to peers, which this package's frontend has no use for; None: this engine publishes none.
    """

    model: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    max_waiting: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    request_types: tuple[str, ...] = ("add", "abort", "control")
    engine_index: int = 0
    engine_count: int = 1
    role: str = "null"
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    instance_id: str = ""
    kv_capacity_tokens: int = 0
    kv_events: KvEventFeed | None = None
    defaults: SamplingParams = attrs.field(factory=SamplingParams)
