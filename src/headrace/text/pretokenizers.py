"""How text is cut into words before byte-level BPE, by the name a GGUF file gives in `tokenizer.ggml.pre`.

Each entry says what the model family's published tokenizer does: normalization, then one or more splits. A name that is not here is
refused: a neighbouring rule gives plausible, silently worse text. "default" names no published rule, so it is refused as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

# Words, numbers and punctuation with at most one space in front; a run of spaces leaves its last one to the next word.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(digits: str, contraction: str) -> str:
    """Words are cut where lower case turns to upper case; `contraction` may follow a word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{upper}*{lower}+{contraction}|{first}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-"
    "ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀"
    "-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥\u0800-一가-\ud7ff]+"


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes() -> Any:
    """To the byte alphabet, cutting nothing."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _splits(*patterns: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence([*(_split(pattern) for pattern in patterns), _bytes()])


def _digits_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("contiguous"), _gpt2(), pre_tokenizers.Digits(individual_digits=False), _split("[0-9][0-9][0-9]")]
    )


def _deepseek_llm() -> Any:
    splits = (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_CJK)
    return pre_tokenizers.Sequence([*map(_split, splits), pre_tokenizers.Digits(individual_digits=True), _bytes()])


def _deepseek_coder() -> Any:
    splits = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)
    return pre_tokenizers.Sequence([*map(_split, splits), pre_tokenizers.Digits(individual_digits=True), _bytes()])


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    build: Callable[[], Any]  # a tokenizers pre-tokenizer whose words are in the byte alphabet
    nfc: bool = False  # canonical composition first
    ignore_merges: bool = False  # a word that is a token is taken as it is
    add_bos: bool = False  # where the file does not say


def _table() -> dict[str, PreTokenizer]:
    rules: dict[str, PreTokenizer] = {}

    def name(names: str, build: Callable[[], Any], **flags: bool) -> None:
        rules.update(dict.fromkeys(names.split(), PreTokenizer(build, **flags)))

    name("gpt-2 phi-2 gigachat mellum exaone4 trillion granite-docling jais", _gpt2)
    name("mpt olmo", _gpt2, nfc=True)  # the GPT-NeoX tokenizer
    name("smollm starcoder refact codeshell exaone minerva-7b", _digits_gpt2)
    name("command-r", _digits_gpt2, nfc=True)
    name("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _splits(_LLAMA3), ignore_merges=True, add_bos=True)
    name("dbrx smaug-bpe glm4 chatglm-bpe", _splits(_LLAMA3))
    name("qwen2 deepseek-r1-qwen megrez", _splits(_QWEN2), nfc=True)
    name("stablelm2 hunyuan solar-open grok-2", _splits(_QWEN2))
    name("qwen35", _splits(_QWEN35), nfc=True)
    name("tekken", _splits(_o200k(r"\p{N}", "")), ignore_merges=True, add_bos=True)
    name("gpt-4o llama4 kanana2 minimax-m2", _splits(_o200k(r"\p{N}{1,3}", f"{_CONTRACTION}?")))
    name("falcon", _falcon)
    name("deepseek-llm", _deepseek_llm)
    name("deepseek-coder", _deepseek_coder)
    name("deepseek-v3 hunyuan-dense joyai-llm", _splits(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_WORDS))
    name("seed-coder", _splits(_SEED_CODER))
    name("bailingmoe bailingmoe2 llada-moe", _splits(_BAILING))
    return rules


PRE_TOKENIZERS = _table()
NFC_SHRINK = 4  # canonical composition makes one character of at most so many


def nfc() -> Any:
    return normalizers.NFC()
