"""The vocabulary that crosses the seams: what a request asks for, and what a step tells about it.

The structs are msgspec so that the same objects travel between the API process and the engine process (typed msgpack, never pickle).
Times are seconds on the machine's monotonic clock (`time.monotonic`), which both processes share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are chosen and when a sample ends. Validated by the server before it gets here."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1  # -1: none; k: the chosen token's and the k best
    min_tokens: int = 0  # end tokens are impossible before this many
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end it
    grammar: str = ""  # what the text must match (text/grammar.py); its end ends the sample, whatever min_tokens says
    prompt_logprobs: int = -1  # -1: none; k: of each token of the prompt but the first, and of the k best in its place
    embed: bool = False  # the prompt's embedding is told; the answer, one token, means nothing
    allowed_token_ids: bytes = b""  # int32 ids; no other token is possible, end tokens included. Empty: all are

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request for the engine. `emitted` holds, per sample, the ids already sent to the client (a resumed request)."""

    request_id: int
    prompt: bytes  # int32 token ids
    params: SamplingParams
    seed: int  # drawn by the API process when the client gave none
    received: float
    num_samples: int = 1
    emitted: tuple[bytes, ...] = ()
    priority: int = 0  # lower first, under the `priority` policy
    tenant: str = ""  # fairness key
    cache_salt: str = ""  # requests share cached blocks only under the same salt
    batch: bool = False  # fills what others leave idle: runs only while no request without it is open


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request now, or one sample of it, whatever its state. Unknown ids are ignored: it may have just finished."""

    request_id: int
    sample: int = -1  # all


Command = Submit | Abort


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token and of the best alternatives (ids, log-probabilities), descending."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Log-probabilities of consecutive tokens of a prompt and of the k best in each one's place, best first. Without penalties or bias."""

    first: int  # position of the first of them
    logprobs: bytes  # float32 [n]
    ranks: bytes  # int32 [n], 1: no other was more likely
    top_ids: bytes  # int32 [n][k]
    top_logprobs: bytes  # float32 [n][k]


class Embedding(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A prompt as a vector of length 1: the mean over its tokens of what the last layer leaves, normed."""

    vector: bytes  # float32 [hidden size]


PromptTold = PromptLogprobs | Embedding


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """The engine will not run this request. `kind` is the name of a RequestError subclass."""

    request_id: int
    kind: str
    message: str
    param: str | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine after a step: gauges, and counters that only grow."""

    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    preemptions: int  # total
    recomputed_tokens: int  # total tokens computed a second time after preemption
    prompt_tokens: int  # total computed prompt tokens
    cached_tokens: int  # total prompt tokens taken from the prefix cache
    steps: int
    step_seconds: float  # this step
    step_tokens: int  # computed in this step
    step_rows: int  # samples in this step


class StepEvents(msgspec.Struct, tag=True, array_like=True):
    """What one step (or several merged ones) did, as columns. A sample's tokens come in order; `finished` applies after them."""

    time: float
    request_ids: list[int]  # one entry a token
    samples: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprob | None]  # empty when nobody asked, else one entry a token
    admitted: list[tuple[int, float, int]]  # request, when it was first scheduled, prompt tokens found in the cache
    finished: list[tuple[int, int, FinishReason]]  # request, sample, reason
    stalled: list[tuple[int, float]]  # request, seconds it lost to preemption, when it runs again
    refused: list[Refusal]
    stats: EngineStats | None = None
    prompts: list[tuple[int, PromptTold]] = []  # request; told again when it is computed again
