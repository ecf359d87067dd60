"""Arrivals, lengths and prompts: their means, that a seed fixes them, and that a trace's hash ids are real prefixes."""

from __future__ import annotations

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.arrivals import Arrivals
from headrace.bench.lengths import Lengths
from headrace.bench.prompts import WORDS, Ruler, hashed_text, read_prompts, shared_text
from headrace.bench.workload import Asking, check_endpoint, drawn, from_file, from_trace, lengths_of
from headrace.errors import UsageError
from headrace.plan.traffic import Traffic, read_trace

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(("kind", "burstiness", "variation"), [("poisson", 1.0, 1.0), ("gamma", 4.0, 2.0), ("gamma", 0.25, 0.5)])
def test_random_arrivals_have_their_rate_and_their_spread(kind: str, burstiness: float, variation: float) -> None:
    times = Arrivals(kind, 5.0, 5.0, burstiness).first(20_000, 1)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_constant_arrivals_are_constant() -> None:
    assert Arrivals("constant", 4.0, 4.0).first(5, 1) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert Arrivals("constant", 4.0, 4.0).during(1.0, 1) == [0.0, 0.25, 0.5, 0.75]


@given(st.sampled_from(["poisson", "gamma", "constant"]), st.floats(0.5, 50), st.floats(0.5, 50), st.integers(0, 1 << 31))
def test_arrivals_are_ordered_inside_their_time_and_fixed_by_the_seed(kind: str, first: float, final: float, seed: int) -> None:
    arrivals = Arrivals(kind, first, final)
    times = arrivals.during(10.0, seed)
    assert times == sorted(times)
    assert all(0 <= time < 10 + 1e-9 for time in times)
    assert times == arrivals.during(10.0, seed)
    counted = arrivals.first(100, seed)
    assert len(counted) == 100
    assert counted == sorted(counted)
    if kind != "constant" and times:
        assert times != arrivals.during(10.0, seed + 1)


def test_a_ramp_rises_evenly() -> None:
    times = Arrivals("constant", 2.0, 18.0).during(100.0, 1)
    assert len(times) == pytest.approx(1000, abs=1)
    assert sum(time < 50 for time in times) == pytest.approx(300, abs=1)  # 50 s at 6 on average
    assert sum(90 <= time < 91 for time in times) == pytest.approx(2 + 0.16 * 90.5, abs=1)
    assert max(Arrivals("constant", 2.0, 18.0).first(1000, 1)) < 100


@pytest.mark.parametrize(
    ("kind", "rate", "burstiness", "word"),
    [("uniform", 1.0, 1.0, "--arrivals"), ("poisson", 0.0, 1.0, "--rate"), ("poisson", 1.0, 2.0, "gamma"), ("gamma", 1.0, 0.0, "--burst")],
)
def test_arrivals_that_cannot_be(kind: str, rate: float, burstiness: float, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Arrivals(kind, rate, rate, burstiness)


def test_more_arrivals_than_anyone_means() -> None:
    with pytest.raises(UsageError, match="at most"):
        Arrivals("poisson", 1e5, 1e5).during(1e5, 1)


@pytest.mark.parametrize(("text", "mean", "low", "high"), [("128", 128, 128, 128), ("uniform:50,150", 100, 50, 150),
                                                          ("lognormal:200,0.8", 200, 1, 1 << 20)])  # fmt: skip
def test_lengths(text: str, mean: float, low: int, high: int) -> None:
    values = Lengths.parse(text, "--in").draw(20_000, random.Random(1))
    assert statistics.fmean(values) == pytest.approx(mean, rel=0.03)
    assert low <= min(values)
    assert max(values) <= high
    assert values == Lengths.parse(text, "--in").draw(20_000, random.Random(1))


@pytest.mark.parametrize(
    "text", ["", "0", "many", "uniform:5", "uniform:9,5", "lognormal:200", "lognormal:200,9", "normal:1,2", "1,2", "nan", "-4"]
)
def test_lengths_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="--out"):
        Lengths.parse(text, "--out")


@given(st.integers(1, 300), st.floats(0, 1))
def test_texts_share_the_beginning_that_is_wanted_and_no_more(words: int, share: float) -> None:
    one, other = (shared_text(words, share, name, "common").split(" ") for name in ("one", "other"))
    assert len(one) == len(other) == words
    alike = round(share * words)
    assert one[:alike] == other[:alike]
    if words - alike >= 8:  # eight words alike by chance: 1 in 10^19
        assert one[alike : alike + 8] != other[alike : alike + 8]


def test_a_ruler_undoes_what_the_server_adds() -> None:
    assert Ruler(30.0, 1.1).words(140) == 100
    assert Ruler(30.0, 1.0).words(10) == 1


def test_hash_ids_are_shared_prefixes() -> None:
    ruler = Ruler()
    one, other, apart = (hashed_text(1100, ids, 512, ruler, "1") for ids in ((1, 2, 3), (1, 2, 4), (5, 2, 3)))
    assert len(one.split(" ")) == 1100
    assert one.split(" ")[:1024] == other.split(" ")[:1024]
    assert one.split(" ")[1024:] != other.split(" ")[1024:]
    assert one.split(" ")[:512] != apart.split(" ")[:512]
    assert hashed_text(1100, (1, 2, 3), 512, ruler, "2") != one


def test_a_replayed_trace_shares_what_its_ids_say() -> None:
    """Whole blocks of a prompt are the beginning of an earlier prompt just where their ids are."""
    traffic = read_trace(DATA / "agents.jsonl").first(150)
    jobs = from_trace(traffic, Ruler(), 7)
    assert traffic.hashes is not None
    texts: set[str] = set()
    ids: set[tuple[int, ...]] = set()
    hits = 0
    for number, names in enumerate(traffic.hashes):
        content = jobs(number).conversation.turns[0]["content"].split(" ")
        assert len(content) == jobs(number).aimed == traffic.prompts[number]
        assert jobs(number).wanted == traffic.answers[number]
        for block in range(1, len(content) // 512 + 1):
            text, name = " ".join(content[: block * 512]), names[:block]
            assert (text in texts) == (name in ids)
            hits += name in ids
            texts.add(text)
            ids.add(name)
    assert hits > 100
    again = from_trace(traffic, Ruler(), 7)(150)  # a second round must not find the first one's
    assert again.conversation.turns[0]["content"].split(" ")[:50] != jobs(0).conversation.turns[0]["content"].split(" ")[:50]


def test_jobs_are_fixed_by_the_seed_and_their_number() -> None:
    one, same, other = (drawn(Lengths("uniform", 20, 40), Lengths("fixed", 9), 0.5, Ruler(), seed) for seed in (1, 1, 2))
    assert one(17) == same(17)
    assert one(17) != other(17)
    assert one(17) != one(18)
    assert 20 <= one(3).aimed <= 40
    assert one(3).wanted == 9
    traffic = Traffic("t", [0.0, 1.0], [10, 2000], [3, 4])
    pairs = {(lengths_of(traffic, 0.0, Ruler(), 1)(i).aimed, lengths_of(traffic, 0.0, Ruler(), 1)(i).wanted) for i in range(40)}
    assert pairs == {(10, 3), (2000, 4)}


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines = [{"prompt": "hello", "max_tokens": 7}, {"messages": messages}, {"turns": ["one", "two"]}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    read = read_prompts(file)
    jobs = from_file(read, Lengths("fixed", 5), 1)
    assert [jobs(i).wanted for i in range(4)] == [7, 5, 5, 7]
    assert jobs(1).conversation.history == ({"role": "system", "content": "be brief"},)
    assert [turn["content"] for turn in jobs(2).conversation.turns] == ["one", "two"]
    check_endpoint(read[:1], "completions")
    with pytest.raises(UsageError, match="--endpoint chat"):
        check_endpoint(read, "completions")


@pytest.mark.parametrize(
    ("line", "word"),
    [("{", "line 2: not JSON"), ("[]", "prompt, messages or turns"), ('{"prompt": ""}', "a text"), ('{"turns": []}', "not empty"),
     ('{"prompt": "x", "turns": ["y"]}', "prompt, messages or turns"), ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
     ('{"messages": ["x"]}', "not empty")],
)  # fmt: skip
def test_prompts_that_cannot_be(tmp_path: Path, line: str, word: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UsageError, match=word):
        read_prompts(file)


def test_a_body_asks_for_a_stream_with_usage_and_takes_further_fields() -> None:
    message = {"role": "user", "content": "hi"}
    told = json.loads(Asking("m", extra={"top_k": 3, "temperature": 0.5}).body([message], 9))
    assert told["messages"] == [message]
    assert told["stream"] is True
    assert told["stream_options"] == {"include_usage": True}
    assert (told["max_tokens"], told["temperature"], told["top_k"], told["ignore_eos"]) == (9, 0.5, 3, True)
    plain = json.loads(Asking("m", "completions", ignore_eos=False).body([message], 9))
    assert plain["prompt"] == "hi"
    assert "ignore_eos" not in plain
    assert "messages" not in plain


def test_words_are_plain() -> None:
    assert len(WORDS) > 200
    assert all(word.isalpha() and word.islower() for word in WORDS)
