"""Tokenizers against tokenization spelled out by hand, against published vectors, and against the library on the same folder."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from headrace.errors import InvalidRequest, ModelError, UnsupportedModel
from headrace.models.gguf import GGUFFile
from headrace.models.hub import default_model_path
from headrace.text.literals import literal_pattern
from headrace.text.pretokenizers import PRE_TOKENIZERS
from headrace.text.sentencepiece import ScoreBPE
from headrace.text.tokenizer import Tokenizer, load_tokenizer, tokenize_text
from tests.reference import text as reference

ROOT = Path(__file__).parents[1]
VECTORS = sorted(path.with_suffix("") for path in (ROOT.parent / "shared" / "data").glob("ggml-vocab-*.gguf.inp"))

NASTY = [
    "", " ", "  ", "\t", "\n", "\r\n", "\r\n\r\n a", " \n \n\n  x", "a  b   c    d", "trailing   ", "\t\tindent\n\t\t\tmore",
    "x\xa0y\u2003z", "I'm you're WE'LL he'd'd 'sss it's'", "3 33 333 3333 33333 ½ Ⅷ ٣٤٥ 1,234.56e-7",
    "Ünïcödé e\u0301\u0301 नमस्ते ภาษาไทย", "天地玄黄，宇宙洪荒。ひらがなカタカナ 한국어",
    "👩\u200d👩\u200d👧 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f 😀😀 ☂\ufe0f", "a\x00b\x00",
    "<|im_end|>\n<|im_start|>system <|endoftext|>", "https://a.b/c?d=e&f#g__init__(**x)", "a" * 300 + "!" * 300,
    "\u200b\u200d\ufeff\u202e", "naïve café ﬁ ｆｕｌｌ", "\u2028\u2029\x85\x0b\x0c", "()[]{}<>«»“”‘’…—–",
    "snake_case camelCase SCREAMING HTTPServer",
]  # fmt: skip


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
    best = min(_seconds(lambda: load_tokenizer(default_metadata)) for _ in range(3))
    assert best < 0.5


@pytest.mark.parametrize("text", ["word " * 200_000, "x" * 10**6, " " * 10**6, "<|im_end|>" * 10**5, "\n \n" * 333_333])
def test_a_megabyte_of_anything_is_bounded(smol: Tokenizer, text: str) -> None:
    """The target is a second; a quadratic step would take minutes."""
    assert _seconds(lambda: smol.encode(text)) < 5
    assert _seconds(lambda: smol.find_control(text)) < 1


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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


# --- small vocabularies from metadata


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [reference.byte_characters(bytes([i])) for i in range(256)]
    merges = ["Ġ t", "h e", "Ġt he", "a b", "Ã ©"]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|bos|>", "<|im_end|>", "<tool>", "<|odd|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array([1] * 261 + [3, 3, 4, 4], np.int32),
        "tokenizer.ggml.bos_token_id": 261,
        "tokenizer.ggml.eos_token_id": 262,
    }
    for key, value in changes.items():
        key = f"tokenizer.ggml.{key}"
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value
    return metadata


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


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "aa", "aaa", "aaaa", "▁▁", "▁▁▁▁", "ba", "c▁", "ca", "cab", "bca", "</s"]


def scored(scores: list[float], pieces: list[str] = PIECES, **changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + pieces
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + scores, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


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
    assert _seconds(lambda: tokenizer.encode("abcaab" * 30_000)) < 5


# --- files and folders


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


def byte_level_library() -> Any:
    metadata = byte_level_metadata()
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"][:261])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|bos|>", normalized=False), AddedToken("<|im_end|>", normalized=False, rstrip=True)])
    library.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<|odd|>", normalized=False)])
    library.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 261)])
    return library


def score_library(scheme: str) -> Any:
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *PIECES])}
    merges = [("▁", "a"), ("a", "b"), ("ab", "c")]
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    if scheme == "legacy":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return library


def save(folder: Path, library: Any, **files: Any) -> Path:
    library.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


CONFIG = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}


def test_folder_equals_the_library(tmp_path: Path) -> None:
    library = byte_level_library()
    tokenizer = load_tokenizer(save(tmp_path, library, tokenizer_config=CONFIG, generation_config={"eos_token_id": [262, 264]}))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (265, 261, (262, 264), True)
    for text in [*NASTY, "x<|im_end|>  the", "<tool> the<|odd|>"]:
        assert tokenizer.encode(text, special=True) == library.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.encode(text, special=True, add_special=True) == library.encode(text).ids
        plain = tokenizer.encode(text)
        assert not tokenizer.control_ids & set(plain)
        assert tokenizer.decode(plain) == text
    assert tokenizer.encode_chat([{"role": "user", "content": " the<|odd|>"}]) == [261, 258, *b"<|odd|>"]
    assert tokenizer.decode([*b" the", 263, 262]) == " the<tool>"
    assert [tokenizer.token_bytes(i) for i in (258, 263)] == [b" the", b"<tool>"]


@pytest.mark.parametrize("scheme", ["always", "first", "never", "legacy"])
def test_folder_of_the_score_kind_equals_the_library(tmp_path: Path, scheme: str) -> None:
    library = score_library(scheme)
    tokenizer = load_tokenizer(save(tmp_path, library, tokenizer_config={"bos_token": "<s>", "add_bos_token": True}))
    assert tokenizer.prefix_ids == (1,)
    for text in ["abc", " abc a", "<s>abc</s> abc", "<s> a</s>a", "a<s>", "<s></s>"]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == ids, text
        assert tokenizer.decode(ids) == library.decode(ids)
    assert not {1, 2} & set(tokenizer.encode("<s></s>"))


def test_named_templates_of_a_folder(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = save(tmp_path, byte_level_library(), tokenizer_config={**CONFIG, "chat_template": templates})
    template = load_tokenizer(folder).chat_template
    assert template is not None
    assert (template.render([]), template.render([], tools=[{}])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_tokenizer(folder).chat_template
    assert template is not None
    assert template.render([]) == "file"


def test_folder_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level_library()))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tokenizer_config": []}, "expected an object"),
        ({"generation_config": {"eos_token_id": "x"}}, "eos_token_id"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": [{"name": "rag", "template": ""}]}}, "'default'"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "chat_template: line 1"),
    ],
)
def test_bad_files_of_a_folder_are_named(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        load_tokenizer(save(tmp_path, byte_level_library(), **files))


def test_folders_without_a_readable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.model only"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    library = byte_level_library()
    library.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="decoder"):
        load_tokenizer(save(tmp_path, library))


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
