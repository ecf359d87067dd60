"""The simulator: skipping is stepping, its plans are the engine's own, and what it counts obeys laws that hold for any server."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.engine.loop import Engine, StepRecord
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.engine.skip import skip_steps
from headrace.errors import UsageError
from headrace.executors.simulated import SimulatedExecutor, VirtualClock
from headrace.plan.cost import CostModel
from headrace.plan.devices import load_devices
from headrace.plan.factors import named_factors
from headrace.plan.memory import LEVELS
from headrace.plan.models import known
from headrace.plan.simulate import Failure, Outcome, Routing, prompt_ids, simulate
from headrace.plan.traffic import Traffic, generate, read_trace
from headrace.request import SamplingParams, Submit

DATA = Path(__file__).parent / "data"
DEVICES = load_devices()


def cost_of(name: str) -> CostModel:
    shape = known(name)
    assert shape is not None
    return CostModel(shape, DEVICES["h100-sxm"], LEVELS["bf16"], 1, named_factors())


LLAMA, WINDOWED = cost_of("Llama-3.1-8B"), cost_of("gpt-oss-20b")


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "context_length": 131_072, "num_blocks": 5000, "max_batch_size": 64, "max_batch_tokens": 2048, "step_target_s": 0.1,
        "prefix_cache": False, "max_waiting": 1 << 20,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def told(outcome: Outcome) -> dict[str, Any]:
    """Everything but how it was found."""
    summary = {key: value for key, value in outcome.summary().items() if key != "steps_skipped"}
    pools = [(r.scheduler.pool.refs, r.scheduler.pool._free, list(r.scheduler.pool._cached)) for r in outcome.replicas]
    counted = [(r.scheduler.tally.steps, r.scheduler.tally.prompt_tokens, r.scheduler.budget.limit(True, True)) for r in outcome.replicas]
    return summary | {
        "records": [asdict(record) for record in outcome.records], "timeline": asdict(outcome.timeline), "pools": pools, "counted": counted
    }  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Traffic, EngineConfig, dict[str, Any]]:
    count = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 2.0]), min_size=count, max_size=count))
    times = [sum(gaps[:i]) for i in range(count)]
    lengths = st.lists(st.integers(1, 200), min_size=count, max_size=count)
    prompts, answers = draw(lengths), draw(lengths)
    hashes = None
    if shared := draw(st.booleans()):
        prompts = [512 * draw(st.integers(0, 2)) + prompt for prompt in prompts]
        hashes = [tuple(draw(st.integers(0, 2)) for _ in range(-(-prompt // 512))) for prompt in prompts]
    replicas = draw(st.integers(1, 3))
    down = draw(st.lists(st.builds(Failure, st.floats(0, 3), st.integers(0, replicas - 1), st.floats(0.1, 2)), max_size=2))
    settings_ = config(
        num_blocks=draw(st.sampled_from([60, 80, 400])),
        max_batch_size=draw(st.sampled_from([2, 5, 64])),
        max_batch_tokens=draw(st.sampled_from([32, 256])),
        step_target_s=draw(st.sampled_from([0.0, 0.01])),
        policy=draw(st.sampled_from(["fcfs", "shortest", "fair"])),
        prefix_cache=shared,
    )
    routing: Routing = draw(st.sampled_from(["round-robin", "least-load", "prefix"]))
    return Traffic("drawn", times, prompts, answers, hashes), settings_, {"replicas": replicas, "routing": routing, "failures": down}


@settings(max_examples=80)
@given(workloads(), st.sampled_from([LLAMA, WINDOWED]))
def test_skipping_is_stepping(drawn: tuple[Traffic, EngineConfig, dict[str, Any]], cost: CostModel) -> None:
    traffic, engine, how = drawn
    stepped = simulate(traffic, cost, engine, fast=False, **how)
    skipped = simulate(traffic, cost, engine, fast=True, **how)
    assert told(skipped) == told(stepped)
    for replica in skipped.replicas:
        replica.scheduler.check()


def test_most_steps_of_a_quiet_server_are_skipped() -> None:
    summary = simulate(generate(0.2, 300, 400, count=20), LLAMA, config()).summary()
    assert summary["steps_skipped"] > 0.9 * summary["steps"]


def test_a_step_with_an_event_cannot_be_skipped() -> None:
    clock = VirtualClock()
    scheduler = Scheduler(config(), clock)
    scheduler.add(Submit(1, bytes(400), SamplingParams(5, ignore_eos=True), 0, 0.0))
    with pytest.raises(RuntimeError, match="something happens in them"):
        skip_steps(scheduler, 0, [0.1], 0.1)


class _Cost:
    """What the simulation charges for a plan, for the executor that checks plans."""

    def seconds(self, plan: Plan) -> float:
        return LLAMA.step_s(plan.chunks)


@pytest.mark.parametrize("hashed", [False, True])
def test_plans_are_the_engines_own(hashed: bool) -> None:
    """The same commands at the same times through `engine/loop.py` and an executor that checks every block: the same plans."""
    traffic = read_trace(DATA / "agents.jsonl") if hashed else read_trace(DATA / "chat.csv").first(150)
    engine_config = config(num_blocks=700 if hashed else 90, prefix_cache=hashed, context_length=16_384)
    plans: list[tuple[Plan, float]] = []
    outcome = simulate(traffic, LLAMA, engine_config, on_step=lambda _, plan, start: plans.append((plan, start)))
    assert outcome.summary()["preemptions"] > 0 or hashed

    clock = VirtualClock()
    executor = SimulatedExecutor(clock, engine_config.num_blocks, _Cost())  # type: ignore[arg-type]
    steps: list[StepRecord] = []
    engine = Engine(
        Scheduler(engine_config, clock), executor, record=lambda seen: steps.append(seen) if isinstance(seen, StepRecord) else None
    )
    for i, time in enumerate(traffic.times):
        received = time + LLAMA.factors.request_s
        while engine.has_work and clock.now < received:
            engine.step()
        if not engine.has_work:
            clock.now = max(clock.now, received)
        ids = prompt_ids(traffic.prompts[i], traffic.hashes[i] if traffic.hashes else ())
        engine.apply(Submit(i, ids, SamplingParams(traffic.answers[i], temperature=0.0, ignore_eos=True), 0, received))
    while engine.has_work:
        engine.step()

    def seen(plan: Plan) -> tuple[Any, ...]:
        rows = [(new.row, new.num_prompt, len(new.tokens)) for new in plan.new_rows]
        return plan.chunks, rows, plan.freed_rows, plan.new_blocks, plan.copies

    assert len(steps) == len(plans) > 100
    for step, (plan, start) in zip(steps, plans, strict=True):
        assert step.started == start
        assert seen(step.plan) == seen(plan)


def test_one_request_by_hand() -> None:
    traffic = Traffic("one", [0.0], [1000], [3])
    outcome = simulate(traffic, LLAMA, config(step_target_s=0.0))
    (record,) = outcome.records
    start = LLAMA.factors.request_s
    first = start + LLAMA.weights_s(1000, 1) + LLAMA.prompt_s(0, 1000) + LLAMA.overhead_s(1000, 1)
    second = first + LLAMA.decode_s(1, 1001)
    assert (record.admitted, record.first) == (pytest.approx(start), pytest.approx(first))
    assert record.ended == pytest.approx(second + LLAMA.decode_s(1, 1002))
    assert record.produced == 3


def test_laws() -> None:
    traffic = read_trace(DATA / "chat.csv")
    outcome = simulate(traffic, LLAMA, config(), replicas=2)
    summary = outcome.summary()
    assert [record.produced for record in outcome.records] == traffic.answers
    for record in outcome.records:
        assert record.arrived < record.received <= record.admitted < record.first <= record.last == record.ended
    # Little: requests inside are arrivals a second times the time each stays.
    stay = sum(record.ended - record.received for record in outcome.records) / len(traffic)
    assert summary["concurrency"] == pytest.approx(len(traffic) / outcome.ended * stay)
    assert sum(outcome.timeline.running) + sum(outcome.timeline.waiting) == pytest.approx(summary["concurrency"] * outcome.ended, rel=0.02)
    assert 0 < summary["utilization"] <= 1
    assert sum(outcome.gaps.counts) == sum(traffic.answers) - len(traffic)
    ttft = np.array([record.first - record.arrived for record in outcome.records]) * 1e3
    for q in (50, 90, 95, 99):
        assert summary["ttft_ms"][f"p{q}"] == pytest.approx(np.percentile(ttft, q, method="inverted_cdf"))
    pooled = np.repeat(outcome.gaps.seconds, outcome.gaps.counts) * 1e3
    assert summary["itl_ms"]["p95"] == pytest.approx(np.percentile(pooled, 95, method="inverted_cdf"))
    assert summary["itl_ms"]["mean"] == pytest.approx(pooled.mean())
    assert outcome.good_share(1e9, 1e9) == 1.0
    assert outcome.good_share(0.0, 1e9) == 0.0


def test_more_replicas_wait_less() -> None:
    traffic = read_trace(DATA / "chat.csv").scaled(8)
    waits = [simulate(traffic, LLAMA, config(), replicas=n).summary()["ttft_ms"]["p95"] for n in (1, 2, 4)]
    assert waits[0] > 1.5 * waits[1] > 1.5 * waits[2]


def test_prefix_affinity_finds_what_least_load_loses() -> None:
    traffic = read_trace(DATA / "agents.jsonl")
    assert traffic.prefix_share() == pytest.approx(0.6, abs=0.3)

    def cached(routing: Routing) -> float:
        return float(simulate(traffic, LLAMA, config(prefix_cache=True), replicas=4, routing=routing).summary()["cached_share"])

    assert cached("prefix") > cached("least-load") + 0.1
    assert cached("prefix") > 0.8 * traffic.prefix_share()
    with pytest.raises(UsageError, match="no hash ids"):
        simulate(read_trace(DATA / "chat.csv"), LLAMA, config(prefix_cache=True))


def test_a_lost_replica_loses_no_request() -> None:
    traffic = read_trace(DATA / "chat.csv").scaled(4)
    whole = simulate(traffic, LLAMA, config(), replicas=2)
    broken = simulate(traffic, LLAMA, config(), replicas=2, failures=[Failure(10.0, 0, 8.0)])
    assert broken.summary()["retried"] > 0
    assert [record.produced for record in broken.records] == traffic.answers
    assert broken.summary()["ttft_ms"]["p99"] > whole.summary()["ttft_ms"]["p99"]
    alone = simulate(traffic, LLAMA, config(), failures=[Failure(10.0, 0, 5.0)])  # nowhere to go: they wait for it
    assert [record.produced for record in alone.records] == traffic.answers
    with pytest.raises(UsageError, match="replica 3 of 2"):
        simulate(traffic, LLAMA, config(), replicas=2, failures=[Failure(1.0, 3, 1.0)])


def test_round_robin_deals_out_evenly() -> None:
    outcome = simulate(read_trace(DATA / "chat.csv"), LLAMA, config(), replicas=3, routing="round-robin")
    counts = [sum(record.replica == i for record in outcome.records) for i in range(3)]
    assert max(counts) - min(counts) <= 1


def test_what_never_fits_is_refused_and_counted() -> None:
    outcome = simulate(Traffic("long", [0.0, 1.0], [100, 5000], [10, 10]), LLAMA, config(num_blocks=20))
    assert outcome.summary()["refused"] == 1
    assert "KV blocks" in outcome.records[1].refused
    assert outcome.good_share(10, 10) == 0.5


def test_traces() -> None:
    traffic = read_trace(DATA / "chat.csv")
    assert len(traffic) == 480
    assert traffic.times[0] == 0.0
    assert traffic.peak_rate(10) > 1.7 * traffic.rate
    assert traffic.peak_rate(1e6) == traffic.rate
    assert traffic.scaled(2).rate == pytest.approx(2 * traffic.rate)
    twice = traffic.first(960)
    assert twice.prompts[480:] == traffic.prompts
    assert twice.rate == pytest.approx(traffic.rate, rel=1e-2)
    named = read_trace(DATA / "agents.jsonl").first(300)
    assert named.hashes is not None
    assert not {name for names in named.hashes[:150] for name in names} & {name for names in named.hashes[150:] for name in names}


def test_generated_traffic_has_the_means_it_was_asked_for() -> None:
    traffic = generate(5, 1200, 210, count=20_000, seed=3)
    assert traffic.rate == pytest.approx(5, rel=0.03)
    assert np.mean(traffic.prompts) == pytest.approx(1200, rel=0.03)
    assert np.std(traffic.prompts) / np.mean(traffic.prompts) == pytest.approx(1.0, rel=0.1)
    assert set(generate(5, 100, 10, count=10, spread=0).prompts) == {100}
    for bad in ({"rate": 0}, {"prompt": -1}, {"answer": float("nan")}):
        with pytest.raises(UsageError, match="expected a positive number"):
            generate(**({"rate": 1.0, "prompt": 1.0, "answer": 1.0} | bad))


LINE = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the columns TIMESTAMP"),
        ("a,b\n1,2\n", "expected the columns TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,0,10\n",
            "line 2: ContextTokens: expected 1 token or more, got '0'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,\n", "line 2: GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2: expected a time in seconds or as a date, got 'yesterday'"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n2,5,5\n1,5,5\n", "line 3: earlier than the line before"),
        ('{"timestamp": 0}\n', "line 1: input_length: expected 1 token or more, got 'None'"),
        (LINE + "\n{\n", "line 2: expected an object with timestamp"),
        (LINE.replace("[0, 1]", "[0]"), "hash_ids: expected 2 for 600 tokens, got 1"),
        (LINE + "\n" + LINE.replace(', "hash_ids": [0, 1]', ""), "some requests have hash_ids and some have none"),
    ],
)
def test_a_trace_that_is_none_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_trace(path)


def test_a_gap_in_a_trace_is_told_and_counts_as_silence(tmp_path: Path) -> None:
    assert read_trace(DATA / "chat.csv").notes == ()
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i + 900 * (i > 200)},5,5\n" for i in range(400)))
    assert read_trace(path).notes == ("the trace has a gap of 901 s before line 203; it counts as silence",)
