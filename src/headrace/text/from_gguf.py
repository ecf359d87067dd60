"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece-style BPE with scores (`llama`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import repeat
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from headrace.errors import ModelError, UnsupportedModel
from headrace.text.bpe import LibraryEncoder
from headrace.text.chat_template import ChatTemplate
from headrace.text.literals import literal_pattern
from headrace.text.pretokenizers import NFC_SHRINK, PRE_TOKENIZERS, PreTokenizer, nfc
from headrace.text.sentencepiece import SPACE, ScoreBPE
from headrace.text.tokenizer import Encoder, Tokenizer
from headrace.text.vocabulary import Vocabulary, byte_of, end_ids, is_control_shaped

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_PREFIX = "tokenizer.ggml."


class _Metadata:
    """Typed reading of the tokenizer's part of the metadata; errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], file: object) -> None:
        self.values = values
        self.file = file

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(self.file, _PREFIX + key, problem)

    def text(self, key: str) -> str | None:
        value = self.values.get(_PREFIX + key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"expected a string, got {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected a bool, got {type(value).__name__}")
        return value

    def token_id(self, key: str, size: int, default: int | None = None) -> int | None:
        value = self.values.get(_PREFIX + key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"expected a token id, got {type(value).__name__}")
        if not 0 <= value < size:
            raise self.error(key, f"expected an id below {size}, got {value}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.values.get(_PREFIX + key)
        if value is None:
            raise self.error(key, "missing; expected an array of strings")
        if isinstance(value, str | bytes | int | float) or (len(value) > 0 and not isinstance(value[0], str)):
            raise self.error(key, "expected an array of strings")
        return value.tolist() if hasattr(value, "tolist") else list(value)

    def numbers(self, key: str, size: int) -> list[Any] | None:
        """One number a token, or None if the key is absent."""
        value = self.values.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, str | bytes | int | float):
            raise self.error(key, "expected an array of numbers")
        if len(value) != size:
            raise self.error(key, f"expected one entry for each of the {size} tokens, got {len(value)}")
        numbers: list[Any] = value.tolist() if hasattr(value, "tolist") else list(value)
        if size and not isinstance(numbers[0], int | float):
            raise self.error(key, "expected an array of numbers")
        return numbers


def tokenizer_from_metadata(values: Mapping[str, Any], file: object) -> Tokenizer:
    """Raises ModelError for missing or contradictory fields, UnsupportedModel for a kind or a pre-tokenizer not known here."""
    meta = _Metadata(values, file)
    kind = meta.text("model")
    if kind is None:
        raise meta.error("model", "missing: the file has no tokenizer")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(file, _PREFIX + "model", f"unknown tokenizer {kind!r}; supported are 'gpt2' and 'llama'")
    tokens = meta.strings("tokens")
    size = len(tokens)
    if size == 0:
        raise meta.error("tokens", "the vocabulary is empty")
    types = meta.numbers("token_type", size) or [NORMAL] * size
    ids = dict(zip(tokens, range(size), strict=True))
    if len(ids) != size:
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise meta.error("tokens", f"the token {twice!r} appears twice")

    llama = kind == "llama"
    special = {
        name: meta.token_id(key, size, default)
        for name, key, default in (
            ("bos_token", "bos_token_id", 1 if llama else None),
            ("eos_token", "eos_token_id", 2 if llama else None),
            ("unk_token", "unknown_token_id", 0 if llama else None),
            ("pad_token", "padding_token_id", None),
            ("sep_token", "seperator_token_id", None),  # the format's spelling
            ("mask_token", "mask_token_id", None),
            ("eot_token", "eot_token_id", None),
            ("eom_token", "eom_token_id", None),
        )
    }
    ends = [token_id for name in ("eos_token", "eot_token", "eom_token") if (token_id := special[name]) is not None]
    marked = [i for i, token_type in enumerate(types) if token_type != NORMAL]
    control = {
        tokens[i]: i for i in marked if types[i] in (CONTROL, UNKNOWN) or (types[i] == USER_DEFINED and is_control_shaped(tokens[i]))
    }
    for token_id in ends:
        control.setdefault(tokens[token_id], token_id)
    user_defined = {tokens[i]: i for i in marked if types[i] == USER_DEFINED and tokens[i] and tokens[i] not in control}

    encoder: Encoder
    add_bos, shrink = llama, 1
    if llama:
        encoder = _score_encoder(meta, tokens, types, control, user_defined, special["unk_token"])
    else:
        rule = _rule(meta)
        encoder = _byte_level_encoder(meta, rule, tokens, ids, control, user_defined)
        add_bos, shrink = rule.add_bos, NFC_SHRINK if rule.nfc else 1
    bos_id, eos_id = special["bos_token"], special["eos_token"]
    add_bos, add_eos = meta.flag("add_bos_token", add_bos), meta.flag("add_eos_token", False)
    if add_bos and bos_id is None:
        raise meta.error("add_bos_token", "true, but the file names no bos_token_id")
    if add_eos and eos_id is None:
        raise meta.error("add_eos_token", "true, but the file names no eos_token_id")

    def token(token_id: int) -> str | None:
        return tokens[token_id] if token_id < size else None

    vocabulary = Vocabulary(
        size=size,
        token=token,
        token_id=ids.get,
        style="sentencepiece" if llama else "byte_level",
        control=control,
        longest=max(map(len, tokens)) * shrink,
        literal=frozenset([*control.values(), *user_defined.values()]) if not llama else frozenset(control.values()),
    )
    names = {name: tokens[token_id] for name, token_id in special.items() if token_id is not None}
    return Tokenizer(
        vocabulary,
        encoder,
        bos_id=bos_id,
        eos_ids=end_ids(control, ends),
        prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
        suffix_ids=(eos_id,) if add_eos and eos_id is not None else (),
        leading_space=isinstance(encoder, _ScoreEncoder) and encoder.space_prefix,
        chat_template=_chat_template(values, names, file),
    )


def _chat_template(values: Mapping[str, Any], names: Mapping[str, str], file: object) -> ChatTemplate | None:
    source = values.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(file, "tokenizer.chat_template", f"expected a string, got {type(source).__name__}")
    tool_use = values.get("tokenizer.chat_template.tool_use")
    return ChatTemplate(
        source, tool_use=tool_use if isinstance(tool_use, str) else None, special_tokens=names, file=file, field="tokenizer.chat_template"
    )


def _rule(meta: _Metadata) -> PreTokenizer:
    name = meta.text("pre")
    if name is None:
        raise UnsupportedModel(
            meta.file, _PREFIX + "pre", "missing: the file does not say how text is cut into words; convert it again with a current tool"
        )
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(meta.file, _PREFIX + "pre", f"unknown pre-tokenizer {name!r}; known are {known}")
    return rule


def _byte_level_encoder(
    meta: _Metadata,
    rule: PreTokenizer,
    tokens: list[str],
    ids: dict[str, int],
    control: Mapping[str, int],
    user_defined: Mapping[str, int],
) -> LibraryEncoder:
    texts = meta.strings("merges")
    try:
        merges = [(left, right) for left, right in map(str.split, texts, repeat(" "))]
    except ValueError:
        wrong = next(i for i, text in enumerate(texts) if text.count(" ") != 1)
        raise meta.error("merges", f"entry {wrong}: expected two tokens and one space, got {texts[wrong]!r}") from None
    vocab = ids
    if control:  # no word may become a control token, not even where whole words are looked up
        vocab = ids.copy()
        for text in control:
            del vocab[text]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise meta.error("merges", f"they do not fit the vocabulary: {error}") from None
    library = tokenizers.Tokenizer(model)
    if rule.nfc:
        library.normalizer = nfc()
    library.pre_tokenizer = rule.build()
    library.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    return LibraryEncoder(library)


def _score_encoder(
    meta: _Metadata,
    tokens: list[str],
    types: list[Any],
    control: Mapping[str, int],
    user_defined: Mapping[str, int],
    unk_id: int | None,
) -> _ScoreEncoder:
    scores = meta.numbers("scores", len(tokens))
    if scores is None:
        raise meta.error("scores", "missing; expected one score a token")
    if any(score != score for score in scores):
        raise meta.error("scores", "a score is not a number")
    barred = {*control.values()}
    usable = [i for i, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED, UNUSED) and tokens[i] and i not in barred]
    byte_ids = {byte: i for i, kind in enumerate(types) if kind == BYTE and (byte := byte_of(tokens[i])) is not None}
    return _ScoreEncoder(ScoreBPE(tokens, scores, usable, byte_ids, unk_id), user_defined, meta.flag("add_space_prefix", True))


class _ScoreEncoder:
    """SentencePiece's way around its merges: spaces escaped, one in front of text, user-defined pieces cut out first."""

    def __init__(self, bpe: ScoreBPE, user_defined: Mapping[str, int], space_prefix: bool) -> None:
        self.space_prefix = space_prefix
        self._bpe = bpe
        self._user_defined = user_defined
        self._pattern: re.Pattern[str] | None = literal_pattern(user_defined)

    def encode(self, text: str, at_start: bool) -> list[int]:
        if self._pattern is None:
            return self._piece(text)
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                ids += self._piece(text[position : match.start()])
            ids.append(self._user_defined[match.group()])
            position = match.end()
        if position < len(text):
            ids += self._piece(text[position:])
        return ids

    def _piece(self, text: str) -> list[int]:
        escaped = text.replace(" ", SPACE)
        return self._bpe.encode(SPACE + escaped if self.space_prefix else escaped)
