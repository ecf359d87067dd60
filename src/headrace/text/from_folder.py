"""A tokenizer from a Hugging Face folder: tokenizer.json through the `tokenizers` library, the rest from the JSON files beside it.

Nothing in the folder is run: no code is imported, no pickle opened, and names found in the files are never used as paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from headrace.errors import ModelError, UnsupportedModel
from headrace.text.bpe import LibraryEncoder
from headrace.text.chat_template import ChatTemplate
from headrace.text.pretokenizers import NFC_SHRINK
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import Vocabulary, end_ids, is_control_shaped

_MAX_JSON = 1 << 24  # bytes of a file beside tokenizer.json


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Raises ModelError naming file and field; UnsupportedModel for a folder without tokenizer.json or a decoder not known here."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = folder / "tokenizer.model"
        hint = "it has a tokenizer.model only; convert it to tokenizer.json" if other.is_file() else "the folder has no tokenizer.json"
        raise UnsupportedModel(folder, "tokenizer.json", hint)
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(path, "", f"not a tokenizer this version of the library reads: {error}") from None
    library.no_truncation()
    library.no_padding()
    config = _read(folder / "tokenizer_config.json")
    names = _special_tokens(config, _read(folder / "special_tokens_map.json"))

    style, strips = _decoding(library, path)
    added: dict[int, Any] = library.get_added_tokens_decoder()
    control = {token.content: i for i, token in added.items() if token.special or is_control_shaped(token.content)}
    # What the library does not call special it would find in a client's text: tell it which tokens we hold to be control tokens.
    library.add_special_tokens([AddedToken(token.content, normalized=False) for token in added.values() if token.content in control])
    library.encode_special_tokens = True
    ids = library.get_vocab(with_added_tokens=True)
    size = 1 + max(ids.values(), default=-1)

    def token_id(name: str) -> int | None:
        text = names.get(name)
        return library.token_to_id(text) if isinstance(text, str) else None

    bos_id, eos_id = token_id("bos_token"), token_id("eos_token")
    prefix, suffix = _around(library)
    if config.get("add_bos_token") is False:
        prefix = ()
    elif config.get("add_bos_token") is True and bos_id is not None and not prefix:
        prefix = (bos_id,)
    vocabulary = Vocabulary(
        size=size,
        token=library.id_to_token,
        token_id=library.token_to_id,
        style=style,
        control=control,
        literal=frozenset(added),
        longest=max(map(len, ids), default=1) * _shrink(library),
        stripped=frozenset(token.content for token in added.values() if token.rstrip),
    )
    return Tokenizer(
        vocabulary,
        LibraryEncoder(library, _continued(library, added, control)),
        bos_id=bos_id,
        eos_ids=_end_ids(folder, control, eos_id),
        prefix_ids=prefix,
        suffix_ids=suffix,
        leading_space=strips,
        chat_template=_chat_template(folder, config, names),
    )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_JSON:
        raise ModelError(path, "", f"{path.stat().st_size} bytes; at most {_MAX_JSON}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(path, "", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(path, "", f"expected an object, got {type(value).__name__}")
    return value


def _state(part: Any) -> dict[str, Any]:
    """The settings of a normalizer, pre-tokenizer or decoder of the library."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _steps(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for key in ("decoders", "pretokenizers", "normalizers"):
        if key in state:
            return [step for inner in state[key] for step in _steps(inner)]
    return [state] if state else []


def _decoding(library: Any, path: Path) -> tuple[Any, bool]:
    """How tokens spell bytes, and whether decoding takes a leading space away."""
    steps = _steps(_state(library.decoder))
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return "byte_level", False
    for step in steps:
        if step.get("type") == "Metaspace":
            return "sentencepiece", step.get("prepend_scheme", "always") != "never"
    if any(step.get("type") == "Replace" and step.get("content") == " " for step in steps):
        return "sentencepiece", any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps)
    raise UnsupportedModel(path, "decoder", f"unknown kind {kinds or None}; supported are ByteLevel and SentencePiece-style decoders")


def _shrink(library: Any) -> int:
    """How many characters normalization may make one of."""
    shrink = 1
    for step in _steps(_state(library.normalizer)):
        kind = step.get("type")
        if kind in ("NFC", "NFKC"):
            shrink = NFC_SHRINK
        elif kind == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]:
            pass  # spaces, written as pieces write them
        elif kind not in ("Prepend", "NFD", "NFKD", "Lowercase"):
            return 1 << 30  # it may take text away
    return shrink


def _around(library: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids the tokenizer puts in front of text and behind it."""
    bare = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _continued(library: Any, added: Mapping[int, Any], control: Mapping[str, int]) -> Any:
    """The same tokenizer for text behind a control token, where it puts a space only in front of the very first word."""
    state = _state(library.pre_tokenizer)
    if not any(step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first" for step in _steps(state)):
        return None
    parts = []
    for step in _steps(state):
        if step.get("type") != "Metaspace":
            raise UnsupportedModel("tokenizer.json", "pre_tokenizer", f"{step.get('type')} together with Metaspace")
        scheme = "never" if step.get("prepend_scheme") == "first" else step.get("prepend_scheme", "always")
        parts.append(pre_tokenizers.Metaspace(replacement=step["replacement"], prepend_scheme=scheme, split=step.get("split", True)))
    other = tokenizers.Tokenizer(library.model)  # shares the vocabulary
    if library.normalizer is not None:
        other.normalizer = library.normalizer
    other.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    tokens = [added[i] for i in sorted(added)]
    other.add_tokens([token for token in tokens if token.content not in control])
    return other


def _special_tokens(config: Mapping[str, Any], fallback: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token and its like, as text, for the chat template."""
    names: dict[str, Any] = {}
    for source in (fallback, config):
        for key, value in source.items():
            if not key.endswith("_token") or isinstance(value, bool):
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names[key] = text
    return names


def _end_ids(folder: Path, control: Mapping[str, int], eos_id: int | None) -> tuple[int, ...]:
    named: set[int] = set() if eos_id is None else {eos_id}
    generation = folder / "generation_config.json"
    given = False
    for path in (generation, folder / "config.json"):
        value = _read(path).get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
            raise ModelError(path, "eos_token_id", f"expected token ids, got {value!r}")
        named.update(values)
        given = given or path == generation
    return tuple(sorted(named)) if given else end_ids(control, named)


def _chat_template(folder: Path, config: Mapping[str, Any], names: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > _MAX_JSON:
            raise ModelError(path, "", f"{path.stat().st_size} bytes; at most {_MAX_JSON}")
        try:
            source = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise ModelError(path, "", "not UTF-8") from None
        return ChatTemplate(source, special_tokens=names, file=path, field="")
    path = folder / "tokenizer_config.json"
    value = config.get("chat_template")
    if value is None:
        return None
    if isinstance(value, str):
        return ChatTemplate(value, special_tokens=names, file=path)
    if not isinstance(value, list) or not all(isinstance(item, dict) and isinstance(item.get("template"), str) for item in value):
        raise ModelError(path, "chat_template", "expected a string or a list of named templates")
    named = {item.get("name"): item["template"] for item in value}
    if "default" not in named:
        raise ModelError(path, "chat_template", f"no template is named 'default'; there are {sorted(map(str, named))}")
    return ChatTemplate(named["default"], tool_use=named.get("tool_use"), special_tokens=names, file=path)
