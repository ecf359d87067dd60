"""What an answer tells of its prompt: its text (`echo`), and log-probabilities of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from headrace.errors import InvalidRequest
from headrace.request import PromptLogprobs
from headrace.server.codec import TextCodec
from headrace.server.logprobs import LEAST, show

MAX_ENTRIES = 1 << 16  # log-probabilities of prompts in one response: a body of 5 MB, written in 0.1 s


def refuse_many(prompts: Iterable[list[int]], best: int, copies: int, param: str) -> None:
    """Raises InvalidRequest for prompts that have more to tell than a response may hold: `best` tokens in each place, and its own."""
    entries = sum(map(len, prompts)) * (best + 1) * copies
    if entries > MAX_ENTRIES:
        raise InvalidRequest(f"{param}: {entries} log-probabilities of prompts, expected at most {MAX_ENTRIES}", param=param)


def prompt_text(codec: TextCodec, ids: list[int]) -> str:
    """A prompt as text, as far as the model is given it."""
    detokenizer = codec.detokenizer(strip_space=True)
    return detokenizer.add(ids) + detokenizer.finish()


class PromptScores:
    """Collects the log-probabilities of one prompt. `best`: how many tokens are told in each place."""

    def __init__(self, codec: TextCodec, ids: list[int], best: int) -> None:
        self._codec = codec
        self._ids = ids
        self._best = best
        count = len(ids) - 1
        self._logprobs, self._ranks = array("f", bytes(4 * count)), array("i", bytes(4 * count))
        self._top_ids, self._top_logprobs = array("i", bytes(4 * count * best)), array("f", bytes(4 * count * best))

    def add(self, told: PromptLogprobs) -> None:
        at, best = told.first - 1, self._best
        for mine, new, width in (
            (self._logprobs, told.logprobs, 1),
            (self._ranks, told.ranks, 1),
            (self._top_ids, told.top_ids, best),
            (self._top_logprobs, told.top_logprobs, best),
        ):
            mine[at * width : at * width + len(new) // 4] = array(mine.typecode, new)

    def described(self, best: int) -> list[dict[str, Any] | None]:
        """As `prompt_logprobs` has it: for each token its own entry and those of the `best` in its place; none for the first."""
        found: list[dict[str, Any] | None] = [None]
        for i, token in enumerate(self._ids[1:]):
            entries = {str(token): self._entry(token, self._logprobs[i], self._ranks[i])}
            for rank, (other, value) in enumerate(self._tops(i, best), 1):
                entries.setdefault(str(other), self._entry(other, value, rank))
            found.append(entries)
        return found

    def echoed(self, best: int) -> dict[str, Any]:
        """As the `logprobs` of a completion have it that repeats its prompt."""
        tops: list[dict[str, float] | None] = [None]
        shown = [show(self._codec.token_bytes(token)) for token in self._ids]
        for i, text in enumerate(shown[1:]):
            top: dict[str, float] = {}
            for other, value in self._tops(i, best):
                top.setdefault(show(self._codec.token_bytes(other)), max(value, LEAST))
            top.setdefault(text, max(self._logprobs[i], LEAST))
            tops.append(top)
        detokenizer = self._codec.detokenizer(strip_space=True, record=True)
        detokenizer.add(self._ids)
        return {
            "tokens": shown,
            "token_logprobs": [None, *(max(value, LEAST) for value in self._logprobs)],
            "top_logprobs": tops,
            "text_offset": [text.offset for text in detokenizer.record or ()],
        }

    def _tops(self, i: int, best: int) -> Iterable[tuple[int, float]]:
        at = i * self._best
        return zip(self._top_ids[at : at + best], self._top_logprobs[at : at + best], strict=True)

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": show(self._codec.token_bytes(token))}
