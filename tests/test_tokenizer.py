"""The tokenizer against tokenization spelled out by hand and against published vectors; words by name of the pre-tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.models.gguf import GGUFFile
from headrace.models.hub import default_model_path
from headrace.text.literals import literal_pattern
from headrace.text.pretokenizers import PRE_TOKENIZERS
from headrace.text.tokenizer import Tokenizer, load_tokenizer, tokenize_text
from tests.reference import text as reference
from tests.vocabularies import NASTY, seconds

ROOT = Path(__file__).parents[1]
VECTORS = sorted(path.with_suffix("") for path in (ROOT.parent / "shared" / "data").glob("ggml-vocab-*.gguf.inp"))


@pytest.fixture(scope="module")
def default_metadata() -> dict[str, Any]:
    with GGUFFile(default_model_path()) as file:
        return dict(file.metadata)


@pytest.fixture(scope="module")
def smol(default_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(default_metadata)


def naive_byte_level(metadata: dict[str, Any], words: list[str]) -> list[int]:
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    seen: dict[str, list[int]] = {}
    for word in set(words):
        seen[word] = [ids[symbol] for symbol in reference.merge_ranked(reference.byte_characters(word.encode()), ranks)]
    return [token for word in words for token in seen[word]]


# --- the default model


def test_default_model_on_nasty_text(smol: Tokenizer, default_metadata: dict[str, Any]) -> None:
    words = [reference.digits_gpt2_words(text) for text in NASTY]
    expected = naive_byte_level(default_metadata, [word for part in words for word in [*part, "\n"]])
    assert [token for text in NASTY for token in [*smol.encode(text), *smol.encode("\n")]] == expected


def test_default_model_round_trips(smol: Tokenizer) -> None:
    for text in NASTY:
        assert smol.decode(smol.encode(text), skip_special=False) == text


def test_default_model_special_tokens(smol: Tokenizer) -> None:
    assert (smol.vocab_size, smol.bos_id, smol.eos_ids) == (49152, 1, (0, 2))
    assert not smol.add_bos
    assert smol.id_to_token(2) == "<|im_end|>"
    assert smol.token_to_id("<|im_start|>") == 1
    assert smol.encode("<|im_start|>user", special=True) == [1, 4093]
    assert not smol.control_ids & set(smol.encode("<|im_start|>user<|im_end|><|endoftext|>"))
    assert smol.chat_template is not None


def test_bytes_of_tokens(smol: Tokenizer) -> None:
    ids = smol.encode("是 😀")
    assert b"".join(map(smol.token_bytes, ids)) == "是 😀".encode()
    assert smol.piece(smol.encode(" the")[0]) == (" the", b" the")
    assert smol.token_bytes(2) == b"<|im_end|>"
    assert smol.token_bytes(smol.vocab_size + 7) == b""  # a padded row of the model
    with pytest.raises(ValueError, match="-1"):
        smol.token_bytes(-1)
    assert {smol.token_bytes(i) for i in range(smol.vocab_size)} >= {bytes([i]) for i in range(32, 127)}


def test_lone_surrogates_are_the_clients_fault(smol: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 1"):
        smol.encode("a\ud800b")


def test_lower_bound_of_tokens(smol: Tokenizer) -> None:
    for text in NASTY:
        assert smol.min_tokens(text) <= len(smol.encode(text))
    assert smol.min_tokens("x" * 10**6) > 1000


def test_vocabulary_loads_fast(default_metadata: dict[str, Any]) -> None:
    """A bound loose enough for a busy machine; the target is 150 ms."""
    best = min(seconds(lambda: load_tokenizer(default_metadata)) for _ in range(3))
    assert best < 0.5


@pytest.mark.parametrize("text", ["word " * 200_000, "x" * 10**6, " " * 10**6, "<|im_end|>" * 10**5, "\n \n" * 333_333])
def test_a_megabyte_of_anything_is_bounded(smol: Tokenizer, text: str) -> None:
    """The target is a second; a quadratic step would take minutes."""
    assert seconds(lambda: smol.encode(text)) < 5
    assert seconds(lambda: smol.find_control(text)) < 1


# --- vectors of other vocabularies, where they are

if VECTORS:

    @pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
    def test_published_vectors(path: Path) -> None:
        tokenizer = load_tokenizer(path)
        texts = path.with_suffix(".gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
        lines = path.with_suffix(".gguf.out").read_text().split("\n")[: len(texts)]
        assert len(lines) == len(texts) > 40
        for text, line in zip(texts, lines, strict=True):
            assert tokenizer.encode(text) == [int(token) for token in line.split()], repr(text)
        assert tokenize_text(path, texts[0]) == tokenizer.encode(texts[0])


# --- words by name of the pre-tokenizer

ALPHABET = "aZé天ひ1٣½ \t\n\r'!_-\u00a0\u0301😀\u200dstdmrelvSL\u2028/"


BYTES = {reference.byte_characters(bytes([byte])): byte for byte in range(256)}


@cache
def rule(name: str) -> Any:
    return PRE_TOKENIZERS[name].build()


def words_of(name: str, text: str) -> list[bytes]:
    return [bytes(BYTES[character] for character in word) for word, _ in rule(name).pre_tokenize_str(text)]


def encoded(words: list[str]) -> list[bytes]:
    return [word.encode() for word in words]


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet=ALPHABET, max_size=30))
def test_words_of_the_three_main_rules(text: str) -> None:
    assert words_of("gpt-2", text) == encoded(reference.gpt2_words(text))
    assert words_of("smollm", text) == encoded(reference.digits_gpt2_words(text))
    assert words_of("llama-bpe", text) == encoded(reference.cl100k_words(text, 3))
    assert words_of("qwen2", text) == encoded(reference.cl100k_words(text, 1))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_rule_loses_nothing(name: str) -> None:
    for text in NASTY:
        assert b"".join(words_of(name, text)) == text.encode()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tekken", "HelloWorld's 123\n/x", ["Hello", "World", "'s", " ", "1", "2", "3", "\n", "/x"]),
        ("gpt-4o", "HelloWorld's 1234 a//\n/", ["Hello", "World's", " ", "123", "4", " a", "//\n/"]),
        ("deepseek-v3", "abc 1234一二あ!x", ["abc", " ", "123", "4", "一二あ", "!x"]),
        ("deepseek-coder", "a b\n12 一", ["a", " b", "\n", "1", "2", " ", "一"]),
        ("falcon", "a 1234...b", ["a", " ", "123", "4", "...", "b"]),
        ("starcoder", "x 12", ["x", " ", "1", "2"]),
        ("mpt", "x 12", ["x", " 12"]),
        ("qwen35", "नमस्ते x", ["नमस्ते", " x"]),
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),
        ("seed-coder", "!\n\n", ["!", "\n\n"]),
        ("bailingmoe", "I'LL\n\n a", ["I", "'LL", "\n\n", " a"]),
    ],
)
def test_words_of_other_rules(name: str, text: str, words: list[str]) -> None:
    assert words_of(name, text) == encoded(words)


# --- many literals, one pattern


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="ab<|>", min_size=1, max_size=6), min_size=1, max_size=8), st.text(alphabet="ab<|>", max_size=30))
def test_literal_pattern_finds_the_leftmost_longest(strings: list[str], text: str) -> None:
    pattern = literal_pattern(strings)
    assert pattern is not None
    expected, i = [], 0
    while i < len(text):
        here = max((string for string in strings if text.startswith(string, i)), key=len, default="")
        expected += [here] if here else []
        i += len(here) or 1
    assert pattern.findall(text) == expected


def test_no_literals_no_pattern() -> None:
    assert literal_pattern([]) is None
