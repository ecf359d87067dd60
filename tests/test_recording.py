"""A recording replays to the same plans, and says where it does not."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.recording import CommandLine, Line, Recorder, StepLine, read, replay, run_replay
from headrace.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.errors import UsageError
from headrace.executors.simulated import SimulatedExecutor, StepCost, VirtualClock
from headrace.request import Abort, SamplingParams, Submit


class FreeGrammars:
    """Every grammar is ready at once and allows everything."""

    def compile(self, grammar: str) -> Future[Any]:
        ready: Future[Any] = Future()
        ready.set_result(grammar)
        return ready

    def begin(self, plan: Plan) -> None: ...

    def masks(self) -> dict[int, bytes]:
        return {}

    def accept(self, plan: Plan, tokens: list[int]) -> Collection[int]:
        return ()


def record(path: Path, seed: int, policy: str = "shortest") -> int:
    """A hard life: a pool for two or three of a dozen requests, half of them alike, some aborted. Returns its steps."""
    rng = random.Random(seed)
    clock = VirtualClock(1.0)
    config = EngineConfig(
        context_length=400, num_blocks=14, max_batch_size=5, max_batch_tokens=96, step_target_s=0.01, policy=policy, max_waiting=9
    )  # type: ignore[arg-type]
    recorder = Recorder(str(path), config, [7], clock)
    executor = SimulatedExecutor(clock, 14, StepCost(), vocab_size=60)
    engine = Engine(Scheduler(config, recorder.clock, [7]), executor, FreeGrammars(), recorder)
    shared = [rng.randrange(60) for _ in range(150)]
    for i in range(40):
        prompt = shared[: rng.randint(1, 150)] + [rng.randrange(60) for _ in range(rng.randint(0, 60))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 190),
            logprobs=rng.choice([-1, -1, 2]),
            ignore_eos=rng.random() < 0.9,
            grammar=rng.choice(["", "", "a grammar"]),
        )
        samples = rng.choice([1, 1, 1, 3])
        engine.apply(Submit(i, array("i", prompt).tobytes(), params, i, clock(), samples, tenant=f"t{i % 3}", priority=i % 2))
        for _ in range(rng.randint(0, 20)):
            clock.advance(rng.random() / 100)
            engine.step()
        if rng.random() < 0.2:
            engine.apply(Abort(rng.randrange(i + 1)))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.tally.preemptions > 0
    recorder.close()
    return engine.scheduler.tally.steps


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "priority", "fair"])
def test_the_same_plans(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.jsonl"
    steps = [record(path, seed, policy) for seed in (1, 2)]  # two engine processes, one file
    found = replay(read(path))
    assert (found.engines, found.steps, found.different_at) == (2, sum(steps), 0)
    assert found.commands > 40


def change(lines: list[Line], what: str) -> list[Line]:
    """Something else at a step in the middle."""
    steps = [i for i, line in enumerate(lines) if isinstance(line, StepLine) and line.tokens]
    i = steps[len(steps) // 2]
    line = lines[i]
    assert isinstance(line, StepLine)
    if what == "token":  # 7 ends a sample that has ends
        for step in steps[len(steps) // 2 :]:
            line = lines[step]
            assert isinstance(line, StepLine)
            lines[step] = StepLine(line.clock, line.plan, [7] * len(line.tokens))
    elif what == "plan":
        line.plan.new_blocks.append((0, 0, [0]))
    elif what == "command":
        lines[i:i] = [CommandLine([], Submit(999, array("i", [1] * 40).tobytes(), SamplingParams(max_tokens=9), 0, 0.0))]
    return lines


@pytest.mark.parametrize("what", ["token", "plan", "command"])
def test_what_differs_is_found(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 3)
    before = replay(read(path))
    lines = change(read(path), what)
    found = replay(lines)
    assert 0 < found.different_at <= len(lines)
    assert found.steps < before.steps


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    steps = record(path, 4)
    path.write_bytes(path.read_bytes() + b'{"type":"step","cl')  # the process was killed while it wrote
    assert run_replay(path, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) | {"commands": 0} == {"engines": 1, "commands": 0, "steps": steps, "different_at": 0}
    assert run_replay(path, as_json=False) == 0
    assert "the same plans" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: expected the header"),
        (b'{"type":"step","clock":[],"plan":{},"tokens":[]}\n', "line 1: expected the header"),
        (b"no json\n", "line 1: not a line of a recording"),
        (b'{"type":"engine","version":2,"config":{"context_length":1,"num_blocks":1},"end_token_ids":[]}\n', "version 2, expected 1"),
        (b'{"type":"engine","version":1,"config":{"context_length":0,"num_blocks":1},"end_token_ids":[]}\n', "context_length"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read(path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none")
