"""What the server needs of text, as `headrace.text.tokenizer.Tokenizer` gives it; tests give something smaller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from headrace.text.tools import ToolFormat


class TokenText(Protocol):
    """One token of a sample, for log-probabilities."""

    @property
    def data(self) -> bytes:
        """Its own bytes in the text; none for a hidden token."""

    @property
    def offset(self) -> int:
        """Characters of the sample's text in front of it."""


class Detokenizer(Protocol):
    """One sample's ids to printable text. Never gives half a character, nor the beginning of a stop string."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found; what came before it has been returned."""

    @property
    def record(self) -> Sequence[TokenText] | None:
        """One entry a token, where it was asked for."""

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain now, perhaps none."""

    def finish(self) -> str:
        """The rest, when no more tokens come."""


class TextCodec(Protocol):
    """Thread-safe, except for the detokenizers it makes."""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Text as ids; with `add_special`, what the model expects in front."""

    tool_format: ToolFormat  # how the model writes calls of functions

    @property
    def control(self) -> Mapping[str, int]:
        """The control tokens, by their spelling."""

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """A conversation as ids, ready for the assistant's answer. Raises InvalidRequest when the template refuses it."""

    def min_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, without tokenizing it."""

    def detokenizer(
        self,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        strip_space: bool = False,
        record: bool = False,
        shown: tuple[str, ...] = (),
    ) -> Detokenizer:
        """For one sample. `shown` are control tokens that are text all the same.

        `strip_space`: its text begins here instead of going on from a prompt.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; of a control token, its spelling."""
