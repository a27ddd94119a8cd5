"""Stop strings: the same result for every cut of the text, and nothing sent that is taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenspeed.errors import RequestError
from tokenspeed.frontend.text.stops import Emitted, StopMatcher, prepare_stops

ALPHABET = "ab日"


def first_occurrence(text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """The oracle: text before the occurrence that starts first, of those the shortest, and that stop string."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[0]], min(found)[2]) if found else None


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def run(stops: tuple[str, ...], deltas: list[str], *, include: bool = False) -> tuple[list[Emitted], str, str | None]:
    """All that was emitted, the text of it, and the match."""
    matcher = StopMatcher(words=prepare_stops(stops), include=include)
    emitted = [*(matcher.push(delta) for delta in deltas), matcher.flush()]
    matched = [one.matched for one in emitted if one.matched is not None]
    assert len(matched) <= 1
    return emitted, "".join(one.text for one in emitted), matched[0] if matched else None


texts = st.text(ALPHABET, max_size=40)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=5).map(tuple)
cut_lists = st.lists(st.integers(0, 1000), max_size=30)


@settings(max_examples=300, deadline=None)
@given(text=texts, stops=stop_lists, cuts=cut_lists, include=st.booleans())
@example(text="aabab", stops=("abab", "ba"), cuts=[1, 2, 3, 4], include=False)
@example(text="abaab", stops=("abab", "ba"), cuts=[1, 2, 3, 4], include=False)
@example(text="aba", stops=("abab", "ba"), cuts=[], include=True)
def test_any_cut_of_a_text_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    _, shown, matched = run(stops, pieces(text, cuts), include=include)
    expected = first_occurrence(text, stops)
    if expected is None:
        assert (shown, matched) == (text, None)
    else:
        before, stop = expected
        assert (shown, matched) == (before + (stop if include else ""), stop)


@settings(max_examples=200, deadline=None)
@given(text=texts, stops=stop_lists, cuts=cut_lists, rest=texts)
def test_what_was_emitted_stays_right_whatever_follows(
    text: str, stops: tuple[str, ...], cuts: list[int], rest: str
) -> None:
    matcher = StopMatcher(words=prepare_stops(stops))
    emitted = "".join(matcher.push(delta).text for delta in pieces(text, cuts))
    whole = first_occurrence(text + rest, stops)
    assert (whole[0] if whole else text + rest).startswith(emitted)


@settings(max_examples=200, deadline=None)
@given(text=texts, stops=stop_lists)
def test_text_is_held_only_where_a_stop_string_may_have_begun(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(words=prepare_stops(stops))
    sent = ""
    for place, sign in enumerate(text, 1):
        emitted = matcher.push(sign)
        sent += emitted.text
        if emitted.matched is not None:
            return
        held = text[len(sent) : place]
        starts = [at for at in range(place) if any(stop.startswith(text[at:place]) for stop in stops)]
        assert len(held) == (place - starts[0] if starts else 0)


@settings(max_examples=150, deadline=None)
@given(text=texts, stops=stop_lists, cuts=cut_lists)
def test_the_excess_is_the_text_that_came_after_the_match(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    matcher = StopMatcher(words=prepare_stops(stops))
    for place in range(len(text)):
        emitted = matcher.push(text[place])
        if emitted.matched is not None:
            before, stop = first_occurrence(text, stops) or ("", "")
            assert len(before) + len(stop) + emitted.excess == place + 1
            return


def test_a_stop_string_across_tokens_is_found_and_its_first_half_never_sent() -> None:
    emitted, shown, matched = run(("</stop>",), ["text <", "/st", "op> more"])
    assert [one.text for one in emitted] == ["text ", "", "", ""]
    assert (shown, matched) == ("text ", "</stop>")


def test_a_beginning_that_comes_to_nothing_is_sent() -> None:
    emitted, shown, matched = run(("</stop>",), ["a </", "s", "pan>"])
    assert [one.text for one in emitted] == ["a ", "", "</span>", ""]
    assert (shown, matched) == ("a </span>", None)


def test_what_is_held_at_the_end_is_flushed() -> None:
    emitted, shown, matched = run(("ZZZ",), ["日本", "語ZZ"])
    assert emitted[-1] == Emitted(text="ZZ")
    assert (shown, matched) == ("日本語ZZ", None)


def test_of_two_stop_strings_one_the_beginning_of_the_other_the_shorter_wins() -> None:
    for deltas in (["xENDING"], list("xENDING"), ["xEN", "DING"]):
        assert run(("ENDING", "END"), deltas)[1:] == ("x", "END")


def test_an_occurrence_that_began_earlier_wins_if_it_becomes_complete() -> None:
    assert run(("abcd", "bc"), list("xabcd"))[1:] == ("x", "abcd")
    assert run(("abcd", "bc"), list("xabce"))[1:] == ("xa", "bc")
    assert run(("abcd", "bc"), list("xabc"))[1:] == ("xa", "bc")


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(words=prepare_stops(("b",)))
    assert matcher.push("abc") == Emitted(text="a", matched="b", excess=0)
    assert matcher.push("more b") == Emitted(text="")
    assert matcher.flush() == Emitted(text="")


def test_without_stop_strings_everything_passes() -> None:
    assert run((), ["a", "", "日"])[1:] == ("a日", None)


def test_sequences_of_one_request_share_the_words_and_nothing_else() -> None:
    words = prepare_stops(("xy",))
    one, two = StopMatcher(words=words), StopMatcher(words=words)
    assert one.push("x") == Emitted(text="")
    assert two.push("y") == Emitted(text="y")
    assert one.push("y").matched == "xy"
    assert two.push("xy").matched == "xy"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop has an empty string") as caught:
        prepare_stops(("a", ""))
    assert (caught.value.status, caught.value.field) == (400, "stop")


def test_many_long_stop_strings_and_a_long_text_are_no_burden() -> None:
    stops = tuple("a" * 200 + str(number) for number in range(1000))
    words = prepare_stops(stops)
    assert len(words.depths) < 200 + 1000 * 4
    matcher = StopMatcher(words=words)
    text = "a" * 100_000 + "!"
    assert "".join(matcher.push(text[at : at + 4]).text for at in range(0, len(text), 4)) == text
