"""What structured output costs: 32 decoding samples, half of them held by a JSON schema, beside 32 free ones; steps in turn.

python benchmarks/grammar.py [--rounds 5] [--tokens 48] [--model PATH]
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

from headrace import machine
from headrace.cli.engine_process import grammars
from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.scheduler import Scheduler
from headrace.executors.native import NativeExecutor
from headrace.models import loader
from headrace.models.hub import default_model_path
from headrace.request import Abort, SamplingParams, Submit
from headrace.text.grammar import schema_grammar

BATCH, PROMPT, AIM = 32, 64, 0.9
SLACK = 32  # tokens that the first samples may be ahead of the last
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


class Batch:
    """An engine on the real kernels with 32 samples, `constrained` of them held by the schema; half are greedy, half are drawn."""

    def __init__(self, model: Any, path: Path, tokens: int, constrained: int) -> None:
        context = PROMPT + tokens + SLACK
        config = EngineConfig(
            context_length=context,
            num_blocks=BATCH * -(-context // BLOCK_TOKENS),
            max_batch_size=BATCH,
            max_batch_tokens=BATCH * PROMPT,
            prefix_cache=False,
        )
        self.vocab, self.tokens, self.constrained = model.config.vocab_size, tokens, constrained
        self.grammars = grammars(str(path), self.vocab, model.end_token_ids)
        self.engine = Engine(
            Scheduler(config, time.monotonic, model.end_token_ids), NativeExecutor(model, config, machine.threads()), self.grammars
        )
        self._grammar = schema_grammar(PEOPLE)
        self.grammars.compile(self._grammar).result()

    def start(self) -> None:
        """Submit all, and step until all decode."""
        for i in range(BATCH):
            prompt = array("i", [(31 * i + 7 * k) % self.vocab for k in range(PROMPT)]).tobytes()
            held = i < self.constrained
            params = SamplingParams(
                max_tokens=self.tokens + SLACK, temperature=float(i % 2), ignore_eos=not held, grammar=self._grammar if held else ""
            )
            self.engine.apply(Submit(i, prompt, params, seed=i, received=time.monotonic()))
        while (events := self.engine.step()) is None or len(events.tokens) < BATCH:
            pass

    def end(self) -> None:
        for i in range(BATCH):
            self.engine.apply(Abort(i))

    def step(self) -> float:
        """Seconds of a step of all samples."""
        started = time.perf_counter()
        events = self.engine.step()
        took = time.perf_counter() - started
        if events is None or len(events.tokens) != BATCH:
            raise SystemExit("a sample ended too early")
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", type=Path, default=None)
    a = parser.parse_args()
    path = a.model or default_model_path()
    model = loader.load_model(path)
    free, half = Batch(model, path, a.tokens, 0), Batch(model, path, a.tokens, BATCH // 2)
    rows = []
    for _ in range(a.rounds):
        free.start()
        half.start()
        before = half.grammars.seconds
        pairs = [(free.step(), half.step()) for _ in range(a.tokens - 1)]  # neighbours, so that the machine's moods fall on both
        free.end()
        half.end()
        masks = 1000 * (half.grammars.seconds - before) / len(pairs)
        free_ms, half_ms = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        rows.append((ratio, free_ms, half_ms, masks))
        print(f"a step: free {free_ms:6.1f} ms   half constrained {half_ms:6.1f} ms   speed {ratio:.3f}   masks {masks:.2f} ms", flush=True)
    ratio, free_ms, half_ms, masks = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"median of {a.rounds} rounds: speed {ratio:.3f} of the free batch's (aim: {AIM}); a mask {1000 * masks / (BATCH // 2):.0f} us")
    if ratio < AIM:
        raise SystemExit(f"the speed is below {AIM}")


if __name__ == "__main__":
    main()
