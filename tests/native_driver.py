"""Drives an executor by hand: any prompts, any chunking, any block placement, and a hash of every row of logits."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence

import numpy as np

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.plan import Chunk, NewRow, Plan
from headrace.executors.native import NativeExecutor
from headrace.request import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Driver:
    """Rows 0.. hold prompts; `run` computes them in the given chunks and then decodes, all rows together."""

    def __init__(
        self, model: object, threads: int = 2, context: int = 512, blocks: int = 600, max_tokens: int = 1024, seed: int = 0
    ) -> None:
        config = EngineConfig(context_length=context, num_blocks=blocks, max_batch_size=64, max_batch_tokens=max_tokens)
        self.executor = NativeExecutor(model, config, threads)  # type: ignore[arg-type]
        self.max_tokens = max_tokens
        self.free = list(range(blocks))
        random.Random(seed).shuffle(self.free)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        chunk: int = 1 << 30,
        answer: int = 0,
        params: SamplingParams = GREEDY,
        seeds: Sequence[int] | None = None,
        all_logits: bool = True,
    ) -> tuple[list[list[str]], list[list[int]]]:
        """Per prompt: a hash of the logits of each position computed, and the tokens of the answer."""
        taken: list[int] = []
        plan = Plan()
        for row, prompt in enumerate(prompts):
            blocks = [self.free.pop() for _ in range(-(-(len(prompt) + answer) // BLOCK_TOKENS))]
            taken += blocks
            plan.new_rows.append(NewRow(row, array("i", prompt).tobytes(), len(prompt), params, seeds[row] if seeds else row, 0, ()))
            plan.new_blocks.append((row, 0, blocks))
        hashes: list[list[str]] = [[] for _ in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(done[row] < len(prompt) + max(answer - 1, 0) for row, prompt in enumerate(prompts)):
            budget = self.max_tokens
            for row, prompt in enumerate(prompts):
                known = len(prompt) + len(answers[row])
                stop = min(known, done[row] + min(chunk, budget))
                if stop <= done[row] or (done[row] >= len(prompt) and len(answers[row]) >= answer):
                    continue
                samples = stop == known and len(answers[row]) < answer
                start = done[row] if all_logits else stop - samples
                plan.chunks.append(Chunk(row, done[row], stop, start, samples))
                budget -= stop - done[row]
                done[row] = stop
                if not budget:
                    break
            self.executor.forward(plan)
            logits = self.executor.logits()
            digests = iter(self.hash_rows(logits))
            for c in plan.chunks:
                hashes[c.row] += [next(digests) for _ in range(c.logits_start, c.stop)]
            if any(c.samples for c in plan.chunks):
                tokens, _ = self.executor.sample(plan)
                for c, token in zip([c for c in plan.chunks if c.samples], tokens, strict=True):
                    answers[c.row].append(token)
            plan = Plan()
        self.free += taken
        return hashes, answers

    @staticmethod
    def hash_rows(logits: np.ndarray) -> list[str]:
        assert np.isfinite(logits).all()
        return [hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest() for row in logits]

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """float32 [len(prompt), vocab]: a copy."""
        plan = Plan(chunks=[Chunk(0, 0, len(prompt), 0, False)])
        plan.new_rows.append(NewRow(0, array("i", prompt).tobytes(), len(prompt), GREEDY, 0, 0, ()))
        plan.new_blocks.append((0, 0, self.free[: -(-len(prompt) // BLOCK_TOKENS)]))
        self.executor.forward(plan)
        return self.executor.logits().copy()
