"""What a request may ask of an engine: pure checks, used by the frontend and again at the engine's ingress.

Every check is written so that a value that is not a number fails it, and so that a value of the
wrong type is a fault and never an exception. All faults of a request are returned, not the first.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

import attrs
import numpy as np
import numpy.typing as npt

from tokenspeed.plane.grammar import GRAMMAR_KINDS
from tokenspeed.plane.messages import GenerateRequest, SamplingParams

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_IDS = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, MAX_PROCESSORS = 1024, 8192, 16
MAX_STOP_TOKEN_IDS = 128
MAX_TOKENS = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
SHOWN_CHARS = 80
"""A fault quotes at most this much of the offending value."""


@attrs.frozen(kw_only=True)
class Fault:
    """One thing wrong with a request.

    Attributes:
        field: the name the client used, with an index or key where that helps.
        value: the offending value as text, shortened; always valid UTF-8.
        allowed: what would have been accepted.
    """

    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value} is not allowed; expected {self.allowed}"


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = SHOWN_CHARS


def shown(value: object) -> str:
    """`value` for an error message: its repr, cut to :data:`SHOWN_CHARS`, with nothing UTF-8 cannot hold."""
    try:
        text = _ShortRepr().repr(value)
    except ValueError:  # an int of more digits than the interpreter converts
        text = "a very large integer"
    return _short(text)


def _short(text: str) -> str:
    clean = text[: 2 * SHOWN_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")
    return clean if len(clean) <= SHOWN_CHARS else clean[: SHOWN_CHARS - 1] + "…"


def fault(field: str, value: object, allowed: str) -> Fault:
    """A fault; `field` may be a client's own key and is cleaned like the value."""
    return Fault(field=_short(field), value=shown(value), allowed=allowed)


def number_fault(field: str, value: object, low: float, high: float, *, above: bool = False) -> Iterable[Fault]:
    """A fault unless ``low <= value <= high`` (``low < value`` with `above`); NaN is out of every range."""
    fits = False
    if isinstance(value, int | float) and not isinstance(value, bool):
        fits = (low < value if above else low <= value) and value <= high
    if not fits:
        sign = "<" if above else "<="
        yield fault(field, value, f"a number with {low:g} {sign} value <= {high:g}")


def int_fault(field: str, value: object, low: int, high: int) -> Iterable[Fault]:
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    if not fits:
        yield fault(field, value, f"an integer from {low} to {high}")


def token_fault(field: str, value: object, vocab_size: int) -> Iterable[Fault]:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
    if not fits:
        yield fault(field, value, f"a token id from 0 to {vocab_size - 1}")


def sampling_faults(params: SamplingParams, *, vocab_size: int) -> tuple[Fault, ...]:
    """Everything wrong with `params` for an engine whose token ids are in ``[0, vocab_size)``.

    Field names are those of the OpenAI API where it has one (``max_tokens``, ``min_tokens``).
    A `max_new_tokens` larger than the context leaves room for is no fault: it is cut to what fits.
    """
    return (
        *_budget_faults(params),
        *_number_faults(params),
        *_id_faults(params, vocab_size),
        *_choice_faults(params, vocab_size),
        *_grammar_faults(params),
    )


def _budget_faults(params: SamplingParams) -> Iterable[Fault]:
    most, least = params.max_new_tokens, params.min_new_tokens
    before = 0
    if most is not None:
        for found in int_fault("max_tokens", most, 1, MAX_TOKENS):
            before += 1
            yield found
    for found in int_fault("min_tokens", least, 0, MAX_TOKENS):
        before += 1
        yield found
    if not before and most is not None and least > most:
        yield fault("min_tokens", least, f"at most max_tokens ({most})")


def _number_faults(params: SamplingParams) -> Iterable[Fault]:
    if params.temperature is not None:
        yield from number_fault("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if params.top_p is not None:
        yield from number_fault("top_p", params.top_p, 0.0, 1.0, above=True)
    if params.top_k is not None:
        yield from int_fault("top_k", params.top_k, -1, MAX_TOKENS)
    if params.min_p is not None:
        yield from number_fault("min_p", params.min_p, 0.0, 1.0)
    yield from number_fault("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    yield from number_fault("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    if params.repetition_penalty is not None:
        yield from number_fault(
            "repetition_penalty", params.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, above=True
        )
    if params.seed is not None:
        yield from int_fault("seed", params.seed, MIN_SEED, MAX_SEED)


def _id_faults(params: SamplingParams, vocab_size: int) -> Iterable[Fault]:
    if len(params.logit_bias) > MAX_LOGIT_BIAS_IDS:
        yield fault("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS_IDS} entries")
    else:
        for token, bias in params.logit_bias:
            yield from token_fault("logit_bias key", token, vocab_size)
            yield from number_fault(f"logit_bias[{shown(token)}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield fault("stop_token_ids", f"{len(params.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    else:
        for at, token in enumerate(params.stop_token_ids):
            yield from token_fault(f"stop_token_ids[{at}]", token, vocab_size)


def _choice_faults(params: SamplingParams, vocab_size: int) -> Iterable[Fault]:
    """Of fields that take tokens out of the choice, and of registered processors."""
    words, total = params.bad_words, sum(len(word) for word in params.bad_words)
    if len(words) > MAX_BAD_WORDS or total > MAX_BAD_WORD_TOKENS:
        allowed = f"at most {MAX_BAD_WORDS} sequences of {MAX_BAD_WORD_TOKENS} tokens in all"
        yield fault("bad_words", f"{len(words)} sequences of {total} tokens", allowed)
    else:
        for at, word in enumerate(words):
            if not word:
                yield fault(f"bad_words[{at}]", word, "at least one token")
            for token in word:
                yield from token_fault(f"bad_words[{at}]", token, vocab_size)
    if len(params.allowed_token_ids) > vocab_size:
        yield fault("allowed_token_ids", f"{len(params.allowed_token_ids)} ids", f"at most {vocab_size} ids")
    else:
        for at, token in enumerate(params.allowed_token_ids):
            yield from token_fault(f"allowed_token_ids[{at}]", token, vocab_size)
    if params.allowed_token_ids and any(getattr(params, kind) is not None for kind in GRAMMAR_KINDS):
        yield fault("allowed_token_ids", "together with a grammar", "one of the two, since they could leave no token")
    if len(params.processors) > MAX_PROCESSORS:
        yield fault("logits_processors", f"{len(params.processors)} processors", f"at most {MAX_PROCESSORS}")


def _grammar_faults(params: SamplingParams) -> Iterable[Fault]:
    given = [kind for kind in GRAMMAR_KINDS if getattr(params, kind) is not None]
    for kind in given:
        source: object = getattr(params, kind)
        if not isinstance(source, str) or not source:
            yield fault(kind, source, "a text that is not empty")
    if len(given) > 1:
        yield fault(" and ".join(given), "a value for each", "at most one grammar in a request")


def prompt_faults(
    ids: npt.NDArray[np.int32] | tuple[int, ...] | list[int],
    *,
    vocab_size: int,
    max_model_len: int,
    field: str = "prompt",
) -> tuple[Fault, ...]:
    """Everything wrong with a prompt's token ids: none, too many, outside the vocabulary."""
    count = len(ids)
    if count == 0:
        return (fault(field, "", "at least one token"),)
    if count >= max_model_len:
        return (
            fault(
                field,
                f"{count} tokens",
                f"at most {max_model_len - 1} tokens, since prompt and output together have {max_model_len}",
            ),
        )
    return token_faults(field, ids, vocab_size=vocab_size)


def token_faults(
    field: str, ids: npt.NDArray[np.int32] | tuple[int, ...] | list[int], *, vocab_size: int
) -> tuple[Fault, ...]:
    """The first of `ids` that is no token id of this vocabulary, if any."""
    try:
        array = np.asarray(ids)
        if array.ndim == 1 and array.dtype.kind in "iu":  # ints beyond 64 bits make an object array
            bad = np.flatnonzero((array < 0) | (array >= vocab_size))
            if bad.size == 0:
                return ()
            return tuple(token_fault(f"{field}[{bad[0]}]", int(array[bad[0]]), vocab_size))
    except (ValueError, OverflowError):
        pass
    for at, token in enumerate(ids):
        for found in token_fault(f"{field}[{at}]", token, vocab_size):
            return (found,)
    return ()


def request_faults(
    request: GenerateRequest, *, vocab_size: int, max_model_len: int, max_logprobs: int
) -> tuple[Fault, ...]:
    """Everything wrong with one request as an engine receives it."""
    prompt_len = len(request.input_ids)
    return (
        *prompt_faults(request.input_ids, vocab_size=vocab_size, max_model_len=max_model_len),
        *sampling_faults(request.sampling, vocab_size=vocab_size),
        *int_fault("top_logprobs", request.top_logprobs, 0, min(max_logprobs, vocab_size)),
        *int_fault("prompt_logprobs", request.prompt_logprobs, -1, max(prompt_len - 1, -1)),
        *int_fault("priority", request.priority, -(2**31), 2**31 - 1),
    )
