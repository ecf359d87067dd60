"""What structured output costs: 32 decoding samples, half of them held by a JSON schema, beside 32 free ones; rounds in turn.

python benchmarks/grammar.py [--rounds 5] [--tokens 48] [--model PATH]
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from pathlib import Path
from typing import Any, cast

from headrace import machine
from headrace.cli.engine_process import grammars
from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.scheduler import Scheduler
from headrace.executors.native import NativeExecutor
from headrace.models import loader
from headrace.models.hub import default_model_path
from headrace.request import SamplingParams, Submit
from headrace.text.grammar import schema_grammar

BATCH, PROMPT, AIM = 32, 64, 0.9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", "calm"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}  # more than any round writes


class Bench:
    """One engine on the real kernels; `run` is a batch from its first decoding step to its last."""

    def __init__(self, path: Path, tokens: int) -> None:
        model = loader.load_model(path)
        context = PROMPT + tokens + 8
        blocks = BATCH * -(-context // BLOCK_TOKENS)
        config = EngineConfig(
            context_length=context, num_blocks=blocks, max_batch_size=BATCH, max_batch_tokens=BATCH * PROMPT, prefix_cache=False
        )
        self.vocab = model.config.vocab_size
        self.tokens = tokens
        self.grammar = schema_grammar(PEOPLE)
        self.grammars = grammars(str(path), self.vocab, model.end_token_ids)
        executor = NativeExecutor(cast("Any", model), config, machine.threads())
        self.engine = Engine(Scheduler(config, time.monotonic, model.end_token_ids), executor, self.grammars)
        self._next = 0

    def run(self, constrained: int) -> tuple[float, float]:
        """Tokens a second, and milliseconds of masks a step. Half of the samples are greedy, half are drawn."""
        engine, first = self.engine, self._next
        for i in range(BATCH):
            prompt = array("i", [(31 * (first + i) + 7 * k) % self.vocab for k in range(PROMPT)]).tobytes()
            held = i < constrained
            params = SamplingParams(
                max_tokens=self.tokens, temperature=float(i % 2), ignore_eos=not held, grammar=self.grammar if held else ""
            )
            engine.apply(Submit(first + i, prompt, params, seed=i, received=time.monotonic()))
        self._next += BATCH
        while not all(sample.tokens[PROMPT:] for sample in engine.scheduler._rows.running) or len(engine.scheduler._rows.running) < BATCH:
            engine.step()
        masks, steps, made, started = self.grammars.seconds, 0, 0, time.perf_counter()
        while engine.has_work:
            events = engine.step()
            steps += 1
            made += len(events.tokens) if events is not None else 0
        took = time.perf_counter() - started
        return made / took, 1000 * (self.grammars.seconds - masks) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", type=Path, default=None)
    a = parser.parse_args()
    bench = Bench(a.model or default_model_path(), a.tokens)
    bench.run(BATCH // 2)  # loads the vocabulary, compiles the grammar
    rows = []
    for i in range(a.rounds):
        found = {constrained: bench.run(constrained) for constrained in ((0, BATCH // 2) if i % 2 else (BATCH // 2, 0))}
        (free, _), (half, masks) = found[0], found[BATCH // 2]
        rows.append((half / free, free, half, masks))
        print(
            f"free {free:7.1f} tok/s   half constrained {half:7.1f} tok/s   ratio {half / free:.3f}   masks {masks:.2f} ms a step",
            flush=True,
        )
    ratio, free, half, masks = (statistics.median(column) for column in zip(*rows, strict=True))
    per_row = 1000 * masks / (BATCH // 2)
    print(f"median of {a.rounds} rounds: {half:.1f} of {free:.1f} tok/s, ratio {ratio:.3f} (aim: {AIM}); a mask {per_row:.0f} us")
    if ratio < AIM:
        raise SystemExit(f"the ratio is below {AIM}")


if __name__ == "__main__":
    main()
