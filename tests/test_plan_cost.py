"""The cost model against hand arithmetic, and against measured rows.

tests/data/measured.csv is every ninth row of the measurements the factors were judged on (aiconfigurator's silicon_sample.csv, Apache-2.0);
where the whole file lies beside the repository it is used instead.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.cli.recording import Recorder, StepLine, read
from headrace.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.errors import UsageError
from headrace.executors.simulated import SimulatedExecutor, VirtualClock
from headrace.plan.calibrate import Step, fit, step_errors
from headrace.plan.cost import CostModel
from headrace.plan.devices import load_devices
from headrace.plan.factors import CPU, Factors, dump_factors, load_factors, named_factors
from headrace.plan.measured import Row, check, predict, read_measured
from headrace.plan.memory import CPU_LEVELS, LEVELS, weight_bytes
from headrace.plan.models import known
from headrace.plan.shape import Shape
from headrace.request import SamplingParams, Submit
from tests.test_cli import run

WHOLE = Path(__file__).parents[2] / "shared" / "data" / "gpu-measured.csv"
MEASURED = WHOLE if WHOLE.exists() else Path(__file__).parent / "data" / "measured.csv"
DEVICES = load_devices()
# Nothing fixed, nothing between devices: what a data sheet alone would give.
IDEAL = Factors(0.8, 0.8, 0.8, 0.8, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def shape(name: str) -> Shape:
    found = known(name)
    assert found is not None
    return found


def model(name: str, device: str = "h100-sxm", level: str = "bf16", tp: int = 1, factors: Factors = IDEAL) -> CostModel:
    return CostModel(shape(name), DEVICES[device], LEVELS[level], tp, factors)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found, skipped = read_measured(MEASURED, DEVICES)
    assert not skipped
    return found


def test_decoding_one_sequence_is_bound_by_reading_the_weights() -> None:
    """16 GB at 0.8 of 3350 GB/s: 167 steps a second; Llama-3.1-8B reads all its weights but the embedding."""
    llama = shape("Llama-3.1-8B")
    read = (weight_bytes(llama, LEVELS["bf16"]) - 2 * 128_256 * 4096) / (0.8 * 3350e9)
    assert model("Llama-3.1-8B").decode_s(1, 0) == pytest.approx(read, rel=0.01)
    assert 1 / read == pytest.approx(167 * 16 / 15.0, rel=0.01)


def test_a_prompt_is_bound_by_computing() -> None:
    llama = shape("Llama-3.1-8B")
    linear = sum(w.values for w in llama.weights if w.kind == "linear")
    attention = 2 * 4096 * 4096 / 2 * 32 * 256 * 32  # pairs, heads, key and value width, layers
    whole = (2 * linear * 4096 + attention) / (0.8 * 989e12)
    cost = model("Llama-3.1-8B")
    beside = (2 * 128_256 * 4096 + 4096 * 14 * 32 * 4096 * 2) / (0.8 * 3350e9)  # the output layer, and traffic between the products
    assert cost.weights_s(4096, 0) + cost.prompt_s(0, 4096) == pytest.approx(whole + beside, rel=0.001)
    chunks = sum(cost.prompt_s(start, start + 512) for start in range(0, 4096, 512))
    assert chunks == pytest.approx(cost.prompt_s(0, 4096))  # cut up, the same pairs


def test_context_costs_what_its_keys_and_values_cost_to_read() -> None:
    cost = model("Llama-3.1-8B", tp=2)
    step = cost.decode_s(10, 2000) - cost.decode_s(10, 1000)
    assert step == pytest.approx(10 * 1000 * 65_536 / (0.8 * 3350e9))
    windowed = model("gpt-oss-20b", level="int4")
    assert windowed.attend_s(100_000) / windowed.attend_s(1000) == pytest.approx((12 * 100_000 + 12 * 128) / (12 * 1000 + 12 * 128))


def test_experts_are_read_when_some_token_chooses_them() -> None:
    cost = model("Mixtral-8x7B")
    experts = 2 * 32 * 8 * 3 * 14336 * 4096  # bytes
    one, many = cost.weights_s(1, 1), cost.weights_s(64, 1)
    assert many - one == pytest.approx(0.75 * experts / (0.8 * 3350e9), rel=0.02)  # two of eight by one token, all by sixty-four


def test_devices_together_pay_for_the_exchange() -> None:
    alone, together = model("Llama-3.1-8B"), model("Llama-3.1-8B", tp=4)
    assert alone.decode_s(1, 100) / 4 < together.decode_s(1, 100) < alone.decode_s(1, 100) / 3.9
    slow = model("Llama-3.1-8B", tp=4, factors=replace(IDEAL, link_s=1e-5))
    assert slow.decode_s(1, 100) - together.decode_s(1, 100) == pytest.approx(2 * 32 * 1e-5)
    exchange = 2 * 32 * 2 * 3 / 4 * 4096 * 2 / (0.8 * 450e9)
    assert together.overhead_s(1000, 0) == pytest.approx(1000 * exchange)


def test_what_a_device_cannot_do_is_said() -> None:
    with pytest.raises(UsageError, match="b300 computes int8 at 3%"):
        model("Llama-3.1-8B", "b300", "int8")
    with pytest.raises(UsageError, match="goes together in up to 8"):
        model("Llama-3.1-8B", tp=16)


def test_the_shipped_factors_hold_for_a_model_they_were_not_fitted_on(rows: list[Row]) -> None:
    others = [row for row in rows if "Llama" not in row.model]
    told = check(others, named_factors())
    assert told["tpot"]["median"] < 0.15
    assert told["ttft"]["concurrency_to_32"]["median"] < 0.30
    published = check(others, named_factors("published"))
    assert published["tpot"]["median"] < 0.25


def test_half_of_the_rows_predict_the_other_half(rows: list[Row]) -> None:
    factors = fit(rows[::2], named_factors("published"))
    told = check(rows[1::2], factors)
    assert told["tpot"]["median"] < 0.12
    assert told["ttft"]["concurrency_to_32"]["median"] < 0.35
    assert fit(rows[::20], named_factors("published")) == fit(rows[::20], named_factors("published"))


def test_leaving_out_a_tp(rows: list[Row]) -> None:
    factors = fit([row for row in rows if row.tp != 2], named_factors("published"))
    assert check([row for row in rows if row.tp == 2], factors)["tpot"]["median"] < 0.15


def test_more_load_is_never_faster(rows: list[Row]) -> None:
    factors = named_factors()
    for row in rows[::10]:
        predictions = [predict(replace(row, concurrency=n), factors) for n in (1, 2, 4, 8, 16, 64, 256, 1024)]
        assert all(a.tpot <= b.tpot * 1.0001 for a, b in pairwise(predictions)), row
        assert all(a.ttft <= b.ttft * 1.0001 for a, b in pairwise(predictions)), row


def test_check_prints_what_machines_read(tmp_path: Path) -> None:
    path = Path(__file__).parent / "data" / "measured.csv"
    done = run("plan", "check", str(path), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"tpot", "ttft", "rows"} <= set(told)
    with path.open() as file:
        assert len(told["rows"]) == told["tpot"]["rows"] == sum(1 for _ in csv.DictReader(file))
    row = told["rows"][0]
    assert row["tpot_ms"]["error"] == pytest.approx(row["tpot_ms"]["predicted"] / row["tpot_ms"]["measured"] - 1)
    assert set(told["by"]) == {"device", "model", "tp"}
    assert "TPOT median" in run("plan", "check", str(path)).stdout
    out = tmp_path / "factors.yaml"
    done = run("plan", "calibrate", str(path), "--model", "llama", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert run("plan", "check", str(path), "--factors", str(out)).returncode == 0


def test_a_recording_gives_back_the_factors_behind_it(tmp_path: Path) -> None:
    """A server whose steps take what known factors say; calibrated at one load, the predictions for another are right."""
    own, device = shape("SmolLM2-135M"), "epyc-turin-9755"
    true = replace(CPU, bandwidth=0.5, compute_8=0.4, layer_s=4e-5, step_s=1e-3)
    cost = CostModel(own, DEVICES[device], CPU_LEVELS["int8"], 1, true)

    def record(name: str, load: int) -> Path:
        path, clock = tmp_path / name, VirtualClock(1.0)
        config = EngineConfig(2048, 4000, max_batch_size=64, max_batch_tokens=256, prefix_cache=False)
        recorder = Recorder(str(path), config, (), clock)
        executor = SimulatedExecutor(clock, 4000, _Charge(cost), verify=False)  # type: ignore[arg-type]
        engine = Engine(Scheduler(config, recorder.clock), executor, record=recorder)
        for i in range(20 * load):
            while len(engine.scheduler._requests) >= load:
                engine.step()
            submit = Submit(i, bytes(4 * (20 + 37 * i % 300)), SamplingParams(5 + 11 * i % 60, ignore_eos=True), 0, clock())
            engine.apply(submit)
        recorder.close()
        return path

    out = tmp_path / "here.yaml"
    arguments = ("--model", "SmolLM2-135M", "--level", "int8", "--device", device, "-o", str(out))
    done = run("plan", "calibrate", str(record("one.jsonl", 4)), *arguments)
    assert done.returncode == 0, done.stderr
    steps = [line for line in read(record("other.jsonl", 24)) if isinstance(line, StepLine)]
    seen = [Step(tuple(line.plan.chunks), line.clock[-1] - line.clock[-2]) for line in steps]
    before = step_errors(seen, CostModel(own, DEVICES[device], CPU_LEVELS["int8"], 1, CPU))
    after = step_errors(seen, CostModel(own, DEVICES[device], CPU_LEVELS["int8"], 1, load_factors(out)))
    assert before["median"] > 0.3
    assert after["median"] < 0.05
    assert abs(after["total"]) < 0.05
    assert "expected one file, and --model" in run("plan", "calibrate", str(tmp_path / "one.jsonl"), "-o", str(out)).stderr


class _Charge:
    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def seconds(self, plan: Plan) -> float:
        return self._cost.step_s(plan.chunks)


HEADER = "id,model_path,system,mode,gemm_quant_mode,isl,osl,batch_size,tp_size,pp_size,silicon_ttft_ms,silicon_tpot_ms\n"


def test_concurrency_is_the_ids_where_it_has_one(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(
        HEADER
        + "a_c288_tp2,Qwen/Qwen3-32B,h100,agg,,10,10,144,2,1,1,1\n"
        + "a_c_tp2,Qwen/Qwen3-32B,h100,agg,fp8_block,10,10,144,2,1,1,1\n"
        + "b,Qwen/Qwen3-32B,h100,disagg,,10,10,1,2,1,1,1\n"
        + "c,Someone/Unheard-Of-9B,h100,agg,,10,10,1,2,1,1,1\n"
        + "d,Qwen/Qwen3-32B,abacus,agg,,10,10,1,2,1,1,1\n"
        + "e,Qwen/Qwen3-32B,a100-80,agg,fp8,10,10,1,2,1,1,1\n"
        + "f,Qwen/Qwen3-32B,h100,agg,,10,10,1,2,4,1,1\n"
    )
    rows, skipped = read_measured(path, DEVICES)
    assert [(row.concurrency, row.level.name) for row in rows] == [(288, "bf16"), (144, "fp8")]
    assert [identifier for identifier, _ in skipped] == ["b", "c", "d", "e", "f"]
    assert "not in the built-in table" in skipped[1][1]
    assert "no fp8 in hardware" in skipped[3][1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the columns id"),
        ("id,isl\n", "missing: model_path"),
        (HEADER, "no rows"),
        (HEADER + "a,Qwen/Qwen3-32B,h100,agg,,x,10,1,2,1,1,1\n", "line 2: isl: expected a positive number, got 'x'"),
        (HEADER + "a,Qwen/Qwen3-32B,h100,agg,,10,10,1,2,1,1\n", "silicon_tpot_ms: expected a positive number"),
        (HEADER + "a,Qwen/Qwen3-32B,h100,agg,,10,10,-1,2,1,1,1\n", "batch_size: expected a positive number"),
        (HEADER + "a,Nobody/Knows,h100,agg,,10,10,1,2,1,1,1\n", "no row can be predicted: model Nobody/Knows"),
    ],
)
def test_a_file_that_is_no_measurement_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    done = run("plan", "check", str(path))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_factors_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(dump_factors(named_factors(), {"rows": 1}))
    assert load_factors(path) == named_factors()
    for text, says in (
        ("factors: {}", "'attention' is missing or not known"),
        (path.read_text().replace("bandwidth: 0.819", "bandwidth: 1.5"), "bandwidth: expected a number from 0.3 to 0.95"),
        ("- 1", "expected `factors:`"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            load_factors(path)
