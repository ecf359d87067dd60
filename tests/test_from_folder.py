"""Tokenizers from Hugging Face folders, against the library on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from headrace.errors import InvalidRequest, ModelError, UnsupportedModel
from headrace.text.tokenizer import load_tokenizer
from tests.vocabularies import NASTY, PIECES, byte_level_metadata


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


def test_lower_bound_of_tokens_knows_what_normalization_may_take(tmp_path: Path) -> None:
    library = byte_level_library()
    longest = max(map(len, library.get_vocab()))
    for normalizer, bound in (
        (None, 1000),
        (normalizers.NFC(), 250),
        (normalizers.Replace(" ", "▁"), 1000),
        (normalizers.Replace("  ", " "), 1),
        (normalizers.Strip(), 1),
    ):
        if normalizer is not None:
            library.normalizer = normalizer
        assert load_tokenizer(save(tmp_path, library)).min_tokens("x" * 1000 * longest) == bound
