"""Faults on purpose: what each form does, and that no answer changes by any of them."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from engine_oracle import World, random_config, random_submit, submit
from scripted_engine import ENVIRONMENT

from headrace.config import EngineConfig
from headrace.engine.faults import Faults, inject, parse
from headrace.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("step:17:raise", Faults({17: "raise"})),
        ("step:slow:2s", Faults({}, slow_s=2.0)),
        ("step:slow:1.5ms", Faults({}, slow_s=0.0015)),
        ("alloc:fail:3", Faults({}, fail_alloc=3)),
        ("preempt:random, step:1:kill,step:2:hang", Faults({1: "kill", 2: "hang"}, preempt=True)),
    ],
)
def test_forms(text: str, expected: Faults | None) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "step", "step:0:raise", "step:-1:raise", "step:1:fly", "step:slow:2", "step:slow:-2s", "alloc:fail:0", "preempt:all", ","]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"HEADRACE_FAULT: expected step:N:raise.*, got"):
        parse(text)


def test_a_server_does_not_start_with_a_form_it_does_not_know() -> None:
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT | {"HEADRACE_FAULT": "step:1:fly"}, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "HEADRACE_FAULT: expected step:N:raise" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "error", "steps"), [("step:3:raise", RuntimeError, 2), ("alloc:fail:2", MemoryError, 4)])
def test_a_fault_comes_when_it_is_due_and_in_the_first_process_only(text: str, error: type[Exception], steps: int) -> None:
    for restarted in (False, True):
        world = World(EngineConfig(context_length=64, num_blocks=16))
        engine = inject(parse(text), world.engine, restarted)
        engine.apply(submit(0, [0] * 5, 20, ignore_eos=True))  # blocks of four tokens: the second allocation comes with the ninth token
        if restarted:
            while engine.has_work:
                engine.step()
            assert world.scheduler.tally.steps == 20
            continue
        for _ in range(steps):
            engine.step()
        with pytest.raises(error):
            engine.step()


def test_random_preemption_changes_no_answer() -> None:
    preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        world = World(random_config(rng, 4))
        engine = inject(parse("preempt:random"), world.engine, False)
        prompts: list[list[int]] = []
        for i in range(8):
            world.submit(random_submit(rng, i, world.clock.now, prompts))
        for _ in range(20_000):
            if not engine.has_work:
                break
            world._hear(engine.step())
            world.scheduler.check()
        assert not engine.has_work
        assert world.scheduler.pool.num_held == 0
        for heard in world.heard.values():
            world._check_answer(heard)
        preemptions += world.scheduler.tally.preemptions
    assert preemptions > 100
