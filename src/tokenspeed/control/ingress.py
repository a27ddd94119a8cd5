"""Check a request against what this engine serves, fill in its defaults, give it a row (IS-2..4).

Holds no reference to loop, scheduler or plane; the scheduler's lookup comes in as an argument.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import attrs

from tokenspeed.plane.checks import request_faults
from tokenspeed.plane.grammar import GRAMMAR_KINDS, GrammarSource
from tokenspeed.plane.messages import NO_TOP_K, GenerateRequest, Refusal, SamplingParams, frozen_tokens
from tokenspeed.plane.plan import EMPTY_INT32, Sampling, Seat, int32
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.plane.table import RequestTable

log = logging.getLogger("tokenspeed.ingress")


@attrs.frozen(kw_only=True)
class Intake:
    """What came of a round's requests: rows to submit, and refusals for the rest."""

    rows: tuple[int, ...]
    refusals: tuple[Refusal, ...]


NOTHING_CAME = Intake(rows=(), refusals=())


@attrs.frozen(kw_only=True, eq=False)
class Ingress:
    """Writer of the table's identity columns.

    Attributes:
        max_waiting: requests that may wait for admission; beyond that the answer is 429.
        grammar_refusal: why a request's grammar cannot be served, or "".
    """

    specs: DeviceSpecs
    table: RequestTable
    max_waiting: int
    grammar_refusal: Callable[[SamplingParams], str]

    def admit(
        self,
        requests: tuple[GenerateRequest, ...],
        *,
        holds: Callable[[int], bool],
        buffers: Callable[[str], bool],
        waiting: Callable[[], int],
    ) -> Intake:
        """Rows for the requests that pass; duplicates are dropped before anything is said of them (IS-6..11).

        Args:
            holds: the scheduler's lookup by row.
            buffers: whether a pause buffers this id.
            waiting: requests waiting in the scheduler; asked once, and only if there are requests.
        """
        if not requests:
            return NOTHING_CAME
        room = self.max_waiting - waiting()
        rows: list[int] = []
        refusals: list[Refusal] = []
        came: set[str] = set()
        for request in requests:
            held = self.table.row_of(request.rid)
            again = request.rid in came  # whatever became of the first: it was the client's answer (IS-6)
            came.add(request.rid)
            if again or buffers(request.rid) or (held is not None and self.table.output.owned[held]):
                log.warning("request %s: dropped, an id that is still being served", request.rid)
            elif held is not None and holds(held):
                refusals.append(
                    _refusal(request, 409, "rid", "this id has just ended and is not free yet; use a new id")
                )
            elif refusal := self._fault(request):
                refusals.append(refusal)
            elif len(rows) >= room:
                text = f"{self.max_waiting} requests are already waiting (scheduler.max_waiting); retry later"
                refusals.append(_refusal(request, 429, "", text))
            else:
                rows.append(self._add(request))
        return Intake(rows=tuple(rows), refusals=tuple(refusals))

    def rows_of(self, rids: tuple[str, ...]) -> tuple[int, ...]:
        """Rows of live requests; an unknown id is no fault, its request has ended (INDEX H39)."""
        found = []
        for rid in rids:
            row = self.table.row_of(rid)
            if row is None:
                log.debug("abort of %s: no such request", rid)
            else:
                found.append(row)
        return tuple(found)

    def seats(self, rows: tuple[int, ...]) -> tuple[Seat, ...]:
        """What the device must know of requests that got a slot in this plan."""
        return tuple([self._seat(row) for row in rows]) if rows else ()

    def _seat(self, row: int) -> Seat:
        identity = self.table.identity
        sampling = identity.sampling[row]
        # A copy: the table's row belongs to another request once the slot does.
        history = int32(self.table.tokens_of(row)) if sampling.uses_history else EMPTY_INT32
        return Seat(
            slot=int(self.table.schedule.slot[row]),
            row=row,
            rid=identity.rid[row],
            sampling=sampling,
            prompt_len=int(identity.prompt_len[row]),
            history=history,
        )

    def _fault(self, request: GenerateRequest) -> Refusal | None:
        if request.kind != "generate":
            return _refusal(request, 400, "kind", f"{request.kind!r} requests are not supported by this engine yet")
        if request.unsupported:
            names = ", ".join(request.unsupported)
            return _refusal(request, 400, request.unsupported[0], f"{names}: not supported by this engine yet")
        if text := self.grammar_refusal(request.sampling):
            return _refusal(request, 400, text.partition(":")[0], text)
        for name, _ in request.sampling.processors:
            if name not in self.specs.logits_processors:
                known = ", ".join(self.specs.logits_processors) or "none"
                text = f"no processor is called {name!r:.60}; this engine has: {known} (sampling.logits_processors)"
                return _refusal(request, 400, "logits_processors", text)
        faults = request_faults(
            request,
            vocab_size=self.specs.vocab_size,
            max_model_len=self.specs.max_model_len,
            max_logprobs=self.specs.max_logprobs,
        )
        if faults:
            return _refusal(request, 400, faults[0].field, "; ".join(str(fault) for fault in faults))
        return None

    def _add(self, request: GenerateRequest) -> int:
        wanted, defaults = request.sampling, self.specs.sampling_defaults
        room = self.specs.max_model_len - len(request.input_ids)
        asked = wanted.max_new_tokens if wanted.max_new_tokens is not None else defaults.max_new_tokens
        budget = room if asked is None else min(asked, room)
        eos = frozenset(self.specs.eos_token_ids)
        extra = frozenset(wanted.stop_token_ids) - (frozenset() if wanted.ignore_eos else eos)
        wants_logprobs = request.return_logprob or request.top_logprobs > 0
        return self.table.add(
            rid=request.rid,
            tokens=frozen_tokens(request.input_ids),
            max_new=budget,
            sampling=resolve_sampling(wanted, defaults, rid=request.rid, eos=eos, budget=budget),
            priority=request.priority,
            logprobs=request.top_logprobs if wants_logprobs else -1,
            prompt_from=request.prompt_logprobs,
            eos_ends=not wanted.ignore_eos,
            extra_stops=extra,
            salt=request.cache_salt,
            trace=request.trace,
        )


def resolve_sampling(
    wanted: SamplingParams, defaults: SamplingParams, *, rid: str, eos: frozenset[int], budget: int
) -> Sampling:
    """Fill every gap from the checkpoint's defaults, then from neutral values.

    A missing seed is derived from `rid`, so that a run can be repeated from its log.
    """

    def pick(mine: float | None, default: float | None, neutral: float) -> float:
        if mine is not None:
            return mine
        return default if default is not None else neutral

    top_k = int(pick(wanted.top_k, defaults.top_k, 0))
    seed = wanted.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little")
    stops = frozenset(wanted.stop_token_ids) | (frozenset() if wanted.ignore_eos else eos)
    return Sampling(
        temperature=pick(wanted.temperature, defaults.temperature, 1.0),
        top_p=pick(wanted.top_p, defaults.top_p, 1.0),
        top_k=0 if top_k <= 0 or top_k >= NO_TOP_K else top_k,
        min_p=pick(wanted.min_p, defaults.min_p, 0.0),
        frequency_penalty=wanted.frequency_penalty,
        presence_penalty=wanted.presence_penalty,
        repetition_penalty=pick(wanted.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=wanted.logit_bias,
        seed=seed & ((1 << 64) - 1),
        bad_words=wanted.bad_words,
        allowed_token_ids=wanted.allowed_token_ids,
        processors=wanted.processors,
        grammar=grammar_of(wanted),
        min_new_tokens=min(wanted.min_new_tokens, budget),
        banned_until_min=tuple(sorted(stops)) if wanted.min_new_tokens > 0 else (),
    )


def grammar_of(wanted: SamplingParams) -> GrammarSource | None:
    """What holds the output; requests with more than one do not get here."""
    given = ((kind, getattr(wanted, kind)) for kind in GRAMMAR_KINDS)
    return next((GrammarSource(kind=kind, text=text) for kind, text in given if text is not None), None)


def _refusal(request: GenerateRequest, status: int, field: str, message: str) -> Refusal:
    text = message if not field or message.startswith(field) else f"{field}: {message}"
    return Refusal(rid=request.rid, status=status, field=field, message=text)
