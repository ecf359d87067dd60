"""The advice against hand arithmetic and against the simulator, and what a person is told."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.plan.advise import LOAD, Question, choose, mistakes, options
from headrace.plan.answer import answer
from headrace.plan.capacity import Capacity, Lengths, Objective, capacity, engine_config, kv_in_flight, sequences_that_fit
from headrace.plan.cost import CostModel
from headrace.plan.devices import Device, load_devices
from headrace.plan.factors import CPU, named_factors
from headrace.plan.measured import Row, predict, read_measured
from headrace.plan.memory import LEVELS, split_memory
from headrace.plan.models import known
from headrace.plan.money import Terms, monthly, per_million, rent_or_buy
from headrace.plan.page import page
from headrace.plan.shape import Shape
from headrace.plan.simulate import simulate
from headrace.plan.traffic import Traffic, generate, read_trace
from tests.test_cli import run

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "data"
DEVICES = load_devices()
PROMISE = Objective(1.0, 0.06)


def shape(name: str) -> Shape:
    found = known(name)
    assert found is not None
    return found


def question(model: str, traffic: Traffic, devices: list[str], **changes: Any) -> Question:
    chosen = [DEVICES[name] for name in devices]
    asked = Question(shape(model), traffic, PROMISE, chosen, lambda d: CPU if d.kind == "cpu" else named_factors())
    return replace(asked, **changes)


def replica(model: str, device: str, level: str, traffic: Traffic, promise: Objective = PROMISE) -> tuple[CostModel, Any, Capacity]:
    d = DEVICES[device]
    cost = CostModel(shape(model), d, LEVELS[level], 1, named_factors())
    memory = split_memory(shape(model), LEVELS[level], memory=d.memory, usable=d.usable, overhead=d.overhead)
    return cost, memory, capacity(cost, memory, Lengths.of(traffic), promise, 512)


def code_like(count: int = 3000) -> Traffic:
    """Bursts of long prompts with short answers between long silences, as an editor's completions come."""
    quiet = generate(1.0, 2000, 28, count=count // 2, spread=1.0, seed=5)
    burst = generate(30.0, 2000, 28, count=count // 2, spread=1.0, seed=6)
    both = sorted(
        zip(quiet.times + [500 + time for time in burst.times], quiet.prompts + burst.prompts, quiet.answers + burst.answers, strict=True)
    )
    return Traffic("code-like", [t for t, _, _ in both], [min(p, 7500) for _, p, _ in both], [a for _, _, a in both])


CODE = read_trace(SHARED / "azure-2023-code.csv") if SHARED.exists() else code_like()


def test_sequences_that_fit_come_from_the_distribution() -> None:
    memory = split_memory(shape("Llama-3.1-8B"), LEVELS["bf16"], memory=80e9, usable=0.9, overhead=1.6e9)
    same, spread = Lengths(((1000, 200),)), Lengths(((100, 200), (1900, 200)))
    cost = CostModel(shape("Llama-3.1-8B"), DEVICES["h100-sxm"], LEVELS["bf16"], 1, named_factors())
    mean, deviation = kv_in_flight(cost, same)
    assert (mean, deviation) == (131_072 * 1100, 0.0)
    assert sequences_that_fit(memory, mean, deviation) == pytest.approx(memory.kv / mean)
    wide, wider = kv_in_flight(cost, spread)
    assert wide == pytest.approx(mean)
    assert wider == pytest.approx(131_072 * 900)
    n = sequences_that_fit(memory, wide, wider)
    assert n * wide + 2.33 * n**0.5 * wider == pytest.approx(memory.kv)
    long_answers = Lengths(((1000, 10), (1000, 1000)))
    assert kv_in_flight(cost, long_answers)[0] == pytest.approx(131_072 * (10 * 1005 + 1000 * 1500) / 1010)  # met as often as they are long


@pytest.mark.parametrize(("model", "device", "level"), [("Llama-3.1-8B", "h100-sxm", "bf16"), ("Llama-3.1-8B", "l40s", "fp8")])
def test_capacity_holds_in_the_simulation_and_twice_as_much_does_not(model: str, device: str, level: str) -> None:
    lengths = generate(1.0, 1155, 211, count=700, spread=0.9, seed=2)
    cost, memory, carries = replica(model, device, level, lengths)
    config = engine_config(cost, memory, Lengths.of(lengths), PROMISE, prefix_cache=False)

    def good(load: float) -> float:
        return simulate(lengths.scaled(load * carries.rate / lengths.rate), cost, config).good_share(PROMISE.ttft, PROMISE.itl)

    assert good(LOAD) >= PROMISE.share
    assert good(2.0) < PROMISE.share


def test_what_gives_out_first() -> None:
    chat, code = generate(1.0, 100, 1000, count=500), CODE
    assert replica("Llama-3.1-8B", "h100-sxm", "bf16", code, Objective(2.0, 0.06))[2].limit == "compute"  # long prompts, short answers
    assert replica("Llama-3.1-8B", "h100-sxm", "bf16", chat, Objective(2.0, 0.015))[2].limit == "bandwidth"
    long = generate(1.0, 30_000, 1000, count=500, spread=0.1)
    assert replica("Llama-2-7b", "h100-sxm", "fp8", long, Objective(60.0, 0.2))[2].limit == "memory"
    none = replica("Llama-3.1-8B", "l4", "bf16", code, Objective(0.2, 0.1))[2]
    assert none.rate == 0
    assert "a prompt alone takes" in none.why


def test_replicas_for_the_peak_and_one_to_spare() -> None:
    asked = question("Llama-3.1-8B", CODE, ["h100-sxm"], levels=("fp8",))
    (option,) = options(asked)
    assert asked.peak > 8 * CODE.rate
    assert option.carries is not None
    assert option.needed == -(-asked.peak // (LOAD * option.carries.rate))
    assert option.replicas == option.needed + 1
    assert option.usd_month == pytest.approx(1.99 * 730 * option.count)
    told = answer(asked)["answer"]
    assert told["load_after_loss"] == pytest.approx(asked.peak / option.needed / option.carries.rate)
    assert told["limit"] == "compute"
    assert told["holds"]
    assert told["within_objective"] >= 0.95


def test_a_70b_is_quantized_before_it_is_split() -> None:
    slow = generate(0.02, 300, 100, count=300, spread=0.3)
    promise = Objective(3.0, 0.2)
    asked = question("Llama-3.1-70B", slow, ["h100-sxm"], levels=("bf16", "int4"), objective=promise)
    found = options(asked)
    best = choose(asked, found)
    assert best is not None
    assert (best.level.name, best.tp) == ("int4", 1)
    assert any("quantized rather than split" in reason for reason in best.reasons)
    split = next(option for option in found if option.level.name == "bf16")
    assert split.tp > 1
    assert any("quantize before splitting" in reason for reason in split.reasons)


def test_one_device_rather_than_two_of_about_the_same_price() -> None:
    big = replace(DEVICES["h200-sxm"], name="big", prices=(replace(DEVICES["h200-sxm"].prices[0], usd_hour=4.2),))
    small = replace(DEVICES["h100-sxm"], name="small")
    traffic = generate(0.05, 500, 100, count=300, spread=0.3)
    asked = replace(question("Mixtral-8x7B", traffic, [], levels=("bf16",), objective=Objective(3.0, 0.1)), devices=[small, big])
    found = options(asked)
    assert [(option.device.name, option.tp) for option in found] == [("small", 2), ("big", 1)]
    best = choose(asked, found)
    assert best is not None
    assert best.device.name == "big"
    assert "one device a replica rather than 2" in best.reasons[-1]


def test_the_two_mistakes_cost_less_and_do_not_hold() -> None:
    asked = question("Llama-3.1-8B", CODE, ["l40s"], levels=("fp8",), objective=Objective(2.0, 0.06))
    (option,) = options(asked)
    average, weights = mistakes(asked, option)
    assert option.usd_month is not None
    for mistake in (average, weights):
        assert mistake["usd_month"] < option.usd_month
        assert mistake["within_objective"] < 0.95
        assert mistake["why"]


def test_the_closed_form_of_a_closed_loop_agrees_with_the_simulator() -> None:
    """Equal lengths, as many requests open as the closed form says run: arrivals at the rate that keeps them so."""
    for concurrency, prompt, tokens in ((8, 1000, 200), (64, 1000, 500), (32, 4000, 200)):
        line = {"id": "x", "model_path": "Llama-3.1-8B", "system": "h100", "isl": prompt, "osl": tokens, "batch_size": concurrency}
        row = read_rows(line | {"tp_size": 1, "silicon_ttft_ms": 1, "silicon_tpot_ms": 1})
        said = predict(row, named_factors())
        rate = concurrency / (said.ttft + (tokens - 1) * said.tpot)
        traffic = generate(rate, prompt, tokens, count=400, spread=0)
        cost = CostModel(row.shape, row.device, row.level, 1, named_factors())
        config = EngineConfig(10_000, 12_000, 512, 8192, step_target_s=0.0, prefix_cache=False, max_waiting=1 << 30)
        assert simulate(traffic, cost, config).summary()["tpot_ms"]["p50"] == pytest.approx(1e3 * said.tpot, rel=0.15)


def read_rows(line: dict[str, Any]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.csv"
        path.write_text(",".join(line) + "\n" + ",".join(str(value) for value in line.values()) + "\n")
        ((row,), _) = read_measured(path, DEVICES)
        return row


def test_money_by_hand() -> None:
    h100 = DEVICES["h100-sxm"]
    assert monthly(h100, 3, Terms()) == pytest.approx(3 * 1.99 * 730)
    assert monthly(DEVICES["t4"], 1, Terms()) is None
    assert per_million(730 * 3.6, 1000) == pytest.approx(1.0)  # 3.6 USD an hour, 3.6 million tokens an hour
    told = rent_or_buy(h100, 2, Terms(duty=0.5, usd_kwh=0.3, purchase_usd=25_000))
    saved = 2 * 365 * (1.99 - 0.7 * 0.3)
    assert told["break_even_months"] == pytest.approx(50_000 / saved)
    assert told["break_even_price_usd"] == pytest.approx(saved * 36 / 2)
    assert "rent" in told["why"]
    assert "never buy" in rent_or_buy(h100, 1, Terms(usd_kwh=10))["why"]
    assert "no price is known" in rent_or_buy(DEVICES["t4"], 1, Terms())["why"]


def test_nothing_will_do_is_an_answer() -> None:
    traffic = read_trace(DATA / "chat.csv")
    told = answer(question("Llama-3.1-405B", traffic, ["t4"]))
    assert told["answer"] is None
    assert "does not fit" in told["cannot"]
    told = answer(question("Llama-3.1-8B", traffic, ["h100-sxm"], budget=100.0))
    assert "nothing within 100 USD a month: the cheapest, h100-sxm" in told["cannot"]
    with pytest.raises(UsageError, match="share from"):
        answer(question("Llama-3.1-8B", traffic, ["t4"], objective=Objective(1.0, 0.1, 1.5)))


def test_prefix_reuse_needs_fewer() -> None:
    traffic = read_trace(DATA / "agents.jsonl").scaled(20)
    told = answer(question("Llama-3.1-8B", traffic, ["l40s"], levels=("fp8",)))["answer"]
    blind = answer(question("Llama-3.1-8B", replace(traffic, hashes=None), ["l40s"], levels=("fp8",)))["answer"]
    assert told["predicted"]["cached_share"] > 0.2
    assert told["needed"] < blind["needed"]
    assert any("prefix cache has" in reason for reason in told["reasons"])


CHAT = ("plan", "Llama-3.1-8B", "--traffic", str(DATA / "chat.csv"), "--slo", "ttft=1000,itl=60", "--device", "h100-sxm", "--level", "fp8")


def test_the_command_tells_a_person_and_a_machine(tmp_path: Path) -> None:
    plan, html = tmp_path / "plan.json", tmp_path / "plan.html"
    done = run(*CHAT, "-o", str(plan), "--html", str(html))
    assert done.returncode == 0, done.stderr
    for text in (
        "take",
        "h100-sxm",
        "USD a month",
        "sized for average traffic",
        "counted the weights alone",
        "limit",
    ):
        assert text in done.stdout
    told = json.loads(plan.read_text())
    assert told == json.loads(run(*CHAT, "--json").stdout)  # the same every time
    assert told["version"] == 1
    assert told["answer"]["replicas"] == told["answer"]["needed"] + 1
    assert {"p50", "p95", "p99"} <= set(told["answer"]["predicted"]["ttft_ms"])
    text = html.read_text()
    assert text.startswith("<!doctype html>")
    assert all(title in text for title in ("Demand against capacity", "Percentiles", "Two common mistakes"))
    assert 'src="http' not in text.replace("'", '"')  # nothing is fetched


def test_a_page_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = run(*CHAT, "--html", str(tmp_path / "p.html"))
    assert done.returncode == 2
    assert "pip install 'headrace[report]'" in done.stderr
    with pytest.raises(UsageError, match="report"):
        page({})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "Llama-3.1-8B", "--slo", "ttft=1,itl=1"), "either --traffic FILE, or --rate"),
        (("plan", "Llama-3.1-8B", "--rate", "5", "--slo", "ttft=1,itl=1"), "expected --in and --out"),
        (("plan", "Llama-3.1-8B", "--rate", "0", "--in", "5", "--out", "5", "--slo", "ttft=1,itl=1"), "--rate: expected a positive"),
        ((*CHAT, "--slo", "ttft=1000"), "--slo: expected ttft=MS,itl=MS"),
        ((*CHAT, "--slo", "ttft=x,itl=1"), "--slo: expected"),
        ((*CHAT, "--slo", "ttft=-1,itl=1"), "--slo: expected positive times"),
        ((*CHAT, "--device", "abacus"), "unknown 'abacus'"),
        ((*CHAT, "--level", "int3"), "unknown 'int3'"),
        ((*CHAT, "--duty", "2"), "--duty: expected"),
        (("plan", "nobody-knows-it", *CHAT[2:]), "no model of the built-in table"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("lines", ["0,100,5", "0,100,5\n0,100,5", "0,1,1\n5,1,1"])
def test_the_smallest_traces(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "[odd] name.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + lines + "\n")
    done = run("plan", "Llama-3.1-8B", "--traffic", str(path), *CHAT[4:])
    assert done.returncode == 0, done.stderr
    assert "[odd] name.csv" in done.stdout
    assert "take" in done.stdout


def test_an_impossible_objective_is_a_plain_cannot() -> None:
    done = run("plan", "Llama-3.1-70B", "--rate", "1", "--in", "1000", "--out", "100", "--slo", "ttft=1,itl=1", "--device", "h100")
    assert done.returncode == 0
    assert "cannot" in done.stdout
    assert "alone takes" in done.stdout.replace("\n", " ")


def test_this_machine_is_measured_on_the_spot() -> None:
    slow = ("--traffic", str(DATA / "chat.csv"), "--scale", "0.02", "--slo", "ttft=60000,itl=6000")
    done = run("plan", "SmolLM2-135M", *slow, "--device", "this-machine", "--json")
    assert done.returncode == 0, done.stderr
    options_ = json.loads(done.stdout)["options"]
    assert {(option["device"], option["level"]) for option in options_} == {("this-machine", name) for name in ("bf16", "int8", "int4")}
    assert all(option["cannot"] is None for option in options_)


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    price = "prices: [{seller: me, usd_hour: 1, date: 2026-01-01}]"
    path.write_text(f"devices: {{mine: {{kind: gpu, memory_gb: 80, bandwidth_gbs: 3000, peaks: {{bf16: 900}}, {price}}}}}")
    done = run(*CHAT[:6], "--devices", str(path), "--device", "mine", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answer"]["usd_month"] % 730 == 0


def test_every_device_of_the_catalogue_has_an_answer_or_a_reason() -> None:
    for option in options(question("Llama-3.1-8B", read_trace(DATA / "chat.csv"), list(DEVICES))):
        assert option.cannot or (option.carries is not None and option.carries.limit and option.needed >= 1)
        device: Device = option.device
        assert device.peak(option.level.compute) or "hardware" in option.cannot
