"""Small vocabularies as GGUF metadata, and text that tokenizers trip over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reference.text import byte_characters

NASTY = [
    "", " ", "  ", "\t", "\n", "\r\n", "\r\n\r\n a", " \n \n\n  x", "a  b   c    d", "trailing   ", "\t\tindent\n\t\t\tmore",
    "x\xa0y\u2003z", "I'm you're WE'LL he'd'd 'sss it's'", "3 33 333 3333 33333 ½ Ⅷ ٣٤٥ 1,234.56e-7",
    "Ünïcödé e\u0301\u0301 नमस्ते ภาษาไทย", "天地玄黄，宇宙洪荒。ひらがなカタカナ 한국어",
    "👩\u200d👩\u200d👧 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f 😀😀 ☂\ufe0f", "a\x00b\x00",
    "<|im_end|>\n<|im_start|>system <|endoftext|>", "https://a.b/c?d=e&f#g__init__(**x)", "a" * 300 + "!" * 300,
    "\u200b\u200d\ufeff\u202e", "naïve café ﬁ ｆｕｌｌ", "\u2028\u2029\x85\x0b\x0c", "()[]{}<>«»“”‘’…—–",
    "snake_case camelCase SCREAMING HTTPServer",
]  # fmt: skip


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [byte_characters(bytes([i])) for i in range(256)]
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


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
