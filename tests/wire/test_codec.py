"""Frames and values: what is sent is what arrives, in whatever order of fields the engine announced."""

from __future__ import annotations

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_frontend import add, pack, sampling, unpack
from wire_samples import INFO, LOAD, TOP, batch, batches, plain, request, requests

from tokenspeed.plane.messages import (
    NO_TOP_K,
    AbortRequest,
    ControlReply,
    Finish,
    FlushCacheOp,
    GenerateRequest,
    OneToken,
    OutputBatch,
    PauseMode,
    PauseOp,
    ResumeOp,
    SamplingParams,
    UnsupportedOp,
)
from tokenspeed.plane.operations import (
    AskOp,
    CloseGroupOp,
    DiskWeights,
    GroupWeights,
    OpenGroupOp,
    Question,
    ReleaseMemoryOp,
    ResumeMemoryOp,
    StartProfileOp,
    StopProfileOp,
    TensorWeights,
    UpdateWeightsOp,
    WeightsGroup,
    WeightVersionOp,
)
from tokenspeed.wire.codec import ABORT, ADD, CONTROL, EngineCodec, FrontendCodec
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.handshake import decode_registration, encode_registration
from tokenspeed.wire.layouts import (
    LAYOUTS,
    OUTPUT_FIELDS,
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    Layouts,
    layouts_of,
)

ENGINE = EngineCodec(engine_index=3)
FRONTEND = FrontendCodec(layouts=LAYOUTS)


def sent(message: object) -> GenerateRequest:
    got = ENGINE.decode([ADD, pack(message)]).message
    assert isinstance(got, GenerateRequest)
    return got


@settings(deadline=None, max_examples=200)
@given(requests)
def test_a_request_of_our_frontend_arrives_unchanged(given_request: GenerateRequest) -> None:
    got = ENGINE.decode(FRONTEND.encode(given_request)).message
    assert isinstance(got, GenerateRequest)
    assert plain(got) == plain(given_request)


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 20_000])
def test_a_prompt_of_any_length_arrives_as_a_read_only_array_of_its_ids(length: int) -> None:
    ids = tuple((7 * i) % 50_000 for i in range(length))
    got = ENGINE.decode(FRONTEND.encode(request("a", ids))).message
    assert isinstance(got, GenerateRequest)
    assert got.input_ids.tolist() == list(ids)
    assert (got.input_ids.dtype.name, got.input_ids.flags.writeable) == ("int32", False)


def test_a_column_of_one_token_each_is_sent_as_the_lists_it_stands_for() -> None:
    lists = batch("a", "b", output_ids=[[5], [70_000]], load=LOAD)
    flat = batch("a", "b", output_ids=OneToken([5, 70_000]), load=LOAD)
    assert ENGINE.encode(flat) == ENGINE.encode(lists)
    assert ENGINE.encode(batch(output_ids=OneToken([]))) == ENGINE.encode(batch(output_ids=[]))
    scored = {"logprobs": [[-0.5], []]}
    assert ENGINE.encode(flat._replace(**scored)) == ENGINE.encode(lists._replace(**scored))


@settings(deadline=None, max_examples=200)
@given(batches())
def test_an_output_batch_arrives_unchanged(given_batch: OutputBatch) -> None:
    got = FRONTEND.decode(ENGINE.encode(given_batch))
    assert isinstance(got, OutputBatch)
    assert got == given_batch._replace(engine_index=3)


@pytest.mark.contract("FW-10")
@settings(deadline=None, max_examples=60)
@given(st.permutations(LAYOUTS.request), st.permutations(SAMPLING_FIELDS), st.permutations(LAYOUTS.output), requests)
def test_any_announced_order_of_fields_is_followed(
    request_order: list[str], sampling_order: list[str], output_order: list[str], given_request: GenerateRequest
) -> None:
    layouts = Layouts(
        request=tuple(request_order), sampling=tuple(sampling_order), output=tuple(output_order), reply=LAYOUTS.reply
    )
    engine, frontend = EngineCodec(layouts=layouts), FrontendCodec(layouts=layouts_of(layouts.announced()))
    got = engine.decode(frontend.encode(given_request)).message
    assert isinstance(got, GenerateRequest)
    assert plain(got) == plain(given_request)
    told = batch("a", logprobs=[[-0.5]], load=LOAD, engine_index=0)
    back = frontend.decode(engine.encode(told))
    assert isinstance(back, OutputBatch)
    assert back == told


@pytest.mark.contract("FW-10")
def test_positions_of_the_fixed_fields_do_not_move() -> None:
    assert LAYOUTS.request[: len(REQUEST_FIELDS)] == REQUEST_FIELDS
    assert LAYOUTS.output[: len(OUTPUT_FIELDS)] == OUTPUT_FIELDS
    message = unpack(FRONTEND.encode(request("a", (4, 5), return_logprob=True, top_logprobs=2))[1])
    assert len(message) == 11
    assert message[:2] == ["TokenizedGenerateReqInput", "a"]
    assert message[4] == [4, 5]
    assert message[6:9] == [True, -1, 2]
    assert message[10] is True
    assert len(message[5]) == 29


def test_a_gateways_request_is_read_by_position() -> None:
    told = sampling(p0=17, p2=[9], p3=0.699999988, p5=NO_TOP_K, p11='{"a":1}', p15=True, p22={"5": -1.5}, p23=2**64 - 1)
    got = sent(add("chatcmpl-1-0", [1, 2], told))
    assert (got.rid, got.input_ids.tolist(), got.stream) == ("chatcmpl-1-0", [1, 2], True)
    assert got.sampling.max_new_tokens == 17
    assert got.sampling.stop_token_ids == (9,)
    assert got.sampling.temperature == 0.699999988
    assert got.sampling.top_k == NO_TOP_K
    assert got.sampling.json_schema == '{"a":1}'
    assert got.sampling.ignore_eos
    assert got.sampling.logit_bias == ((5, -1.5),)
    assert got.sampling.seed == 2**64 - 1
    assert got.unsupported == ()


def test_a_normalised_greedy_request_is_greedy() -> None:
    assert sent(add("a", [1], sampling(p3=1.0, p5=1))).sampling.temperature == 0.0
    assert sent(add("a", [1], sampling(p3=0.7, p5=1))).sampling == attrs.evolve(
        sent(add("a", [1])).sampling, temperature=0.7, top_k=1
    )
    assert sent(add("a", [1], sampling(p3=1.0, p5=1, p28=False))).sampling.temperature == 1.0


def test_a_missing_tail_takes_defaults_and_an_unknown_tail_is_ignored() -> None:
    short = sent(["TokenizedGenerateReqInput", "a", None, None, [1], []])
    assert plain(short) == plain(request("a", (1,), stream=False))
    long = sent(add("a", [1], None, *[None] * 12, None, b"salt", 4, "generate", [], "from the future"))
    assert (long.cache_salt, long.priority) == (b"salt", 4)


@pytest.mark.parametrize(
    ("at", "value", "name"),
    [
        (11, [[0.5]], "input_embeds"),
        (12, ["i", "r", 0, False], "session_params"),
        (13, "code", "custom_logit_processor"),
        (14, True, "return_hidden_states"),
        (16, "host", "bootstrap_host"),
        (18, 7, "bootstrap_room"),
        (22, [[], None], "multimodal_inputs"),
        (9, [1], "token_ids_logprob"),
    ],
)
def test_a_field_that_is_not_served_is_named(at: int, value: object, name: str) -> None:
    message = add("a", [1], None, None, None, None, False, 0.0, None, None, None, None, None, None, None)
    message[at] = value
    assert sent(message).unsupported == (name,)


@pytest.mark.parametrize(("at", "value", "name"), [(19, 5, "thinking_budget"), (25, 2, "n"), (26, ["x"], "stop_strs")])
def test_a_sampling_field_that_is_not_served_is_named(at: int, value: object, name: str) -> None:
    assert sent(add("a", [1], sampling(**{f"p{at}": value}))).unsupported == (name,)


def test_a_field_the_engine_has_no_place_for_is_not_lost_in_silence() -> None:
    old = FrontendCodec(layouts=Layouts())
    assert len(unpack(old.encode(request("a"))[1])) == 11
    with pytest.raises(WireError, match="cache_salt"):
        old.encode(request("a", cache_salt=b"x"))


@pytest.mark.contract("FW-22", "FW-24")
def test_an_output_batch_has_its_columns_at_their_positions() -> None:
    told = batch(
        "a",
        "b",
        finished=[int(Finish.RUNNING), int(Finish.ABORT)],
        logprobs=[[-0.25], []],
        top_logprobs=[[TOP], []],
        prompt_logprobs=[[None, -2.0], []],
        prompt_logprob_ids=[[3, 70_000], []],
        status=[0, 503],
        messages=["", "full"],
        load=LOAD,
    )
    row = unpack(ENGINE.encode(told))
    assert row[0] == "BatchTokenIDOutSlim"
    assert row[1:4] == [["a", "b"], [[5], [5]], ["", "abort"]]
    assert row[7:9] == [[[-0.25], []], [[5], []]]
    assert row[9:14] == [3, 2, 3, 11, 31]
    column = {name: row[1 + LAYOUTS.output.index(name)] for name in LAYOUTS.output[13:]}
    assert column["finished_status_codes"] == [None, 503]
    assert column["finished_messages"] == [None, "full"]
    assert column["output_top_logprobs_val"] == [[[-0.25, -1.5]], []]
    assert column["output_top_logprobs_idx"] == [[[5, 9]], []]
    assert column["input_token_logprobs_val"] == [[None, -2.0], []]
    assert column["input_token_logprobs_idx"] == [[3, 70_000], []]
    assert column["kv_resident_pages"] == 20


def test_the_one_entry_of_a_prompt_of_one_token_arrives_as_none() -> None:
    told = batch("a", prompt_logprobs=[[None]], prompt_top_logprobs=[[None]], prompt_logprob_ids=[[3]])
    row = unpack(ENGINE.encode(told))
    column = {name: row[1 + LAYOUTS.output.index(name)] for name in LAYOUTS.output[13:]}
    assert (column["input_token_logprobs_val"], column["input_token_logprobs_idx"]) == ([[None]], [[3]])
    back = FRONTEND.decode(ENGINE.encode(told))
    assert isinstance(back, OutputBatch)
    assert (back.prompt_logprobs, back.prompt_top_logprobs) == ([[None]], [[None]])


def test_the_load_columns_are_never_nil_and_zero_pages_mean_none() -> None:
    row = unpack(ENGINE.encode(batch("a")))
    assert row[9:14] == [3, 0, 0, 0, 0]
    back = FRONTEND.decode(ENGINE.encode(batch("a")))
    assert isinstance(back, OutputBatch)
    assert back.load is None


def test_an_older_engines_short_batch_is_read() -> None:
    old = FrontendCodec(layouts=layouts_of(None))
    payload = pack(["BatchTokenIDOutSlim", ["a"], [[4]], ["length"], [3], [1], [0], [[]], [[]]])
    got = old.decode(payload)
    assert isinstance(got, OutputBatch)
    assert (got.finished, got.status, got.messages, got.top_logprobs) == ([int(Finish.LENGTH)], [0], [""], [[]])
    strange = pack(["BatchTokenIDOutSlim", ["a"], [[4]], ["matched"], [3], [1], [0], [[]], [[]]])
    got = old.decode(strange)
    assert isinstance(got, OutputBatch)
    assert got.finished == [int(Finish.STOP)]


def test_a_reply_has_the_four_fields_a_gateway_insists_on() -> None:
    assert list(LAYOUTS.reply) == ["call_id", "success", "message", "engine_index"]
    reply = ControlReply(call_id=7, success=False, message="no")
    assert unpack(ENGINE.encode(reply)) == ["ControlReplySlim", 7, False, "no", 3]
    assert FRONTEND.decode(ENGINE.encode(reply)) == reply


@pytest.mark.contract("FW-16", "FW-17")
@pytest.mark.parametrize(
    ("call", "op"),
    [
        (["flush_cache", [2.5]], FlushCacheOp(call_id=9, timeout_s=2.5)),
        (["flush_cache", []], FlushCacheOp(call_id=9)),
        (["flush_cache", [{"timeout_s": 1}]], FlushCacheOp(call_id=9, timeout_s=1.0)),
        (["pause_generation", [{"mode": "wait"}]], PauseOp(call_id=9, mode=PauseMode.WAIT)),
        (["pause", ["keep"]], PauseOp(call_id=9, mode=PauseMode.KEEP)),
        (["pause", []], PauseOp(call_id=9, mode=PauseMode.ABORT)),
        (["continue_generation", [{}]], ResumeOp(call_id=9)),
        (["resume", []], ResumeOp(call_id=9)),
        (["pause_generation", [{"mode": "in_place"}]], PauseOp(call_id=9, mode=PauseMode.KEEP)),
        (["collective_rpc", [{}]], UnsupportedOp(call_id=9, method="collective_rpc")),
        (
            ["update_weights_from_disk", [{"path": "x"}]],
            UpdateWeightsOp(call_id=9, source=DiskWeights(path="x")),
        ),
        (["sleep", [{"level": 2}]], ReleaseMemoryOp(call_id=9, restore=False)),
        (["wake_up", [{"tags": ["weights"]}]], ResumeMemoryOp(call_id=9, tags=("weights",))),
        (["start_profile", [{}]], StartProfileOp(call_id=9, path="profiles")),
        (
            ["start_profile", [{"with_stack": True, "activities": ["GPU"]}]],
            StartProfileOp(call_id=9, path="profiles", wants=("GPU", "with_stack")),
        ),
        (["is_paused", []], AskOp(call_id=9, question=Question.PAUSED)),
    ],
)
def test_a_call_becomes_the_operation_it_names(call: list[object], op: object) -> None:
    arrival = ENGINE.decode([CONTROL, pack([9, *call])])
    assert (arrival.message, arrival.answer) == (op, None)


@pytest.mark.contract("FW-17")
@pytest.mark.parametrize(
    "op",
    [
        FlushCacheOp(call_id=1, timeout_s=0.5),
        ResumeOp(call_id=1),
        UnsupportedOp(call_id=1, method="collective_rpc"),
        *(PauseOp(call_id=1, mode=mode) for mode in PauseMode),
        ReleaseMemoryOp(call_id=1, tags=("weights",), restore=False),
        ResumeMemoryOp(call_id=1),
        UpdateWeightsOp(call_id=1, source=DiskWeights(path="x"), version="7", abort=True),
        UpdateWeightsOp(call_id=1, source=TensorWeights(blobs=(b"ab", b"c"))),
        UpdateWeightsOp(call_id=1, source=GroupWeights(group="g", names=("w",), dtypes=("float32",), shapes=((2, 3),))),
        WeightVersionOp(call_id=1, version="x"),
        OpenGroupOp(call_id=1, group=WeightsGroup(name="g", address="127.0.0.1:5", rank=1, size=2)),
        CloseGroupOp(call_id=1, name="g"),
        StartProfileOp(call_id=1, path="p", steps=3, skip=2),
        StopProfileOp(call_id=1),
        *(AskOp(call_id=1, question=question) for question in Question),
        AbortRequest(prefixes=("a-",)),
        AbortRequest(every=True),
    ],
)
def test_an_operation_sent_by_our_frontend_arrives_as_an_equal_object(op: PauseOp) -> None:
    assert ENGINE.decode(FRONTEND.encode(op)).message == op


@pytest.mark.contract("FW-19")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (["nope", []], "'nope' is not an operation"),
        (["pause", ["sideways"]], "mode: 'sideways' is not one of abort, wait, keep"),
        (["pause", ["retract"]], "mode: 'retract' is not one of abort, wait, keep"),
        (["sleep", [{"level": 3}]], "level"),
        (["release_memory_occupation", [{"tags": ["kv"]}]], "tags"),
        (["update_weights_from_disk", [{}]], "path"),
        (["update_weights_from_disk", ["x"]], "args"),
        (["update_weights_from_tensor", [{"serialized_named_tensors": ["gASV"]}]], "load_format"),
        (["update_weights_from_distributed", [{"names": ["a"], "dtypes": [], "shapes": []}]], "names"),
        (["init_weights_update_group", [{"master_address": "h", "master_port": 1, "rank_offset": 0}]], "rank_offset"),
        (["start_profile", [{"num_steps": 0}]], "num_steps"),
        (["flush_cache", [-1]], "timeout_s"),
        (["flush_cache", [True]], "timeout_s"),
        (["abort_request", []], "rid"),
        ([5, []], "method"),
        (["pause", 3], "args"),
        ([], "method"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_answered_under_its_id(call: list[object], says: str) -> None:
    arrival = ENGINE.decode([CONTROL, pack([9, *call])])
    assert arrival.message is None
    assert isinstance(arrival.answer, ControlReply)
    assert (arrival.answer.call_id, arrival.answer.success) == (9, False)
    assert says in arrival.answer.message


def test_an_abort_by_call_reaches_the_loop_and_is_answered() -> None:
    arrival = ENGINE.decode([CONTROL, pack([4, "abort_request", [{"rid": "a"}]])])
    assert arrival.message == AbortRequest(rids=("a",), prefixes=("a-",))  # a gateway's choices are a-0, a-1, …
    assert arrival.answer == ControlReply(call_id=4, success=True)


def test_an_abort_takes_many_ids() -> None:
    assert ENGINE.decode([ABORT, pack(["a", "b"])]).message == AbortRequest(rids=("a", "b"))
    assert ENGINE.decode(FRONTEND.encode(AbortRequest(rids=("a",)))).message == AbortRequest(rids=("a",))


@pytest.mark.contract("FW-7", "FW-11")
def test_a_registration_arrives_unchanged() -> None:
    got = decode_registration(encode_registration(INFO, LAYOUTS))
    assert got.info == INFO
    assert got.layouts == LAYOUTS


def test_unknown_keys_of_a_registration_are_ignored_and_a_wrong_one_is_named() -> None:
    told = unpack(encode_registration(INFO, LAYOUTS))
    assert decode_registration(pack({**told, "brand_new": {"x": 1}})).info == INFO
    for key, wrong in (("max_model_len", "long"), ("dtype", "int4"), ("architectures", None)):
        with pytest.raises(WireError, match=key):
            decode_registration(pack({**told, key: wrong}))
    del told["dtype"]
    with pytest.raises(WireError, match="dtype"):
        decode_registration(pack(told))


def test_either_name_of_the_block_size_is_understood() -> None:
    told = unpack(encode_registration(INFO, LAYOUTS))
    assert "prefix_granularity" not in told
    told["prefix_granularity"] = told.pop("block_size")
    assert decode_registration(pack(told)).info.block_size == INFO.block_size


def test_a_layout_that_repeats_or_lacks_a_name_is_refused() -> None:
    with pytest.raises(WireError, match="twice"):
        layouts_of({"ControlReplySlim": ["call_id", "success", "call_id"]})
    with pytest.raises(WireError, match="lacks rid"):
        layouts_of({"TokenizedGenerateReqInput": ["input_ids", "sampling_params"]})


def test_floats_keep_their_double_precision() -> None:
    params = SamplingParams(temperature=0.1 + 0.2, top_p=1 / 3)
    got = ENGINE.decode(FRONTEND.encode(request("a", sampling=params))).message
    assert isinstance(got, GenerateRequest)
    assert got.sampling == params


def test_a_tensor_frame_behind_a_request_is_allowed() -> None:
    message = add("a", [1], None, *[None] * 11, [[1, ["bfloat16", [2], 1]], None])
    got = ENGINE.decode([ADD, pack(message), b"\0" * 64]).message
    assert isinstance(got, GenerateRequest)
    assert got.unsupported == ("multimodal_inputs",)
    inline = add("a", [1], None, *[None] * 11, [["bfloat16", [2], msgspec.msgpack.Ext(3, b"1234")]])
    assert sent(inline).unsupported == ("multimodal_inputs",)
