"""What a generation may ask for: the one validation of the HTTP server and of the Python API.

All faults come back at once. What an engine can check without text (sampling, token ids, lengths)
is in `plane.checks`, which its ingress uses too.

A prompt must leave room for at least one token. A `max_tokens` beyond what then fits is no fault:
it is cut, and the choice ends with ``length``. Clients send one number to models of any context.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.plane.checks import Fault, fault, int_fault, number_fault, prompt_faults, sampling_faults
from tokenspeed.plane.messages import EngineInfo

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_SALT_BYTES = 256
MAX_TIMEOUT_S = 86400.0
MAX_PRIORITY = 2**31 - 1


def input_faults(
    inp: GenerationInput, info: EngineInfo, *, max_choices: int, field: str = "prompt"
) -> tuple[Fault, ...]:
    """Everything wrong with `inp` for an engine that registered as `info`.

    Args:
        field: what the caller calls the prompt.
    """
    return (
        *prompt_faults(inp.prompt_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len, field=field),
        *sampling_faults(inp.sampling, vocab_size=info.vocab_size),
        *stop_faults(inp.stop),
        *int_fault("n", inp.n, 1, max_choices),
        *_logprob_faults(inp, info),
        *int_fault("priority", inp.priority, -MAX_PRIORITY - 1, MAX_PRIORITY),
        *_other_faults(inp),
    )


def stop_faults(stop: tuple[str, ...]) -> Iterable[Fault]:
    if len(stop) > MAX_STOP_STRINGS:
        yield fault("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        return
    for at, text in enumerate(stop):
        fits = isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS
        if not fits or not encodable(text):
            yield fault(f"stop[{at}]", text, f"a string of 1 to {MAX_STOP_CHARS} valid characters")


def encodable(text: str) -> bool:
    """Whether `text` has a UTF-8 form: lone surrogates have none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _logprob_faults(inp: GenerationInput, info: EngineInfo) -> Iterable[Fault]:
    most = min(info.max_logprobs, info.vocab_size)
    if inp.logprobs is not None:
        yield from int_fault("logprobs", inp.logprobs, 0, most)
    if inp.prompt_logprobs is not None:
        yield from int_fault("prompt_logprobs", inp.prompt_logprobs, 0, most)


def _other_faults(inp: GenerationInput) -> Iterable[Fault]:
    if len(inp.cache_salt) > MAX_SALT_BYTES:
        yield fault("cache_salt", f"{len(inp.cache_salt)} bytes", f"at most {MAX_SALT_BYTES} bytes")
    if inp.timeout_s is not None:
        yield from number_fault("timeout_s", inp.timeout_s, 0.0, MAX_TIMEOUT_S, above=True)
