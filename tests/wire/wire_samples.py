"""Values and strategies the wire's tests share."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import strategies as st

from tokenspeed.plane.messages import (
    EngineInfo,
    Finish,
    GenerateRequest,
    LoadReport,
    OutputBatch,
    SamplingParams,
    TopLogprobs,
    frozen_tokens,
)

INFO = EngineInfo(
    model="toy",
    dtype="float32",
    vocab_size=96,
    max_model_len=128,
    num_blocks=32,
    block_size=16,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_waiting=8,
    max_logprobs=5,
    eos_token_ids=(2, 7),
    architectures=("ToyForCausalLM",),
    model_type="toy",
    instance_id="here",
    kv_capacity_tokens=500,
    defaults=SamplingParams(temperature=0.6, top_p=0.9, stop_token_ids=(3,)),
)


def request(rid: str = "r", ids: tuple[int, ...] = (1, 2, 3), **fields: Any) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=frozen_tokens(ids), **fields)


def plain(value: GenerateRequest) -> dict[str, Any]:
    """A request as comparable values."""
    fields = attrs.asdict(value, recurse=False)
    fields["input_ids"] = value.input_ids.tolist()
    return fields


def batch(*rids: str, load: LoadReport | None = None, **columns: Any) -> OutputBatch:
    n = len(rids)
    fields: dict[str, Any] = {
        "rids": list(rids),
        "output_ids": [[5] for _ in rids],
        "finished": [int(Finish.RUNNING)] * n,
        "prompt_tokens": [3] * n,
        "completion_tokens": [1] * n,
        "cached_tokens": [0] * n,
        "logprobs": [[] for _ in rids],
        "top_logprobs": [[] for _ in rids],
        "prompt_logprobs": [[] for _ in rids],
        "prompt_top_logprobs": [[] for _ in rids],
        "prompt_logprob_ids": [[] for _ in rids],
        "status": [0] * n,
        "messages": [""] * n,
        "load": load,
    }
    return OutputBatch(**{**fields, **columns})


LOAD = LoadReport(running=2, waiting=3, resident_blocks=20, active_blocks=11, total_blocks=31)
TOP = TopLogprobs(ids=(5, 9), values=(-0.25, -1.5))

text = st.text(max_size=12)
token = st.integers(0, (1 << 31) - 1)
number = st.floats(allow_nan=False, width=64)
maybe = st.none

sampling_params = st.builds(
    SamplingParams,
    max_new_tokens=maybe() | st.integers(0, 1 << 40),
    min_new_tokens=st.integers(0, 1 << 20),
    temperature=maybe() | number | st.just(0.0) | st.just(1.0),
    top_p=maybe() | number,
    top_k=maybe() | st.sampled_from((-1, 0, 1, 40, 1 << 30)),
    min_p=maybe() | number,
    frequency_penalty=number,
    presence_penalty=number,
    repetition_penalty=maybe() | number,
    logit_bias=st.dictionaries(token, number, max_size=4).map(lambda bias: tuple(bias.items())),
    seed=maybe() | st.integers(0, (1 << 64) - 1),
    stop_token_ids=st.lists(token, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    json_schema=maybe() | text,
    regex=maybe() | text,
    ebnf=maybe() | text,
    structural_tag=maybe() | text,
    bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.lists(token, max_size=3).map(tuple),
    processors=st.lists(st.tuples(text, text), max_size=2).map(tuple),
)

requests = st.builds(
    GenerateRequest,
    rid=text,
    input_ids=st.lists(token, max_size=20).map(frozen_tokens),
    sampling=sampling_params,
    return_logprob=st.booleans(),
    top_logprobs=st.integers(0, 20),
    prompt_logprobs=st.integers(-1, 40),
    stream=st.booleans(),
    kind=st.sampled_from(("generate", "embedding")),
    cache_salt=st.binary(max_size=8),
    priority=st.integers(-(1 << 31), 1 << 31),
    created_s=number,
    unsupported=st.lists(text, max_size=2).map(tuple),
)

tops = st.lists(st.tuples(token, number), min_size=1, max_size=3).map(
    lambda pairs: TopLogprobs(ids=tuple(i for i, _ in pairs), values=tuple(v for _, v in pairs))
)


@st.composite
def batches(draw: st.DrawFn) -> OutputBatch:
    n = draw(st.integers(0, 4))

    def column(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=n, max_size=n))

    total = draw(st.integers(0, 1 << 20))
    values = column(st.lists(maybe() | number, max_size=4))
    count = st.integers(0, 1 << 20)
    load = LoadReport(
        running=draw(count), waiting=draw(count), resident_blocks=draw(count), active_blocks=draw(count),
        total_blocks=total,
    )  # fmt: skip
    return OutputBatch(
        rids=column(text),
        output_ids=column(st.lists(token, max_size=4)),
        finished=column(st.sampled_from([int(f) for f in Finish])),
        prompt_tokens=column(count),
        completion_tokens=column(count),
        cached_tokens=column(count),
        logprobs=column(st.lists(number, max_size=4)),
        top_logprobs=column(st.lists(tops, max_size=3)),
        prompt_logprobs=values,
        prompt_top_logprobs=column(st.lists(maybe() | tops, max_size=3)),
        prompt_logprob_ids=[draw(st.lists(token, min_size=n, max_size=n)) for n in map(len, values)],
        status=column(st.sampled_from((0, 400, 429, 500, 503))),
        messages=column(text),
        load=load if total else None,
        engine_index=draw(st.integers(0, 9)),
    )
