"""Figures of requests on timelines made by hand: what is counted from when, by whose definition, and what a summary says of them."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.compare import beside, read_plan
from headrace.bench.drive import Run
from headrace.bench.objective import Objective
from headrace.bench.page import page
from headrace.bench.record import FIGURES, GAPS, OTHERS, Record
from headrace.bench.report import rows, show
from headrace.bench.stream import Answer, reason_of
from headrace.bench.summary import summary
from headrace.bench.window import Window, find
from headrace.errors import UsageError
from tests.load_server import DONE, ROLE, delta, event, usage


def read(*parts: tuple[float, bytes]) -> tuple[Record, str]:
    record = Record(0)
    answer = Answer(record)
    for now, part in parts:
        answer.feed(part, now)
    return record, answer.close()


PLAIN = [
    (1.0, ROLE),
    (1.5, delta("a")),
    (1.7, delta("b")),
    (2.0, delta("c")),
    (2.0, delta(None, finish="stop")),
    (2.1, usage(4)),
    (2.1, DONE),
]


def test_a_role_and_the_usage_are_no_tokens() -> None:
    record, problem = read(*PLAIN)
    assert problem == ""
    assert record.first_chunk == 1.0
    assert record.times == [1.5, 1.7, 2.0]
    assert (record.tokens, record.text_tokens, record.prompt_tokens, record.finish) == (4, 3, 10, "stop")  # the fourth is the end token
    assert record.last_chunk == 2.0
    assert record.token_gaps() == pytest.approx([0.2, 0.3])


@given(st.lists(st.integers(1, 400), max_size=40))
def test_it_makes_no_difference_how_the_network_cuts_a_stream(cuts: list[int]) -> None:
    whole = b": a comment\r\nevent: chunk\r\n" + b"".join(part for _, part in PLAIN).replace(b"\n\n", b"\r\n\r\n")
    record = Record(0)
    answer = Answer(record, keep_text=True)
    at = 0
    for cut in [*cuts, len(whole)]:
        answer.feed(whole[at : at + cut], 1.0)
        at += cut
    assert answer.close() == ""
    assert answer.text == ["a", "b", "c"]
    assert len(record.times) == 3


def test_tokens_of_a_chunk_are_counted_by_what_the_server_says() -> None:
    continuous, _ = read((1, delta("ab", usage={"completion_tokens": 2})), (2, delta("cde", usage={"completion_tokens": 5})), (3, DONE))
    assert (continuous.counts, continuous.exact, continuous.tokens) == ([2, 3], True, 5)
    assert continuous.token_gaps() == [1.0, 0.0, 0.0, 0.0]
    assert continuous.divided_gaps() == pytest.approx([1 / 3] * 3)
    by_logprobs, _ = read((1, delta("ab", logprobs=2)), (2, delta("", logprobs=1)), (3, delta("c", logprobs=1)), (3, usage(4)), (3, DONE))
    assert (by_logprobs.counts, by_logprobs.exact) == ([2, 2], True)  # the token without text comes with the next that has some
    assert by_logprobs.times == [1, 3]
    at_the_end, _ = read((1, delta("ab")), (2, delta("cd")), (2, delta(None, finish="length")), (3, usage(5)), (3, DONE))
    assert (at_the_end.counts, at_the_end.exact, at_the_end.tokens) == ([1, 1], False, 5)
    assert sorted(at_the_end.token_gaps()) == [0.0, 0.0, 0.0, 1.0]
    ids, _ = read((1, event(choices=[{"text": "ab", "token_ids": [5, 6]}])), (2, DONE))
    assert ids.counts == [2]


def test_reasoning_and_calls_are_tokens_and_the_answer_begins_after_reasoning() -> None:
    record, problem = read((1, delta(None, reasoning_content="hm")), (2, delta(None, reasoning="so")), (4, delta("yes")), (5, DONE))
    assert (record.times, record.answer, problem) == ([1, 2, 4], 4, "")
    call, problem = read((1, ROLE), (2, delta(None, tool_calls=[{"index": 0}])), (3, delta(None, finish="tool_calls")))
    assert (call.times, call.answer, problem) == ([2], 2, "")


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([ROLE, delta(None, finish="stop"), usage(1), DONE], "empty answer"),
        ([ROLE, delta("a")], "the stream ended early"),
        ([b"hello\n"], "no event stream"),
        ([ROLE, delta("a"), event(error={"code": "engine_error", "message": "x"}), DONE], "error in the stream: engine_error"),
        ([b"data: {nonsense\n\n", DONE], "a chunk that is no chunk of the protocol"),
    ],
)
def test_answers_that_are_none(parts: list[bytes], problem: str) -> None:
    assert read(*((1.0, part) for part in parts))[1] == problem


def test_what_an_error_says() -> None:
    assert reason_of(b'{"error": {"message": "m", "code": "c"}}') == ": c"
    assert reason_of(b'{"detail": "d"}') == ": d"
    assert reason_of(b"<html>") == reason_of(b"[1]") == reason_of(b"{}") == ""


def test_server_timings_of_two_kinds() -> None:
    ours, _ = read((1, usage(1, timings={"accept": 1.0, "queue": 3.0, "prefill": 20.0, "decode": 40.0})))
    assert (ours.queue, ours.prefill, ours.decode) == (0.003, 0.02, 0.04)
    other, _ = read((1, usage(1, timings={"prompt_n": 5, "prompt_ms": 20.0, "predicted_ms": 40.0})))
    assert (other.queue, other.prefill, other.decode) == (None, 0.02, 0.04)


def example() -> Record:
    """Scheduled at 0, begun at 1, sent at 1.5; a role at 2, five tokens from 3 to 5, over at 6."""
    return Record(
        0, scheduled=0.0, started=1.0, sent=1.5, head=1.8, first_chunk=2.0, answer=3.0, last_chunk=5.5, end=6.0,
        times=[3.0, 3.5, 4.0, 4.5, 5.0], counts=[1] * 5, completion_tokens=5, finish="length", status=200,
    )  # fmt: skip


def test_every_definition_by_its_name() -> None:
    record = example()
    figures = {name: take(record) for name, take in (FIGURES | OTHERS).items()}
    assert figures == pytest.approx({
        "queue": None, "ttft": 3.0, "tpot": 0.5, "total": 6.0, "ttft_sent": 1.5, "ttft_started": 2.0, "ttft_first_chunk": 1.0,
        "ttft_answer": 3.0, "total_sent": 4.5, "total_started": 5.0, "e2el_vllm": 4.5, "itl_mean_aiperf": 3 / 4,
        "tpot_with_first_guidellm": 4 / 5, "ntpot_inference_perf": 1.0, "itl_llmperf": 1.0, "lag": 1.0, "connect": 0.5,
    })  # fmt: skip
    assert all(take(record) == [0.5] * 4 for take in GAPS.values())


def test_what_never_came_has_no_figure() -> None:
    record = Record(0)
    assert {take(record) for take in (FIGURES | OTHERS).values()} == {None}
    assert all(take(record) == [] for take in GAPS.values())
    one = Record(0, started=0.0, end=1.0, times=[0.5], counts=[1])
    assert FIGURES["tpot"](one) is None
    assert FIGURES["ttft"](one) == 0.5


def served(number: int, scheduled: float, *, ttft: float = 0.1, gap: float = 0.01, tokens: int = 10, late: float = 0.0) -> Record:
    first = scheduled + ttft
    times = [first + gap * i for i in range(tokens)]
    return Record(
        number, scheduled=scheduled, started=scheduled + late, sent=scheduled + late, first_chunk=first, last_chunk=times[-1],
        end=times[-1], times=times, counts=[1] * tokens, completion_tokens=tokens, prompt_tokens=7, finish="length",
        status=200, queue=0.001,
    )  # fmt: skip


def told(records: list[Record], objective: str = "", **run: Any) -> dict[str, Any]:
    window = find(records, is_level=False)
    done = Run(records=records, **({"wall_s": window.end, "cpu_s": 0.01, "delays": [0.0001] * 100} | run))
    return summary(done, window, Objective.parse(objective) if objective else None)


def test_a_stall_is_in_p99_from_the_schedule_though_hardly_a_request_was_sent_into_it() -> None:
    """One request a 10 ms; the server stops from 10.0 to 15.0 s. Who was due meanwhile waited for what was left of it.

    A tool that sends only when answered would have one request out of ten thousand with a long time.
    """

    def wait(due: float) -> float:
        return max(0.0, 15.0 - due) if due >= 10.0 else 0.0

    records = [served(i, i / 100, ttft=0.02 + wait(i / 100)) for i in range(10_000)]
    figure = told(records)["ttft_ms"]
    assert figure["p50"] == pytest.approx(20)
    assert figure["p99"] == pytest.approx(4020, abs=15)  # 100 of the 500 that waited waited longer
    assert figure["max"] == pytest.approx(5020)
    assert figure["p99_interval"][0] < figure["p99"] < figure["p99_interval"][1]


def test_a_stall_while_answering_is_a_gap_of_its_length_however_many_tokens_follow_at_once() -> None:
    """400 answers of 50 tokens; the server stops for 5 s in all of them after 25, then sends the next ten in one chunk."""
    records = []
    for number in range(400):
        times = [number + 0.1 + 0.01 * i for i in range(25)]
        after = times[-1] + 5.0
        times += [after + 0.01 * i for i in range(16)]
        record = served(number, float(number))
        record.times, record.counts, record.completion_tokens, record.exact = times, [1] * 25 + [10] + [1] * 15, 50, True
        record.end = record.last_chunk = times[-1]
        records.append(record)
    summed = told(records)
    assert summed["itl_ms"]["p99"] == pytest.approx(5000)  # 1 of 49 gaps
    assert summed["itl_ms"]["p50"] == pytest.approx(10)
    assert summed["others"]["itl_sglang_ms"]["max"] == pytest.approx(500)  # divided by ten, the stall is half a second
    assert summed["itl_ms"]["n"] == 400 * 49
    assert summed["others"]["itl_vllm_ms"]["n"] == 400 * 40


def test_p99_is_refused_from_too_few() -> None:
    few = told([served(i, i / 10) for i in range(367)])["ttft_ms"]
    assert (few["p99"], few["p99_interval"], few["p99_needs"]) == (None, None, 368)
    assert few["p95"] == pytest.approx(100)
    enough = told([served(i, i / 10) for i in range(368)])["ttft_ms"]
    assert enough["p99"] == pytest.approx(100)
    assert "p99_needs" not in enough


def failing(number: int, scheduled: float, error: str, times: list[float] | None = None) -> Record:
    return Record(
        number, scheduled=scheduled, started=scheduled, end=scheduled + 1, error=error, times=times or [], counts=[1] * len(times or [])
    )


def test_failures_are_counted_with_their_reasons_and_are_in_no_percentile_and_no_throughput() -> None:
    records = [served(i, i / 10) for i in range(100)]
    records += [failing(100 + i, 5.0, "HTTP 429: rate_limit_exceeded") for i in range(9)] + [failing(110, 5.0, "empty answer", [5.5, 5.6])]
    summed = told(records, "ttft=500")
    assert (summed["requests"], summed["succeeded"], summed["failed"]) == (110, 100, 10)
    assert summed["reasons"] == {"HTTP 429: rate_limit_exceeded": 9, "empty answer": 1}
    assert summed["ttft_ms"]["n"] == 100
    seconds = summed["window"]["end_s"]
    assert summed["throughput"]["output_tokens_s"] == pytest.approx(1000 / seconds)
    assert summed["throughput"]["wasted_tokens_s"] == pytest.approx(2 / seconds)
    assert summed["throughput"]["prompt_tokens_s"] == pytest.approx(700 / seconds)
    assert summed["goodput"]["share"] == pytest.approx(100 / 110)
    assert summed["goodput"]["requests_s"] == pytest.approx(100 / seconds)
    assert summed["goodput"]["is_met"] is False
    infinite = summed["others"]["total_failures_infinite_ms"]
    assert infinite["n"] == 110
    assert infinite["max"] is None  # for ever
    json.dumps(summed, allow_nan=False)


def test_only_the_window_counts_but_failures_outside_are_told() -> None:
    records = [failing(0, 0.5, "x"), *(served(i, float(i)) for i in range(1, 21))]
    summed = summary(Run(records=records, wall_s=20.0, delays=[0.0]), Window(10.0, 20.0, "given"))
    assert (summed["requests"], summed["failed"], summed["outside_window"], summed["failed_outside_window"]) == (10, 0, 11, 1)
    assert summed["throughput"]["output_tokens_s"] == pytest.approx(10.0)
    assert summed["throughput"]["concurrency"] == pytest.approx(0.19)


def test_an_objective_needs_all_of_its_limits() -> None:
    both = Objective.parse("ttft=500,itl=50,share=0.9")
    assert (both.limits, both.share) == ({"ttft": 0.5, "itl": 0.05}, 0.9)
    assert both.is_met(served(0, 0.0, ttft=0.4, gap=0.04))
    assert not both.is_met(served(0, 0.0, ttft=0.6, gap=0.04))
    assert not both.is_met(served(0, 0.0, ttft=0.4, gap=0.06))
    assert not both.is_met(failing(0, 0.0, "x"))
    assert both.is_met(served(0, 0.0, tokens=1))  # no gap is too long
    assert not Objective.parse("gap=20").is_met(served(0, 0.0, gap=0.03))
    assert not Objective.parse("total=100").is_met(served(0, 0.0))


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "queue=5", "ttft=-1", "share=0.9", "ttft=5,share=2", "ttft=nan"])
def test_objectives_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="--slo"):
        Objective.parse(text)


@pytest.mark.parametrize(
    ("late", "run", "word"),
    [
        (0.0, {}, ""),
        (0.05, {}, "began 50.0 ms late"),
        (0.0, {"delays": [0.02] * 100}, "stamped 20.0 ms late"),
        (0.0, {"cpu_s": 9.5}, "of a core"),
    ],
)
def test_a_run_is_invalid_when_the_client_was_the_bottleneck(late: float, run: dict[str, Any], word: str) -> None:
    records = [served(i, i / 10, late=late) for i in range(100)]
    summed = told(records, **run)
    assert summed["valid"] is (word == "")
    assert word in "; ".join(summed["client"]["bottleneck"])


def test_being_late_is_judged_beside_what_is_measured() -> None:
    slow = [served(i, float(i), ttft=2.0, gap=0.3, late=0.05) for i in range(100)]
    assert told(slow, delays=[0.02] * 100)["valid"]


def test_csv_has_a_line_a_request_with_every_chunk() -> None:
    lines = list(csv.DictReader(io.StringIO(rows([example(), failing(1, 2.0, "timeout")]))))
    assert lines[0]["ttft_ms"] == "3000.0"
    assert lines[0]["chunks"] == "3.000000:1 3.500000:1 4.000000:1 4.500000:1 5.000000:1"
    assert (lines[1]["error"], lines[1]["ttft_ms"], lines[1]["tokens"]) == ("timeout", "", "0")


ABOUT = {"version": 1, "url": "http://x", "model": "<m>", "load": "closed loop of 2", "asked": "in 5, out 6", "seed": 1}


def test_the_console_gives_no_throughput_without_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    records = [served(i, i / 10, late=0.05) for i in range(400)] + [failing(400, 1.0, "timeout")]
    show(ABOUT | told(records, "ttft=500"))
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "INVALID",
        "tokens/s out",
        "p50 p95 p99",
        "queue (server)",
        "TTFT",
        "ITL",
        "total",
        "n = 401, 1 failed",
        "1 x timeout",
        "met",
    ):
        assert words in said
    show(ABOUT | told([failing(0, 0.0, "x")]))
    assert "n = 1, 1 failed" in " ".join(capsys.readouterr().out.split())


def test_the_page_is_one_file_without_a_network() -> None:
    pytest.importorskip("plotly")
    records = [served(i, i / 10) for i in range(50)] + [failing(50, 1.0, "timeout")]
    html = page(ABOUT | told(records), records)
    for words in ("Latencies", "Requests over time", "in the server's queue", "Gaps between chunks", "&lt;m&gt;"):
        assert words in html or words.replace("'", "\\u0027") in html
    assert "<script src=" not in html
    page(ABOUT | told([failing(0, 0.0, "x")]), [failing(0, 0.0, "x")])


def a_plan() -> dict[str, Any]:
    figures = {"p50": 100.0, "p90": 100.0, "p95": 110.0, "p99": 120.0, "mean": 100.0, "max": 200.0}
    predicted = dict.fromkeys(("queue_ms", "ttft_ms", "itl_ms", "tpot_ms", "total_ms"), figures) | {"output_tokens_s": 110.0}
    traffic = {"rate": 10.0, "prompt_mean": 7.0, "answer_mean": 20.0}
    return {"version": 1, "model": {"name": "m"}, "traffic": traffic, "answer": {"device": "d", "devices": 2, "predicted": predicted}}


def test_predicted_beside_measured(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(a_plan()))
    summed = told([served(i, i / 10, ttft=0.08) for i in range(100)])
    found = beside(read_plan(file), summed)
    by_name = {row["what"]: row for row in found["rows"]}
    assert by_name["ttft p50"] == {"what": "ttft p50", "predicted": 100.0, "measured": pytest.approx(80.0), "error": pytest.approx(0.25)}
    assert by_name["ttft p99"]["error"] is None  # too few
    assert math.isclose(by_name["output tokens/s"]["measured"], summed["throughput"]["output_tokens_s"])
    assert len(found["notes"]) == 2
    assert "all 2 devices" in found["notes"][1]
    assert "20 tokens an answer were planned, 10 measured" in found["notes"][0]
    show(ABOUT | summed | {"plan": found})
    assert "+25%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "not JSON"), ("{}", "expected what"), ('{"version": 1, "answer": null, "cannot": "no device can"}', "no device can"),
     ('{"version": 1, "answer": {}}', "with its predictions")],
)  # fmt: skip
def test_plans_that_cannot_be_compared(tmp_path: Any, text: str, word: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=word):
        read_plan(file)
