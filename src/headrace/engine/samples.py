"""What the scheduler knows of a request and of each of its samples. There are no phases: a sample has tokens, and some are computed."""

from __future__ import annotations

from array import array

from headrace.config import EngineConfig
from headrace.engine.policy import Account
from headrace.engine.prefix import Prefix
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.request import FinishReason, Submit

TOKEN_BYTES = 4


class Sample:
    """One answer to a prompt.

    tokens   [0, num_computed) computed · [num_computed, len(tokens)) to compute; the logits of the last one choose the next
    table    its blocks: their contents are right for the computed tokens, and shared ones may be further
    """

    __slots__ = (
        "capacity",
        "computed_before",
        "ends",
        "finished",
        "has_prompt",
        "index",
        "limit",
        "links",
        "num_computed",
        "order",
        "paused",
        "prefilling",
        "request",
        "request_id",
        "row",
        "shortest",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, index: int, emitted: bytes, context_length: int) -> None:
        params = request.submit.params
        self.request = request
        self.request_id = request.id
        self.index = index
        self.tokens = array("i", request.submit.prompt + emitted)
        self.num_computed = 0
        self.table: list[int] = []
        self.capacity = 0  # tokens that the table has room for
        self.row = -1  # in the executor; -1: waiting
        self.links: list[Prefix] = []  # names of its full blocks, as far as needed so far
        self.order: tuple[int, int, int, int, int] = (0, 0, 0, 0, index)  # place in policy order, lower first
        self.prefilling = False  # in a row, and more than its last token is to be computed, or its first is to be chosen
        self.has_prompt = False  # in a row, and the whole prompt is computed
        self.paused = False  # has run, and lost its row or its turn to others
        self.finished = False
        self.computed_before = 0  # tokens computed before a preemption: doing them again is the price of it
        self.ends = request.ends  # tokens that end it
        self.limit = min(request.num_prompt + params.max_tokens, context_length)  # len(tokens) that ends it
        # An end token counts only beyond. Where a grammar leaves nothing else, it comes before min_tokens, and counts.
        self.shortest = request.num_prompt + (0 if params.grammar else params.min_tokens)

    def end_reason(self) -> FinishReason | None:
        """Whether its tokens so far have ended it."""
        num_tokens = len(self.tokens)
        if num_tokens > self.shortest and self.tokens[-1] in self.ends:
            return "stop"
        return "length" if num_tokens >= self.limit else None


class Request:
    """What all samples of a request have in common, and when it ran. Raises InvalidRequest when the command contradicts itself."""

    __slots__ = (
        "account",
        "end_token_ids",
        "ends",
        "first_scheduled",
        "id",
        "links",
        "num_active",
        "num_open",
        "num_paused",
        "num_prompt",
        "num_rows",
        "num_scored",
        "parked",
        "paused_at",
        "samples",
        "submit",
        "tail",
    )

    def __init__(self, submit: Submit, end_token_ids: tuple[int, ...], context_length: int) -> None:
        params = submit.params
        size, remainder = divmod(len(submit.prompt), TOKEN_BYTES)
        if size == 0 or remainder:
            raise InvalidRequest(f"[Submit] prompt: expected one int32 token id or more, got {len(submit.prompt)} bytes")
        if submit.num_samples < 1 or params.max_tokens < 1:
            raise InvalidRequest(f"[Submit] num_samples, max_tokens: expected at least 1, got {submit.num_samples}, {params.max_tokens}")
        if submit.emitted and len(submit.emitted) != submit.num_samples:
            raise InvalidRequest(f"[Submit] emitted: expected {submit.num_samples} entries, one a sample, got {len(submit.emitted)}")
        if any(len(emitted) % TOKEN_BYTES for emitted in submit.emitted):
            raise InvalidRequest(f"[Submit] emitted: expected int32 token ids, got {[len(emitted) for emitted in submit.emitted]} bytes")
        self.id = submit.request_id
        self.submit = submit
        self.num_prompt = size
        # Tokens of the prompt after which the next one's log-probability is told, or not asked for; -1: an embedding is.
        self.num_scored = -1 if params.embed else size - 1 if params.prompt_logprobs < 0 else 0
        self.end_token_ids = (() if params.ignore_eos else end_token_ids) + params.stop_token_ids
        self.ends = frozenset(self.end_token_ids)
        self.links: list[Prefix] = []  # names of the prompt's full blocks, made when first looked for
        self.tail: Prefix | None = None  # name of the whole prompt, its last block full or not
        self.account: Account | None = None  # of its tenant, under the `fair` policy
        self.first_scheduled = -1.0
        emitted = submit.emitted or (b"",) * submit.num_samples
        self.samples = [Sample(self, index, tokens, context_length) for index, tokens in enumerate(emitted)]
        self.parked: list[Sample] = []  # wait until the first sample has computed the prompt, to share it
        self.num_open = 0  # samples that are not finished
        self.num_rows = 0  # samples in a row
        self.num_active = 0  # samples in a row and not paused
        self.num_paused = 0
        self.paused_at = -1.0  # since when it is stalled: some sample is paused and none is active

    @property
    def is_scored(self) -> bool:
        """Nothing of its prompt is left to be told, for which each of its rows must be computed."""
        return self.num_scored == self.num_prompt - 1

    def activate(self, sample: Sample, now: float) -> float:
        """A sample runs (again). Returns how long the request had been stalled, or -1 if it was not."""
        stalled = -1.0
        if sample.paused:
            sample.paused = False
            self.num_paused -= 1
        if self.paused_at >= 0:
            stalled = now - self.paused_at
            self.paused_at = -1.0
        self.num_active += 1
        return stalled

    def pause(self, sample: Sample, now: float) -> None:
        """An active sample was preempted, or waits in its row for a block."""
        sample.paused = True
        self.num_paused += 1
        self._deactivate(now)

    def finish(self, sample: Sample, was_active: bool, now: float) -> None:
        """A sample is over."""
        sample.finished = True
        self.num_open -= 1
        if sample.paused:
            sample.paused = False
            self.num_paused -= 1
        if was_active:
            self._deactivate(now)

    def _deactivate(self, now: float) -> None:
        self.num_active -= 1
        if self.num_active == 0 and self.num_paused:
            self.paused_at = now


def refuse_oversized(request: Request, config: EngineConfig, block_tokens: int) -> None:
    """Raises ContextLengthExceeded for what could not run even alone."""
    num_prompt, limit = request.num_prompt, request.samples[0].limit
    if num_prompt + 1 > config.context_length:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; the context length is {config.context_length} tokens, and the answer needs at least one"
        )
    blocks = -(-(limit - 1) // block_tokens)  # the last token's keys and values are never needed
    if blocks > config.num_blocks:
        raise ContextLengthExceeded(
            f"a prompt of {num_prompt} tokens with an answer of up to {limit - num_prompt} needs {blocks} KV blocks; "
            f"there are {config.num_blocks}, enough for {config.num_blocks * block_tokens} tokens"
        )
