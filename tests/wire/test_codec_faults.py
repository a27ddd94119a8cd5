"""Frames nobody should send: each is refused with the field's name, none breaks the wire."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_frontend import add, pack, sampling

from tokenspeed.plane.messages import Finish, OutputBatch
from tokenspeed.wire.codec import ABORT, ADD, CONTROL, ENCODE, EngineCodec, FrontendCodec
from tokenspeed.wire.faults import WireError
from tokenspeed.wire.handshake import decode_greeting, decode_init, decode_registration
from tokenspeed.wire.layouts import LAYOUTS, OUTPUT_FIELDS

ENGINE = EngineCodec()
FRONTEND = FrontendCodec(layouts=LAYOUTS)

scalar = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8) | st.binary()
)
junk = st.recursive(
    scalar,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (add("a", ["x"]), "input_ids[0]"),
        (add("a", [1 << 31]), "input_ids[0]"),
        (add("a", [True]), "input_ids[0]"),
        (add("a", [1.0]), "input_ids[0]"),
        (add("a", [*range(9000), "x"]), "input_ids[9000]"),
        (add("a", [*range(9000), 1 << 31]), "input_ids[9000]"),
        (add("a", 5), "input_ids"),
        (add("a", None), "input_ids"),
        (add("a", [1], 7), "SamplingParams"),
        (add("a", [1], sampling(p3="hot")), "sampling_params.temperature"),
        (add("a", [1], sampling(p22={"x": 1.0})), "sampling_params.logit_bias"),
        (add("a", [1], sampling(p2=["x"])), "sampling_params.stop_token_ids[0]"),
        (add("a", [1], sampling(p15=1)), "sampling_params.ignore_eos"),
        (["TokenizedGenerateReqInput", "a"], "input_ids"),
    ],
)
def test_a_faulty_request_with_a_readable_id_is_answered(message: list[object], field: str) -> None:
    arrival = ENGINE.decode([ADD, pack(message)])
    assert arrival.message is None
    answer = arrival.answer
    assert isinstance(answer, OutputBatch)
    assert (answer.rids, answer.finished, answer.status) == (["a"], [int(Finish.ABORT)], [400])
    assert answer.messages[0].startswith(field)


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "frame"),
        ([ADD], "frame"),
        ([b"", pack([])], "frame"),
        ([b"\0\0", pack([])], "frame"),
        ([b"\x09", pack([])], "type"),
        ([ADD, b"\xc1"], "payload"),
        ([ADD, b""], "payload"),
        ([ADD, b"\xdd\xff\xff\xff\xff"], "payload"),
        ([ADD, b"\xdf\xff\xff\xff\xff"], "payload"),
        ([ADD, b"\x91" * 100_000 + b"\xc0"], "payload"),
        ([ADD, b"\xa2\xff\xfe"], "payload"),
        ([ADD, pack({"rid": "a"})], "TokenizedGenerateReqInput"),
        ([ADD, pack(["Other", 5])], "TokenizedGenerateReqInput"),
        ([ADD, pack(["TokenizedGenerateReqInput", 5])], "rid"),
        ([ABORT, pack("a")], "rids"),
        ([ABORT, pack([1])], "rids"),
        ([CONTROL, pack(["x", "pause", []])], "call_id"),
        ([CONTROL, pack([True, "pause", []])], "call_id"),
        ([CONTROL, pack({})], "call_id"),
        ([ENCODE, pack(["EncodeRequest"])], "request_id"),
    ],
)
def test_a_frame_nobody_can_be_answered_for_is_a_fault_with_a_field(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as caught:
        ENGINE.decode(frames)
    assert caught.value.field == field


def test_an_encode_request_is_refused_by_its_id() -> None:
    answer = ENGINE.decode([ENCODE, pack(["EncodeRequest", None, None, "e1", "h", 1, 2, []])]).answer
    assert isinstance(answer, OutputBatch)
    assert (answer.rids, answer.status) == (["e1"], [400])


@settings(deadline=None, max_examples=300)
@given(st.binary(min_size=0, max_size=2), st.binary(max_size=80))
def test_random_bytes_end_in_an_arrival_or_a_fault(kind: bytes, payload: bytes) -> None:
    for end in (lambda: ENGINE.decode([kind, payload]), lambda: FRONTEND.decode(payload)):
        with contextlib.suppress(WireError):
            end()


@settings(deadline=None, max_examples=300)
@given(st.sampled_from((ADD, ABORT, CONTROL, ENCODE)), junk)
def test_well_formed_nonsense_ends_in_an_arrival_or_a_fault(kind: bytes, value: object) -> None:
    try:
        arrival = ENGINE.decode([kind, pack(value)])
    except WireError:
        pass
    else:
        assert arrival.message is not None or arrival.answer is not None


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 27), junk)
def test_a_request_with_one_wrong_field_is_read_or_answered(at: int, value: object) -> None:
    message = add("a", [1], None, *[None] * 17)
    message[at] = value
    try:
        arrival = ENGINE.decode([ADD, pack(message)])
    except WireError:
        assert at in (0, 1)  # without the tag or the id there is nobody to answer
    else:
        assert (arrival.message is None) != (arrival.answer is None)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 28), junk)
def test_sampling_with_one_wrong_field_is_read_or_answered(at: int, value: object) -> None:
    arrival = ENGINE.decode([ADD, pack(add("a", [1], sampling(**{f"p{at}": value})))])
    assert (arrival.message is None) != (arrival.answer is None)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 22), junk)
def test_an_output_with_one_wrong_column_is_read_or_refused(at: int, value: object) -> None:
    row: list[object] = ["BatchTokenIDOutSlim", ["a"], [[4]], [""], [3], [1], [0], [[]], [[]], 0, 0, 0, 0, 0]
    row += [[None], [None], [[]], [[]], [[]], [[]], [[]], [[]], 0]
    row[at] = value
    try:
        got = FRONTEND.decode(pack(row))
    except WireError:
        pass
    else:
        assert isinstance(got, OutputBatch)
        assert len(got.output_ids) == len(got.rids)


def test_columns_of_different_lengths_are_refused_by_name() -> None:
    row = ["BatchTokenIDOutSlim", ["a", "b"], [[4]], [""], [3], [1], [0], [[]], [[]]]
    with pytest.raises(WireError) as caught:
        FRONTEND.decode(pack(row))
    assert caught.value.field == OUTPUT_FIELDS[1]


def test_ids_and_values_of_alternatives_must_pair_up() -> None:
    row: list[object] = ["BatchTokenIDOutSlim", ["a"], [[4]], [""], [3], [1], [0], [[]], [[]], 0, 0, 0, 0, 0]
    row += [[None], [None], [[[-1.0], [-2.0]]], [[[7]]]]
    with pytest.raises(WireError, match="different lengths"):
        FRONTEND.decode(pack(row))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | junk.map(pack))
def test_handshake_nonsense_is_a_fault(payload: bytes) -> None:
    for decode in (decode_greeting, decode_init, decode_registration):
        with pytest.raises(WireError):
            decode(payload)
