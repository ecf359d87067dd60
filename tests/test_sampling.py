"""Sampling against float64 with full sorts, its distribution by chi-square, and the same token and bits at every level."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import sampling as reference

from headrace import _native

LEVELS = _native.levels()
FAST = LEVELS[0]
Array = NDArray[np.float32]


@pytest.fixture(autouse=True)
def restore_level() -> Iterator[None]:
    before = _native.level()
    yield
    _native.use(before)


def bit_mask(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


def arguments(p: reference.Params) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        name: getattr(p, name)
        for name in (
            "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )
    }  # fmt: skip
    keywords["tokens"] = np.array(p.prompt + p.generated, np.int32)
    keywords["num_prompt"] = len(p.prompt)
    if p.bias:
        keywords["bias_ids"] = np.array([i for i, _ in p.bias], np.int32)
        keywords["bias_values"] = np.array([v for _, v in p.bias], np.float32)
    if p.allowed is not None:
        keywords["mask"] = bit_mask(p.allowed)
    return keywords


def sample(logits: Array, p: reference.Params | None = None, **more: Any) -> tuple[int, float, list[int], list[float]]:
    return _native.sample(logits.copy(), **{**arguments(p or reference.Params()), **more})


def at_every_level(logits: Array, p: reference.Params | None = None, **more: Any) -> tuple[int, float, list[int], list[float]]:
    """The result, after checking that all levels give it, bit for bit, and leave the same logits."""
    results = {}
    for level in LEVELS:
        _native.use(level)
        changed = logits.copy()
        result = _native.sample(changed, **{**arguments(p or reference.Params()), **more})
        results[level] = (result[0], np.float32(result[1]).tobytes(), result[2], np.float32(result[3]).tobytes(), changed.tobytes())
    assert len(set(map(repr, results.values()))) == 1, {level: (r[0], r[2][:5]) for level, r in results.items()}
    return result


@st.composite
def rows(draw: st.DrawFn) -> tuple[Array, reference.Params]:
    """Logits with ties and impossible tokens, and parameters of every kind."""
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 33, 255, 256, 257, 700]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal(vocab).astype(np.float32) * draw(st.sampled_from([0.01, 1, 5, 30]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    logits[rng.random(vocab) < draw(st.sampled_from([0, 0, 0.3, 0.95]))] = -np.inf
    token = st.integers(-2, vocab + 1)
    number = st.floats(-2, 2, width=32)
    p = reference.Params(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0])),
        top_p=float(np.float32(draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.01, 0.0])))),
        min_p=float(np.float32(draw(st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.9, 1.0])))),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 20, 100, 1000])),
        repetition_penalty=float(np.float32(draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])))),
        presence_penalty=draw(st.one_of(st.just(0.0), number)),
        frequency_penalty=draw(st.one_of(st.just(0.0), number)),
        prompt=draw(st.lists(token, max_size=8)),
        generated=draw(st.lists(token, max_size=12)),
        bias=draw(st.lists(st.tuples(token, number), max_size=4)),
        allowed=rng.random(vocab) < 0.5 if draw(st.booleans()) else None,
    )
    return logits, p


@settings(max_examples=400, deadline=None)
@given(rows(), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_any_row_against_float64(case: tuple[Array, reference.Params], seed: int, sample_index: int) -> None:
    logits, p = case
    vocab = len(logits)
    tops = min(vocab, 7)
    token, logprob, top_ids, top_logprobs = at_every_level(logits, p, seed=seed, sample_index=sample_index, num_logprobs=tops)
    x = reference.adjusted(logits, p)
    unmasked = reference.adjusted(logits, replace(p, allowed=None))
    if x.max() == -np.inf:
        assert token == (0 if p.allowed is None or not p.allowed.any() else int(np.argmax(p.allowed)))
        if unmasked.max() == -np.inf:
            assert logprob == -np.inf
            assert top_ids == list(range(tops))
        return
    assert x[token] > -np.inf
    # Adjusting rounds a logit a few times; ties in float64 may then be none in fp32, and the other way round.
    size = np.abs(x[np.isfinite(x)]).max() + 10
    near = 8 * 2.0**-24 * size
    if p.temperature == 0:
        assert x[token] >= x.max() - near
    else:
        u = reference.uniform(seed, sample_index, len(p.prompt) + len(p.generated))
        if not (near_ties(x, near) and (p.top_k or p.top_p < 1)):
            assert token in reference.possible(x, p, u, slack=1e-5 + near / p.temperature)
    expected = reference.log_softmax(unmasked)
    near = 8 * 2.0**-24 * (np.abs(unmasked[np.isfinite(unmasked)]).max() + 10)
    tolerance = 2 * near + 2e-6
    assert abs(logprob - expected[token]) <= tolerance
    finite = min(tops, int(np.isfinite(unmasked).sum()))
    np.testing.assert_allclose(top_logprobs[:finite], np.sort(expected)[::-1][:finite], atol=tolerance)
    np.testing.assert_allclose(expected[top_ids[:finite]], top_logprobs[:finite], atol=tolerance)
    assert len(set(top_ids)) == tops
    assert all(value == -np.inf for value in top_logprobs[finite:])


def near_ties(x: NDArray[np.float64], near: float) -> bool:
    gaps = np.diff(np.sort(x[np.isfinite(x)]))
    return bool(((gaps > 0) & (gaps <= near)).any())


def test_philox_known_answers() -> None:
    assert reference.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert reference.philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 + 12345, 2**64 - 1])
def test_the_uniform_number_is_philox_of_seed_sample_and_position(seed: int) -> None:
    vocab = 4096
    logits = np.zeros(vocab, np.float32)  # a flat row shows u to 12 bits
    for sample_index in (0, 1, 7):
        for position in (0, 1, 1000):
            tokens = np.zeros(position, np.int32)
            token = _native.sample(logits.copy(), seed=seed, sample_index=sample_index, tokens=tokens, num_prompt=position)[0]
            assert token == int(reference.uniform(seed, sample_index, position) * vocab)


@pytest.mark.parametrize(
    "p",
    [
        reference.Params(),
        reference.Params(temperature=0.7),
        reference.Params(top_k=20),
        reference.Params(top_p=0.9),
        reference.Params(min_p=0.05),
        reference.Params(temperature=1.5, top_k=300, min_p=0.01, top_p=0.95),
    ],
)
def test_distribution(p: reference.Params) -> None:
    """Chi-square of 20,000 draws against the exact probabilities, fixed seeds: fails at a true distribution once in a million."""
    logits = np.random.default_rng(7).standard_normal(1000).astype(np.float32) * 2
    ids, weight = reference.kept(logits.astype(np.float64), p)
    keywords, draws = arguments(p), 20_000
    counts = np.zeros(len(logits))
    for seed in range(draws):
        counts[_native.sample(logits.copy(), seed=seed, **keywords)[0]] += 1
    assert counts[np.setdiff1d(np.arange(len(logits)), ids)].sum() == 0
    expected = weight / weight.sum() * draws
    order = np.argsort(-expected)
    large = order[expected[order] >= 10]
    small = order[expected[order] < 10]
    seen, wanted = counts[ids[large]], expected[large]
    if len(small):
        seen, wanted = np.append(seen, counts[ids[small]].sum()), np.append(wanted, expected[small].sum())
    freedom = len(seen) - 1
    chi2 = ((seen - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty: the cube root of chi2 / freedom is nearly normal.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 4.75, (chi2, freedom)


def test_positions_and_samples_are_independent_draws() -> None:
    logits = np.zeros(2, np.float32)
    draws = np.array([
        [sample(logits, tokens=np.zeros(n, np.int32), num_prompt=n, sample_index=s, seed=5)[0] for n in range(400)] for s in range(2)
    ])  # fmt: skip
    assert abs(draws.mean() - 0.5) < 0.1
    assert abs((draws[0] == draws[1]).mean() - 0.5) < 0.12
    assert abs((draws[0][1:] == draws[0][:-1]).mean() - 0.5) < 0.12


@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 49152, 151_936])
def test_greedy_takes_the_lowest_of_equal_ids(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal(vocab).astype(np.float32)
    ties = rng.choice(vocab, min(vocab, 5), replace=False)
    logits[ties] = 9
    assert at_every_level(logits, temperature=0.0)[0] == ties.min()
    assert at_every_level(logits, temperature=1e-42)[0] == ties.min()  # 1 / t overflows
    allowed = np.ones(vocab, bool)
    allowed[ties.min()] = vocab == 1
    expected = min(ties) if vocab == 1 else sorted(ties)[1] if len(ties) > 1 else None
    if expected is not None:
        assert at_every_level(logits, temperature=0.0, mask=bit_mask(allowed))[0] == expected


def test_signed_zeros_tie() -> None:
    logits = np.full(40, -1, np.float32)
    logits[[3, 20]] = -0.0, 0.0
    assert at_every_level(logits, temperature=0.0)[0] == 3
    assert at_every_level(logits, top_k=1)[0] == 3
    assert at_every_level(logits, num_logprobs=2)[2] == [3, 20]


@pytest.mark.parametrize("vocab", [49152, 128_256, 151_936])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_large_vocabularies_at_every_level(vocab: int, scale: float) -> None:
    logits = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32) * np.float32(scale)
    for seed, p in enumerate([
        reference.Params(),
        reference.Params(top_k=1),
        reference.Params(top_k=50, top_p=0.9),
        reference.Params(top_k=5000, min_p=1e-4),
        reference.Params(top_p=0.95),
        reference.Params(top_p=0.99999),
        reference.Params(temperature=0.3, min_p=0.02),
    ]):  # fmt: skip
        token, logprob, top_ids, _ = at_every_level(logits, p, seed=seed, num_logprobs=20)
        x = logits.astype(np.float64)
        assert token in reference.possible(x, p, reference.uniform(seed, 0, 0))
        assert top_ids == np.argsort(-x, kind="stable")[:20].tolist()
        assert abs(logprob - reference.log_softmax(x)[token]) < 1e-5


@pytest.mark.parametrize("k", [1, 15, 16, 17, 63, 64, 65, 192, 193, 1000, 3000, 3072, 3073, 5000, 49152])
def test_top_k_is_exact(k: int) -> None:
    """Every number of candidates around the sizes of the sets that bound them, with ties at the edge."""
    vocab = 49152
    _native.use(FAST)
    for logits in (np.random.default_rng(k).standard_normal(vocab).astype(np.float32), (np.arange(vocab) % 97).astype(np.float32)):
        order = np.argsort(-logits.astype(np.float64), kind="stable")
        _, _, top_ids, _ = sample(logits, num_logprobs=k)
        assert top_ids == order[:k].tolist()
        allowed = set(order[:k].tolist())
        for seed in range(40):
            assert sample(logits, temperature=1e6, top_k=k, seed=seed)[0] in allowed


def test_hostile_logits() -> None:
    nan, inf = np.nan, np.inf
    for vocab in (3, 16, 300):
        everything = [0.0, 0.7]
        for temperature in everything:
            for bad in (nan, -inf):
                row = np.full(vocab, bad, np.float32)
                assert at_every_level(row, temperature=temperature, num_logprobs=2)[:2] == (0, -inf)
                allowed = np.arange(vocab) >= 2
                assert at_every_level(row, temperature=temperature, mask=bit_mask(allowed))[0] == 2
                assert at_every_level(row, temperature=temperature, mask=bit_mask(allowed & False))[0] == 0
                row[1] = -3e38
                assert at_every_level(row, temperature=temperature, num_logprobs=2)[:2] == (1, 0.0)
            row = np.full(vocab, nan, np.float32)
            row[2] = inf
            assert at_every_level(row, temperature=temperature, top_p=0.5, num_logprobs=1)[:3] == (2, 0.0, [2])
            row[:] = np.finfo(np.float32).max
            row[0] = np.finfo(np.float32).min
            assert at_every_level(row, temperature=temperature, num_logprobs=2)[0] > 0
    row = np.zeros(64, np.float32)
    for p in ({"top_p": nan}, {"min_p": nan}, {"temperature": nan}, {"top_p": -1.0}, {"min_p": 5.0}, {"top_k": -3}, {"temperature": inf}):
        assert 0 <= at_every_level(row, **p)[0] < 64
    assert 0 <= at_every_level(row, repetition_penalty=0.0, tokens=np.arange(64, dtype=np.int32))[0] < 64
    assert 0 <= at_every_level(row, presence_penalty=nan, tokens=np.arange(64, dtype=np.int32))[0] < 64


def test_the_mask_is_never_broken() -> None:
    rng = np.random.default_rng(3)
    for vocab in (70, 1000):
        allowed = rng.random(vocab) < 0.05
        allowed[vocab - 1] = True
        logits = rng.standard_normal(vocab).astype(np.float32)
        seen = {sample(logits, temperature=100.0, mask=bit_mask(allowed), seed=seed)[0] for seed in range(600)}
        assert seen == set(np.flatnonzero(allowed).tolist()) or vocab == 1000
        assert seen <= set(np.flatnonzero(allowed).tolist())


def test_penalties_count_generated_tokens_once_each() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 0.25], np.float32)
    row = logits.copy()
    _native.sample(
        row, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
        tokens=np.array([0, 0, 3, 1, 2, 2, 2], np.int32), num_prompt=3,
    )  # fmt: skip
    np.testing.assert_array_equal(row, np.float32([1.0, -4.0 - 0.25 - 0.5, 0.5 - 0.75 - 0.5, 0.25, 0.25]))


def test_bad_arguments_are_named() -> None:
    row = np.zeros(40, np.float32)
    with pytest.raises(ValueError, match=r"\[sample\] num_logprobs: expected -1 to 40, got 41"):
        sample(row, num_logprobs=41)
    with pytest.raises(ValueError, match="num_prompt: expected 0 to 2, got 3"):
        sample(row, tokens=np.zeros(2, np.int32), num_prompt=3)
    with pytest.raises(ValueError, match="mask: expected 2 words, got 1"):
        sample(row, mask=np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="as many values as ids"):
        sample(row, bias_ids=np.zeros(1, np.int32))
    with pytest.raises(TypeError):
        _native.sample(row.astype(np.float64))
