"""The detokenizer: the same text however tokens arrive, whole characters only, stop strings wherever tokens are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.text.detokenizer import Detokenizer, PieceTexts
from tests.reference.text import first_completed

# Single bytes, and tokens of several bytes that break characters in every way.
PIECES = [bytes([i]) for i in range(256)] + [
    b"", b"a", b"ab", b"ba", b"abc", b" the", b"\n\n", b"\xf0\x9f", b"\x98\x80", b"\xf0\x9f\x98\x80", b"\xe6\x98", b"\xaf",
    b"\xe6\x98\xafa", b"x\xe2\x80", b"\x8d\xf0",
    b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xff\xfe", b"\xf4\x90\x80\x80", b"\xc0\x80", b"aab", b"aa",
]  # fmt: skip
HIDDEN = len(PIECES)  # the id of a control token


TEXTS = PieceTexts(dict(enumerate([*PIECES, b"<|end|>"])), frozenset({HIDDEN}), HIDDEN + 1)


def detokenizer(pieces: Sequence[bytes], **options: Any) -> Detokenizer:
    return Detokenizer(PieceTexts(dict(enumerate(pieces)), frozenset(), len(pieces)), **options)


def stream(made: Detokenizer, groups: Iterable[Sequence[int]]) -> list[str]:
    shown = [made.add(group) for group in groups]
    return [*shown, made.finish()]


ids_strategy = st.lists(st.one_of(st.integers(0, len(PIECES) - 1), st.integers(256, len(PIECES) - 1), st.just(HIDDEN)), max_size=40)
stops_strategy = st.lists(st.text(alphabet="ab \n😀是é\ufffd", min_size=1, max_size=5), max_size=4)


@st.composite
def grouped(draw: st.DrawFn) -> list[list[int]]:
    ids = draw(ids_strategy)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(grouped(), stops_strategy, st.booleans(), st.booleans())
def test_text_does_not_depend_on_how_tokens_arrive(groups: list[list[int]], stops: list[str], include: bool, record: bool) -> None:
    ids = [token for group in groups for token in group]
    data = b"".join(PIECES[token] for token in ids if token != HIDDEN)
    whole = data.decode("utf-8", "replace")
    found = first_completed(whole, stops)
    expected = whole if found is None else whole[: found[0] + (len(found[1]) if include else 0)]
    counts = set()
    for way in (groups, [ids], [[token] for token in ids]):
        made = Detokenizer(TEXTS, stop=stops, include_stop=include, record=record)
        assert "".join(stream(made, way)) == expected
        assert made.stop == (None if found is None else found[1])
        counts.add(made.num_tokens)
    assert len(counts) == 1  # where it stopped is a property of the tokens


@settings(max_examples=200, deadline=None)
@given(ids_strategy, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_shown_is_ever_taken_back(ids: list[int], stops: list[str]) -> None:
    """What was shown before the stop string was complete never holds any of it (the text so far is always a prefix of the answer)."""
    made = Detokenizer(TEXTS, stop=stops)
    shown = ""
    answer = "".join(stream(Detokenizer(TEXTS, stop=stops), [ids]))
    for token in ids:
        shown += made.add([token])
        assert answer.startswith(shown)
        # No more is held back than may begin a stop string, or a character.
        held = made._held
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("cut", [(1,), (3,), (1, 3), (2, 4, 6), tuple(range(1, 7))])
def test_stop_string_split_at_any_place_shows_nothing_of_it(cut: tuple[int, ...]) -> None:
    text = "DEFGHIJ"
    pieces = [text[a:b].encode() for a, b in zip((0, *cut), (*cut, len(text)), strict=True)]
    made = detokenizer(pieces, stop=["DEFGHIJ"])
    assert "".join(stream(made, [[i] for i in range(len(pieces))])) == ""
    assert made.stop == "DEFGHIJ"


def test_a_beginning_that_did_not_become_the_stop_string_is_shown() -> None:
    made = detokenizer([b"DEF", b"G", b"X", b"D"], stop=["DEFGHIJ"])
    assert stream(made, [[0], [1], [2], [3]]) == ["", "", "DEFGX", "", "D"]


def test_overlapping_beginnings() -> None:
    made = detokenizer([b"a", b"b"], stop=["aab"])
    assert [made.add([token]) for token in (0, 0, 0, 1)] == ["", "", "a", ""]
    assert made.stop == "aab"


def test_text_behind_a_stop_string_in_the_same_token_is_cut() -> None:
    made = detokenizer([b"beta ga", b"mma delta", b"more"], stop=["gamma"])
    assert [made.add([0]), made.add([1, 2])] == ["beta ", ""]
    assert (made.stop, made.num_tokens, made.finish()) == ("gamma", 2, "")


def test_the_stop_string_is_shown_on_request() -> None:
    made = detokenizer([b"beta ga", b"mma delta"], stop=["gamma"], include_stop=True)
    assert "".join(stream(made, [[0], [1]])) == "beta gamma"


def test_the_first_completed_of_several_stop_strings_wins() -> None:
    made = detokenizer([b"xabcdef"], stop=["abcdef", "cd"])
    assert (made.add([0]), made.stop) == ("xab", "cd")
    made = detokenizer([b"xabcdef"], stop=["cd", "abcd"])  # completed by the same character: the longest
    assert (made.add([0]), made.stop) == ("x", "abcd")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        detokenizer([], stop=["a", ""])


def test_characters_of_several_tokens_appear_whole() -> None:
    family = "👩‍👩‍👧".encode()
    made = detokenizer([bytes([byte]) for byte in family])
    shown = [made.add([i]) for i in range(len(family))]
    assert "".join(shown) == "👩‍👩‍👧"
    assert all("\ufffd" not in text for text in shown)
    assert made.finish() == ""
    made = detokenizer([b"\xf0", b"\x9f\x98", b"\x80"])
    assert [made.add([0]), made.add([1]), made.add([2])] == ["", "", "😀"]


def test_a_character_cut_off_by_the_end_is_one_replacement() -> None:
    made = detokenizer([b"a\xf0\x9f\x98"])
    assert stream(made, [[0]]) == ["a", "\ufffd"]


def test_invalid_bytes_never_raise() -> None:
    made = detokenizer([b"\xff", b"\xc0", b"\x80", b"\xed", b"\xa0", b"\x80", b"A"])
    text = "".join(stream(made, [[i] for i in range(7)]))
    assert text == b"\xff\xc0\x80\xed\xa0\x80A".decode("utf-8", "replace")
    assert text.encode()  # no surrogates: it can be sent


def test_hidden_tokens_neither_show_nor_disturb_a_character() -> None:
    texts = PieceTexts({0: b"\xf0\x9f", 1: b"<|x|>", 2: b"\x98\x80"}, frozenset({1}), 3)
    made = Detokenizer(texts)
    assert stream(made, [[0], [1], [2]]) == ["", "", "😀", ""]
    made = Detokenizer(PieceTexts(texts.pieces, frozenset(), 3))
    assert "".join(stream(made, [[1]])) == "<|x|>"


def test_one_leading_space_is_taken_away() -> None:
    pieces = [b" Hello", b" world", b" ", b"\xf0\x9f\x98\x80"]
    assert "".join(stream(detokenizer(pieces, strip_space=True), [[0], [1]])) == "Hello world"
    assert "".join(stream(detokenizer(pieces), [[0], [1]])) == " Hello world"
    assert "".join(stream(detokenizer(pieces, strip_space=True), [[2], [0]])) == " Hello"
    assert "".join(stream(detokenizer(pieces, strip_space=True), [[3], [0]])) == "😀 Hello"


@settings(max_examples=200, deadline=None)
@given(ids_strategy, st.booleans())
def test_recorded_tokens_tile_the_text(ids: list[int], strip: bool) -> None:
    made = Detokenizer(TEXTS, record=True, strip_space=strip)
    whole = made.add(ids) + made.finish()
    record = made.record
    assert record is not None
    assert [token.token_id for token in record] == ids
    offsets = [token.offset for token in record] + [len(whole)]
    for token, start, stop in zip(record, offsets, offsets[1:], strict=False):
        assert whole[start:stop] == token.text
    assert b"".join(token.data for token in record).decode("utf-8", "replace") == whole


def test_recorded_bytes_are_raw_and_text_is_what_the_token_completed() -> None:
    made = detokenizer(["是".encode()[:2], "是".encode()[2:] + b"!"], record=True)
    made.add([0, 1])
    assert made.record is not None
    assert [(token.text, token.data, token.offset) for token in made.record] == [("", b"\xe6\x98", 0), ("是!", b"\xaf!", 0)]
    made.add([0])
    made.finish()  # an unfinished character belongs to the last token
    assert made.record[-1][1:] == ("\ufffd", b"\xe6\x98", 2)


def test_the_table_does_not_grow_with_ids_beyond_the_vocabulary() -> None:
    class Anything(dict[int, bytes]):
        def __missing__(self, token_id: int) -> bytes:
            return b""

    texts = PieceTexts(Anything({0: b"a"}), frozenset(), 1)
    made = Detokenizer(texts)
    assert made.add(range(1000)) == "a"
    assert list(texts) == [0]
