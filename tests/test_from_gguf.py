"""Tokenizers from GGUF metadata: byte-level and score-based vocabularies, small enough to see through."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError, UnsupportedModel
from headrace.text.sentencepiece import ScoreBPE
from headrace.text.tokenizer import load_tokenizer, tokenize_text
from tests.reference import text as reference
from tests.vocabularies import PIECES, byte_level_metadata, scored, seconds


def test_byte_level_vocabulary() -> None:
    tokenizer = load_tokenizer(byte_level_metadata())
    assert tokenizer.encode(" the ab") == [258, 32, 259]
    assert tokenizer.encode("<tool>a") == [263, ord("a")]  # user-defined: found in any text
    assert tokenizer.encode("<|odd|>") == list(b"<|odd|>")  # shaped like a control token: not in a client's text
    assert tokenizer.encode("<|odd|>", special=True) == [264]
    assert tokenizer.encode("a", add_special=True) == [ord("a")]
    assert tokenizer.eos_ids == (262,)
    assert tokenizer.decode([261, *b"hi", 263, 262]) == "hi<tool>"


def test_beginning_of_text_is_never_doubled() -> None:
    tokenizer = load_tokenizer(byte_level_metadata(add_bos_token=True))
    assert tokenizer.encode("a", add_special=True) == [261, ord("a")]
    assert tokenizer.encode("<|bos|>a", special=True, add_special=True) == [261, ord("a")]
    assert tokenizer.encode("<|bos|>a", add_special=True) == [261, *b"<|bos|>a"]
    assert tokenizer.encode("a") == [ord("a")]


def test_normalization_belongs_to_the_rule() -> None:
    assert load_tokenizer(byte_level_metadata(pre="qwen2")).encode("e\u0301") == [260]
    assert load_tokenizer(byte_level_metadata(pre="llama-bpe", add_bos_token=False)).encode("e\u0301") == list("e\u0301".encode())


def test_whole_words_are_looked_up_where_merges_do_not_lead_there() -> None:
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "xyz"]
    types = np.array([1] * 261 + [3, 3, 4, 4, 1], np.int32)
    assert load_tokenizer(byte_level_metadata(tokens=tokens, token_type=types, pre="llama-bpe")).encode("xyz") == [265]
    assert load_tokenizer(byte_level_metadata(tokens=tokens, token_type=types)).encode("xyz") == list(b"xyz")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"pre": "no-such-rule"}, UnsupportedModel, r"tokenizer\.ggml\.pre: unknown pre-tokenizer 'no-such-rule'"),
        ({"pre": "default"}, UnsupportedModel, "'default'"),
        ({"pre": None}, UnsupportedModel, r"tokenizer\.ggml\.pre: missing"),
        ({"model": "bert"}, UnsupportedModel, "'bert'"),
        ({"model": None}, ModelError, "no tokenizer"),
        ({"model": 7}, ModelError, "expected a string"),
        ({"tokens": None}, ModelError, "missing"),
        ({"tokens": []}, ModelError, "empty"),
        ({"tokens": np.arange(3)}, ModelError, "array of strings"),
        ({"tokens": ["a", "a"], "token_type": np.ones(2, np.int32)}, ModelError, "'a' appears twice"),
        ({"token_type": np.ones(3, np.int32)}, ModelError, "265 tokens, got 3"),
        ({"merges": None}, ModelError, "merges: missing"),
        ({"merges": ["a b", "abc"]}, ModelError, "entry 1"),
        ({"merges": ["a b", "q zz"]}, ModelError, "do not fit"),
        ({"eos_token_id": 265}, ModelError, "below 265"),
        ({"bos_token_id": "x"}, ModelError, "token id"),
        ({"bos_token_id": None, "add_bos_token": True}, ModelError, "no bos_token_id"),
        ({"add_bos_token": 1}, ModelError, "expected a bool"),
    ],
)
def test_bad_metadata_is_named(changes: dict[str, Any], error: type[ModelError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        load_tokenizer(byte_level_metadata(**changes), file="vocab.gguf")
    assert str(caught.value).startswith("vocab.gguf: tokenizer.ggml.")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(-6, 0).map(float), min_size=len(PIECES), max_size=len(PIECES)),
    st.booleans(),
    st.text(alphabet="aabbc ▁é", max_size=24),
)
def test_score_merges_equal_looking_at_every_pair(scores: list[float], with_inner_space: bool, text: str) -> None:
    """Equal scores included, and with a piece that has a space inside, which forbids cutting at spaces."""
    pieces = PIECES if with_inner_space else [piece for piece in PIECES if piece != "c▁"]
    table = dict(zip(pieces, scores, strict=False))
    tokenizer = load_tokenizer(scored(scores[: len(pieces)], pieces, add_space_prefix=False))
    expected = []
    for symbol in reference.merge_scored(text.replace(" ", "▁"), table):
        token = tokenizer.token_to_id(symbol)
        expected += [3 + byte for byte in symbol.encode()] if token is None else [token]
    assert tokenizer.encode(text) == expected


def test_long_words_are_cut_only_where_no_piece_reaches() -> None:
    scores = [-float(i) for i in range(len(PIECES))]
    table = dict(zip(PIECES, scores, strict=True))
    word = "abcaacbéabcab" * 12  # beyond what is kept as a word
    bpe = ScoreBPE(PIECES, scores, range(len(PIECES)), {}, 99)
    assert bpe.encode(word) == [PIECES.index(s) if s in table else 99 for s in reference.merge_scored(word, table)]


def test_space_prefix_and_bytes() -> None:
    tokenizer = load_tokenizer(scored([-float(i) for i in range(len(PIECES))]))
    piece = {name: 259 + i for i, name in enumerate(PIECES)}
    assert tokenizer.encode("a") == [piece["▁a"]]
    assert tokenizer.encode("é") == [piece["▁"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a", add_special=True) == [1, piece["▁a"]]
    assert tokenizer.encode("</s>a", special=True) == [2, piece["▁a"]]  # a space in front of text behind a control token, too
    assert 2 not in tokenizer.encode("</s>")
    assert tokenizer.decode(tokenizer.encode(" a é")) == " a é"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.leading_space
    assert "".join(tokenizer.detokenizer().add([piece["▁a"]])) == " a"  # the continuation of a text keeps its space
    assert "".join(tokenizer.detokenizer(strip_space=True).add([piece["▁a"]])) == "a"


def test_score_vocabulary_errors() -> None:
    with pytest.raises(ModelError, match="not a number"):
        load_tokenizer(scored([float("nan")] * len(PIECES)))
    with pytest.raises(ModelError, match=r"scores: expected one entry"):
        load_tokenizer(scored([0.0]))


def test_a_long_word_takes_no_quadratic_time() -> None:
    tokenizer = load_tokenizer(scored([-float(i) for i in range(len(PIECES))]))
    assert seconds(lambda: tokenizer.encode("abcaab" * 30_000)) < 5


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A vocabulary-only file, written by hand."""

    def string(text: str) -> bytes:
        data = text.encode()
        return struct.pack("<Q", len(data)) + data

    body = b""
    for key, value in metadata.items():
        body += string(key)
        if isinstance(value, str):
            body += struct.pack("<I", 8) + string(value)
        elif isinstance(value, bool):
            body += struct.pack("<I?", 7, value)
        elif isinstance(value, int):
            body += struct.pack("<II", 4, value)
        elif isinstance(value, list):
            body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
        else:
            kind = {"i": 5, "f": 6}[value.dtype.kind]
            body += struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)


def test_vocabulary_only_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "vocab.gguf", byte_level_metadata())
    assert tokenize_text(tmp_path / "vocab.gguf", " the<|im_end|>") == [258, *b"<|im_end|>"]
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(tmp_path / "other.gguf")
