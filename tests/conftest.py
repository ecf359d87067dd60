"""What several test files share: a clock that stands still, and an executor that does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from scripted_engine import ServerProcess, wait_for

from headrace.engine.plan import Plan
from headrace.executors.simulated import VirtualClock
from headrace.request import TokenLogprob

settings.register_profile("headrace", deadline=None)  # a machine that pauses is no failure: time is for benchmarks
settings.load_profile("headrace")


class ScriptedExecutor:
    """Answers with `tokens` in turn, then with the last one for ever. `fail_at` is the step (from 0) that raises."""

    def __init__(self, tokens: list[int] | None = None, fail_at: int = -1) -> None:
        self.plans: list[Plan] = []
        self._tokens = list(tokens or [0])
        self._fail_at = fail_at

    def forward(self, plan: Plan) -> None:
        if len(self.plans) == self._fail_at:
            raise RuntimeError("the kernel stumbled")
        self.plans.append(plan)

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        count = sum(chunk.samples for chunk in plan.chunks)
        return [self._tokens.pop(0) if len(self._tokens) > 1 else self._tokens[0] for _ in range(count)], []


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1.0)


@pytest.fixture
def scripted() -> Callable[..., ScriptedExecutor]:
    return ScriptedExecutor


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A quick one with a scripted engine, which a module shares; in the end nothing is open and nothing was raised."""
    with ServerProcess("--step-ms", "0.1") as server:
        yield server
        wait_for(lambda: server.metric("requests_open") == 0)
    assert "Traceback" not in server.said()
