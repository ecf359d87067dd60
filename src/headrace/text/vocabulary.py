"""What the tokens of a vocabulary stand for: raw bytes, control tokens, end tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.text.sentencepiece import SPACE

# Tokens that end an answer wherever they exist as control tokens: files often name only one of them.
END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "</s>", "<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<|EOT|>",
    }
)  # fmt: skip

# What is shaped like this steers the model, whether or not the file calls it a control token: it must not arise from what a user wrote.
_CONTROL_SHAPE = re.compile(r"<\|.*\|>|<｜.*｜>|\[/?[A-Z][A-Z_]*\]|</?s>|<(?:bos|eos|pad|unk|mask|(?:start|end)_of_\w+)>", re.DOTALL)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def is_control_shaped(text: str) -> bool:
    return text in END_TOKENS or _CONTROL_SHAPE.fullmatch(text) is not None


def byte_of(token: str) -> int | None:
    """The byte a SentencePiece byte token such as <0x0A> stands for."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in byte-level BPE: themselves where printable, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


def end_ids(control: Mapping[str, int], named: Iterable[int]) -> tuple[int, ...]:
    """The ids that end an answer: those the file names, and the well-known ones among the control tokens."""
    known = {text: control[text] for text in END_TOKENS if text in control}
    if "<|return|>" in known:  # there <|end|> ends a message, not the answer
        known.pop("<|end|>", None)
    return tuple(sorted({*named, *known.values()}))


@dataclass
class Vocabulary:
    """Tokens by id. `literal` ids are written in the vocabulary as they appear in text (control and added tokens)."""

    size: int  # one more than the largest id
    token: Callable[[int], str | None]  # the token as the file spells it; None where no token has this id
    token_id: Callable[[str], int | None]
    style: Literal["byte_level", "sentencepiece"]
    control: dict[str, int]  # only trusted text produces these
    literal: frozenset[int]
    longest: int  # characters of a text that one token can stand for, at most
    stripped: frozenset[str] = field(default_factory=frozenset)  # control tokens that swallow the white space behind them

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; none for an id beyond the vocabulary (padded rows of the model)."""
        token = self.token(token_id)
        if token is None:
            return b""
        if token_id in self.literal:
            return token.encode()
        if self.style == "byte_level":
            try:
                return bytes([BYTE_ALPHABET[character] for character in token])
            except KeyError:  # outside the byte alphabet: an added token in all but name
                return token.encode()
        byte = byte_of(token)
        return token.replace(SPACE, " ").encode() if byte is None else bytes([byte])
