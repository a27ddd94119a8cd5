"""How a Python caller says what to generate; the HTTP server has its own request types."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.plane.messages import Int32Array, SamplingParams

DEFAULT_MAX_TOKENS = 128


def _strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(ids)


@attrs.frozen(kw_only=True)
class SamplingOptions:
    """Sampling of one or many prompts; None means: the checkpoint's default.

    Attributes:
        max_tokens: tokens to generate at most; None: as many as fit the context.
        temperature: 0 is greedy.
        stop: the text ends right before the first of these.
        n: choices for each prompt.
        seed: makes random draws repeatable; choice i uses ``seed + i``.
        logprobs: alternatives to report for each token; None: no log-probabilities.
        json_schema, regex, ebnf, structural_tag: what the answer is held to, as text; at most one.
        bad_words: token sequences that are not completed. allowed_token_ids: no other token is drawn.
        processors: registered logits processors by name, each with its argument as JSON text.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    timeout_s: float | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    processors: tuple[tuple[str, str], ...] = ()

    def with_prompt(self, prompt_ids: Int32Array) -> GenerationInput:
        """This sampling for one prompt, int32 ``[tokens]``."""
        return GenerationInput(
            prompt_ids=prompt_ids,
            sampling=SamplingParams(
                max_new_tokens=self.max_tokens,
                min_new_tokens=self.min_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                seed=self.seed,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                json_schema=self.json_schema,
                regex=self.regex,
                ebnf=self.ebnf,
                structural_tag=self.structural_tag,
                bad_words=self.bad_words,
                allowed_token_ids=self.allowed_token_ids,
                processors=self.processors,
            ),
            stop=self.stop,
            include_stop=self.include_stop,
            n=self.n,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            timeout_s=self.timeout_s,
        )
