"""Log-probabilities as the two endpoints show them. Tokens are shown by their own bytes, never by a tokenizer's internal alphabet."""

from __future__ import annotations

from typing import Any

from headrace.request import TokenLogprob
from headrace.server.codec import TextCodec, TokenText

LEAST = -9999.0  # JSON has no -Infinity


def show(data: bytes) -> str:
    """A token as text; one that is no whole character by its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LogprobWriter:
    """Collects the tokens of one sample until the chunk that shows them."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._pending: list[tuple[int, TokenText | None, TokenLogprob]] = []

    def add(self, token: int, text: TokenText | None, logprob: TokenLogprob) -> None:
        """`text`: None for the token that ended the sample, which is told but is no part of the text."""
        self._pending.append((token, text, logprob))

    def take(self) -> Any:
        """What was added since the last call, in the endpoint's form; None if nothing."""
        if not self._pending:
            return None
        pending, self._pending = self._pending, []
        return self._form(pending)

    def _form(self, pending: list[tuple[int, TokenText | None, TokenLogprob]]) -> Any:
        raise NotImplementedError


class ChatLogprobs(LogprobWriter):
    def _entry(self, data: bytes, shown: bytes, logprob: float) -> dict[str, Any]:
        return {"token": show(data), "logprob": max(logprob, LEAST), "bytes": list(shown)}

    def _form(self, pending: list[tuple[int, TokenText | None, TokenLogprob]]) -> Any:
        content = []
        for token, text, it in pending:
            data = self._codec.token_bytes(token)
            # The bytes of all entries, joined, are the text: what ended it, and hidden tokens, add none.
            entry = self._entry(data, text.data if text is not None else b"", it.logprob)
            tops = [(self._codec.token_bytes(top), value) for top, value in zip(it.top_ids, it.top_logprobs, strict=True)]
            entry["top_logprobs"] = [self._entry(top, top, value) for top, value in tops]
            content.append(entry)
        return {"content": content, "refusal": None}


class CompletionLogprobs(LogprobWriter):
    """`offset`: characters of the choice's text in front of the sample's, which is where the prompt is repeated."""

    def __init__(self, codec: TextCodec, offset: int = 0) -> None:
        super().__init__(codec)
        self._offset = self._end = offset  # where the last token's text ended

    def _form(self, pending: list[tuple[int, TokenText | None, TokenLogprob]]) -> Any:
        tokens: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token, text, it in pending:
            shown = show(self._codec.token_bytes(token))
            tokens.append(shown)
            values.append(max(it.logprob, LEAST))
            if text is not None:
                offsets.append(self._offset + text.offset)
                self._end = offsets[-1] + len(shown)
            else:
                offsets.append(self._end)
            top: dict[str, float] = {}
            for other, value in zip(it.top_ids, it.top_logprobs, strict=True):
                top.setdefault(show(self._codec.token_bytes(other)), max(value, LEAST))
            top.setdefault(shown, max(it.logprob, LEAST))
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
