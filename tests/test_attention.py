"""Attention and rope_kv at every level: against float64 with a derived bound, and bit for bit however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import attention as reference

from headrace import _native

LEVELS = _native.levels()
BLOCK, CHUNK = 32, 64
GARBAGE = 0xFFC1  # a bf16 NaN: what unwritten cache holds in these tests
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.level()
    _native.use(request.param)
    yield request.param
    _native.use(before)


def write_cache(pool: U16, table: NDArray[np.int32], k: U16, v: U16, start: int = 0) -> None:
    """Keys and values [tokens, kv_heads, head_dim] into the layout of kernels.h, one token after the other."""
    dim = k.shape[2]
    for i in range(k.shape[0]):
        block, at = table[(start + i) // BLOCK], (start + i) % BLOCK
        keys = pool[block, :, : BLOCK * dim].reshape(-1, dim // 2, BLOCK, 2)
        values = pool[block, :, BLOCK * dim :].reshape(-1, BLOCK // 2, dim, 2)
        keys[:, :, at, :] = k[i].reshape(-1, dim // 2, 2)
        values[:, at // 2, :, at % 2] = v[i]


@dataclass
class Case:
    """One request of `stop` tokens whose queries [start, stop) are the batch's rows; its blocks are scattered in a pool full of NaN."""

    start: int
    stop: int
    q_heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    window: int = 0
    magnitude: float = 1.0
    seed: int = 0
    scale: float = 0.0
    q: U16 = field(init=False)
    k: U16 = field(init=False)
    v: U16 = field(init=False)
    pool: U16 = field(init=False)
    table: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.stop, self.head_dim, self.q_heads])
        draw = lambda rows, heads: rng.standard_normal((rows, heads, self.head_dim)) * self.magnitude  # noqa: E731
        self.q = reference.to_bf16(draw(self.stop - self.start, self.q_heads))
        self.k = reference.to_bf16(draw(self.stop, self.kv_heads))
        self.v = reference.to_bf16(rng.standard_normal((self.stop, self.kv_heads, self.head_dim)) + 0.5)
        self.scale = self.scale or float(np.float32(self.head_dim**-0.5))
        blocks = -(-self.stop // BLOCK)
        self.pool = np.full((blocks + 3, self.kv_heads, 2 * BLOCK * self.head_dim), GARBAGE, np.uint16)
        self.table = rng.permutation(blocks + 3)[:blocks].astype(np.int32)
        write_cache(self.pool, self.table, self.k, self.v)

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def args(self) -> dict[str, object]:
        return {"q": self.q, "pool": self.pool, "table": self.table, "scale": self.scale, "window": self.window}

    def blank(self) -> F32:
        return np.full((self.rows, self.q_heads * self.head_dim + 5), 777, np.float32)

    def run(self, tile: int = 32, step: int | None = None, out: F32 | None = None) -> F32:
        """The chunk cut into steps of `step` queries, each computed in tiles of `tile`."""
        out = self.blank() if out is None else out
        step = step or self.rows
        for row in range(0, self.rows, step):
            start, stop = self.start + row, min(self.start + row + step, self.stop)
            for head in range(self.kv_heads):
                for q in range(0, stop - start, tile):
                    q_end = min(q + tile, stop - start)
                    _native.attention(**self.args(), row=row, start=start, stop=stop, kv_head=head, q_begin=q, q_end=q_end, out=out)
        assert (out[:, self.q_heads * self.head_dim :] == 777).all()
        return out[:, : self.q_heads * self.head_dim].reshape(self.rows, self.q_heads, self.head_dim)

    def run_partial(self, splits: list[int]) -> F32:
        """Each query as partials of the KV chunks between `splits`, computed last split first, then merged."""
        out = self.blank()
        for row in range(self.rows):
            at = self.start + row
            chunks = at // CHUNK + 1
            bounds = [0, *(s for s in splits if s < chunks), chunks]
            for head in range(self.kv_heads):
                partial = np.full((chunks, self.q_heads // self.kv_heads, 4 + self.head_dim), np.nan, np.float32)
                args = self.args() | {"row": row, "start": at, "kv_head": head, "partial": partial}
                for begin, end in reversed(list(pairwise(bounds))):
                    _native.attention_partial(**args, c_begin=begin, c_end=end)
                _native.attention_merge(**args, out=out)
        return out[:, : self.q_heads * self.head_dim].reshape(self.rows, self.q_heads, self.head_dim)

    def check(self, got: F32) -> None:
        q, k, v = (reference.from_bf16(x) for x in (self.q, self.k, self.v))
        want, bound = reference.attention(q, k, v, self.start, self.scale, self.window)
        error = np.abs(got - want)
        assert not np.isnan(got).any()
        assert (error <= bound).all(), (
            f"largest error {(error / bound).max()} of the bound at {np.unravel_index((error / bound).argmax(), error.shape)}"
        )


def same(a: F32, b: F32) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("length", [*range(1, 71), 127, 128, 129, 130, 131, 200, 1000])
def test_decode_lengths(level: str, length: int) -> None:
    case = Case(length - 1, length, q_heads=3 if length % 2 else 9, kv_heads=1 if length % 2 else 3)
    case.check(case.run())


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 16])
def test_shapes(level: str, group: int, head_dim: int) -> None:
    case = Case(60, 71, q_heads=group * 2, kv_heads=2, head_dim=head_dim)
    case.check(case.run())


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 40), (0, 131), (30, 34), (63, 66), (130, 200), (980, 1000)])
def test_prefill(level: str, start: int, stop: int) -> None:
    case = Case(start, stop)
    case.check(case.run())


@pytest.mark.parametrize("window", [1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 128, 1000])
def test_window(level: str, window: int) -> None:
    case = Case(100, 170, q_heads=4, kv_heads=2, head_dim=32, window=window)
    case.check(case.run())


@pytest.mark.parametrize("window", [1, 20, 33, 64, 70, 130])
def test_blocks_that_left_the_window_are_not_read(level: str, window: int) -> None:
    case = Case(195, 200, window=window)
    want = case.run()
    gone = max(0, 195 - window + 1) // BLOCK
    case.table[:gone] = 10**9  # a read through it would fault
    assert same(case.run(), want)
    assert same(case.run(step=1), want)
    assert same(case.run_partial([1, 2]), want)


@pytest.mark.parametrize("magnitude", [4.0, 30.0])
def test_large_scores(level: str, magnitude: float) -> None:
    """Scores in the thousands: one key has all the weight."""
    case = Case(150, 160, magnitude=magnitude)
    case.check(case.run())


def test_scores_that_are_exact(level: str) -> None:
    """Small whole numbers make every score exact, so that only exp and the rounding of p remain, whatever the score's size."""
    case = Case(90, 130, scale=0.5)
    rng = np.random.default_rng(5)
    q, k = rng.integers(-8, 9, case.q.shape), rng.integers(-8, 9, case.k.shape)
    case.q, case.k = reference.to_bf16(q.astype(np.float32)), reference.to_bf16(k.astype(np.float32))
    write_cache(case.pool, case.table, case.k, case.v)
    got = case.run()
    want, _ = reference.attention(q.astype(float), k.astype(float), reference.from_bf16(case.v), 90, 0.5)
    weight, _ = reference.attention(q.astype(float), k.astype(float), np.abs(reference.from_bf16(case.v)), 90, 0.5)
    assert (np.abs(got - want) <= weight * (reference.EPS_BF16 + 4e-5)).all()


def test_partial_sums_have_no_bf16_in_them(level: str) -> None:
    """m and l of every KV chunk, from exact scores: the roundings of c, exponent and sum and 2e-7 of the exponential are left."""
    case = Case(199, 200, scale=0.05)
    rng = np.random.default_rng(6)
    q, k = rng.integers(-4, 5, case.q.shape), rng.integers(-4, 5, case.k.shape)
    case.q, case.k = reference.to_bf16(q.astype(np.float32)), reference.to_bf16(k.astype(np.float32))
    write_cache(case.pool, case.table, case.k, case.v)
    partial = np.full((4, 3, 4 + 64), np.nan, np.float32)
    _native.attention_partial(**case.args(), row=0, start=199, kv_head=0, c_begin=0, c_end=4, partial=partial)
    exponents = np.einsum("hd,td->ht", q[0], k[:, 0]) * 0.05 * np.log2(np.e)
    for chunk in range(4):
        x = exponents[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        m, rounding = x.max(axis=1), 4 * np.abs(exponents).max() * reference.EPS_F32
        assert (np.abs(partial[chunk, :, 0] - m) <= rounding).all()
        want = np.exp2(x - m[:, None]).sum(axis=1)
        assert (np.abs(partial[chunk, :, 1] / want - 1) <= 2e-7 + 2 * rounding + 8 * reference.EPS_F32).all()


def test_equal_scores_average(level: str) -> None:
    """All keys alike: every p is 1, nothing is rounded but the sums, and the answer is the mean of the values."""
    case = Case(0, 150, q_heads=2, kv_heads=1, head_dim=16)
    case.k[:] = case.k[0]
    write_cache(case.pool, case.table, case.k, case.v)
    v = reference.from_bf16(case.v)[:, 0]
    mean = np.cumsum(v, axis=0) / np.arange(1, 151)[:, None]
    size = np.cumsum(np.abs(v), axis=0) / np.arange(1, 151)[:, None]
    assert (np.abs(case.run() - mean[:, None]) <= size[:, None] * 160 * reference.EPS_F32).all()


def test_very_negative_scores_in_later_chunks(level: str) -> None:
    """A first chunk far above, then far below all others: the running maximum moves once, or never."""
    for first in (8.0, -8.0):
        case = Case(255, 256, q_heads=1, head_dim=16, scale=1.0)
        case.q[:] = reference.to_bf16(np.full(case.q.shape, 4.0))
        k = np.full(case.k.shape, -first)
        k[:CHUNK] = first
        case.k = reference.to_bf16(k)
        write_cache(case.pool, case.table, case.k, case.v)
        case.check(case.run())


# Bit for bit


BITWISE = [
    Case(0, 150),
    Case(0, 150, q_heads=7, head_dim=32, seed=1),
    Case(40, 200, q_heads=8, kv_heads=2, head_dim=80, window=50, seed=2),
    Case(100, 140, q_heads=2, kv_heads=2, head_dim=128, magnitude=3.0, seed=3),
    Case(250, 262, q_heads=16, head_dim=48, window=130, seed=4),
]


@pytest.mark.parametrize("case", BITWISE, ids=lambda c: f"g{c.q_heads // c.kv_heads}d{c.head_dim}w{c.window}")
def test_the_cut_does_not_show(level: str, case: Case) -> None:
    want = case.run()
    for tile in (1, 2, 5, 7, 31, 32, 64):
        assert same(case.run(tile=tile), want), f"tile {tile}"
    for step in (1, 3, 17, 64):
        assert same(case.run(step=step), want), f"step {step}"
    for splits in ([], [1], [2], [1, 2, 3], [3]):
        assert same(case.run_partial(splits), want), f"splits {splits}"


@pytest.mark.parametrize("fill", [0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8000, 0x4000])
def test_what_lies_beyond_the_tokens_does_not_show(level: str, fill: int) -> None:
    """The same request over pools filled with infinities, NaN, denormals, -0 and numbers."""
    for stop in (5, 33, 100):
        case = Case(0, stop, q_heads=5, head_dim=32)
        want = case.run()
        case.pool[:] = fill
        write_cache(case.pool, case.table, case.k, case.v)
        assert same(case.run(), want)
        assert same(case.run_partial([1]), want)


def test_levels_without_bf16_instructions_agree() -> None:
    """scalar, avx2 and avx512vnni do the same operations in the same order."""
    before = _native.level()
    for case in BITWISE:
        results = []
        for name in LEVELS:
            if name != "avx512bf16":
                _native.use(name)
                results.append(case.run())
        _native.use(before)
        assert all(same(r, results[0]) for r in results)


def test_step_is_attention(level: str) -> None:
    """The benchmark's entry computes what it times: three requests, two layers (the last one's output stays), two threads."""
    cases = [
        Case(0, 70, q_heads=6, kv_heads=2, seed=7),
        Case(99, 100, q_heads=6, kv_heads=2, seed=8),
        Case(20, 90, q_heads=6, kv_heads=2, seed=9),
    ]
    offsets = np.cumsum([0, *(c.pool.shape[0] for c in cases)])
    layer = np.concatenate([c.pool for c in cases])
    pool = np.stack([np.zeros_like(layer), layer])
    tables = np.full((3, max(len(c.table) for c in cases)), 0, np.int32)
    for i, c in enumerate(cases):
        tables[i, : len(c.table)] = c.table + offsets[i]
    starts, stops = (np.array([getattr(c, n) for c in cases], np.int32) for n in ("start", "stop"))
    q = np.concatenate([c.q for c in cases])
    out = np.zeros((len(q), 6 * 64), np.float32)
    seconds = _native.attention_step(q, pool[1:], tables, starts, stops, scale=cases[0].scale, window=0, out=out, threads=2)
    assert seconds > 0
    assert same(out, np.concatenate([c.run().reshape(c.rows, -1) for c in cases]))


# rope_kv


@dataclass
class Rope:
    rows: int
    start: int
    q_heads: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 64
    norm: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.rows, self.start, self.head_dim])
        self.units = self.q_heads + 2 * self.kv_heads
        self.qkv = rng.standard_normal((self.rows + 2, self.units * self.head_dim + 3)).astype(np.float32) * 3
        angle = np.arange(self.start + self.rows)[:, None] * 1000.0 ** -(np.arange(self.rotary // 2) / (self.rotary / 2))
        self.cos_sin = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
        self.q_norm, self.k_norm = (rng.uniform(0.5, 2, self.head_dim).astype(np.float32) if self.norm else None for _ in range(2))
        blocks = -(-(self.start + self.rows) // BLOCK)
        self.table = rng.permutation(blocks + 2)[:blocks].astype(np.int32)
        self.blocks = blocks + 2

    def run(self, cuts: tuple[int, ...] = ()) -> tuple[U16, U16]:
        """q and pool, computed in ranges between `cuts`, the later ones first."""
        q = np.full((self.rows + 2, self.q_heads, self.head_dim), 0x5555, np.uint16)
        pool = np.full((self.blocks, self.kv_heads, 2 * BLOCK * self.head_dim), GARBAGE, np.uint16)
        bounds = [0, *(c for c in cuts if c < self.rows * self.units), self.rows * self.units]
        for begin, end in reversed(list(pairwise(bounds))):
            _native.rope_kv(
                self.qkv, self.cos_sin, q, pool, self.table, row=1, start=self.start, stop=self.start + self.rows, begin=begin, end=end,
                q_norm=self.q_norm, k_norm=self.k_norm, eps=1e-5,
            )  # fmt: skip
        return q, pool


ROPES = [
    Rope(1, 0),
    Rope(1, 37),
    Rope(5, 30),
    Rope(70, 3, q_heads=7, kv_heads=1),
    Rope(33, 0, head_dim=80, rotary=32),
    Rope(20, 60, head_dim=128, rotary=128, norm=True),
    Rope(9, 500, head_dim=16, rotary=6, norm=True),
    Rope(3, 31, head_dim=256, rotary=256, q_heads=1, kv_heads=1, norm=True),
]
rope_cases = pytest.mark.parametrize("case", ROPES, ids=lambda c: f"{c.rows}at{c.start}d{c.head_dim}r{c.rotary}{'n' * c.norm}")


@rope_cases
def test_rope_kv(level: str, case: Rope) -> None:
    q, pool = case.run()
    x = case.qkv[1:-1, : case.units * case.head_dim].astype(np.float64).reshape(case.rows, case.units, case.head_dim)
    parts = np.split(x, [case.q_heads, case.q_heads + case.kv_heads], axis=1)
    table = case.cos_sin[case.start :].astype(np.float64)[:, None]
    for i, weight in ((0, case.q_norm), (1, case.k_norm)):
        y = parts[i] if weight is None else reference.rms_norm(parts[i], weight.astype(np.float64), 1e-5)
        parts[i] = reference.rope(y, table[..., 0], table[..., 1])
        # bf16 rounding; fp32: the norm's sum and root (head_dim / 16 + 8 roundings), two products and their sum
        parts[i] = (
            parts[i],
            np.abs(parts[i]) * reference.EPS_BF16 * 1.001
            + np.abs(y).max(-1, keepdims=True) * (case.head_dim / 16 + 12) * reference.EPS_F32,
        )
    got_k = np.empty((case.rows, case.kv_heads, case.head_dim), np.uint16)
    got_v = np.empty_like(got_k)
    blank = pool.copy()
    for i in range(case.rows):
        block, at = case.table[(case.start + i) // BLOCK], (case.start + i) % BLOCK
        keys = pool[block, :, : BLOCK * case.head_dim].reshape(-1, case.head_dim // 2, BLOCK, 2)
        values = pool[block, :, BLOCK * case.head_dim :].reshape(-1, BLOCK // 2, case.head_dim, 2)
        got_k[i], got_v[i] = keys[:, :, at].reshape(case.kv_heads, -1), values[:, at // 2, :, at % 2]
    for name, got, (want, bound) in (("q", q[1:-1], parts[0]), ("k", got_k, parts[1])):
        assert (np.abs(reference.from_bf16(got) - want) <= bound).all(), name
    assert same(got_v, reference.to_bf16(parts[2]))
    assert (q[0] == 0x5555).all()
    assert (q[-1] == 0x5555).all()
    # and nothing else of the pool was touched
    garbage = np.full_like(got_k, GARBAGE)
    write_cache(blank, case.table, garbage, garbage, case.start)
    assert (blank == GARBAGE).all()


@rope_cases
def test_rope_kv_ranges(level: str, case: Rope) -> None:
    want = case.run()
    u = case.units
    for cuts in ((1,), (u - 1,), (u,), (u + 2, 2 * u + 1), tuple(range(1, 3 * u, 5)), tuple(range(1, case.rows * u))):
        q, pool = case.run(cuts)
        assert same(q, want[0]), cuts
        assert same(pool, want[1]), cuts


@rope_cases
def test_rope_kv_levels_agree(case: Rope) -> None:
    before = _native.level()
    results = []
    for name in LEVELS:
        _native.use(name)
        results.append(case.run())
    _native.use(before)
    assert all(same(a, b) for r in results for a, b in zip(r, results[0], strict=True))


# Errors


def test_sizes_are_checked() -> None:
    case = Case(0, 40, q_heads=6, kv_heads=2)
    good = case.args() | {"row": 0, "start": 0, "stop": 40, "kv_head": 0, "q_begin": 0, "q_end": 40, "out": case.blank()}
    _native.attention(**good)
    bad: list[tuple[dict[str, object], str]] = [
        ({"kv_head": 2}, r"\[attention\] kv_head: expected one of 2, got 2"),
        ({"row": 1}, r"\[attention\] row: expected room for 40 of 40 rows, got 1"),
        ({"q_end": 41}, r"\[attention\] q_end: expected q_begin <= q_end <= 40, got 41"),
        ({"start": 41}, r"\[attention\] stop: expected start < stop, got 40"),
        ({"table": case.table[:1]}, r"\[attention\] table: expected block ids for 40 positions, got 1"),
        ({"table": case.table + 100}, r"\[attention\] table: expected block ids below 5"),
        ({"scale": 0.0}, r"\[attention\] scale: expected a positive number"),
        ({"window": -1}, r"\[attention\] window: expected 0 or more, got -1"),
        ({"out": np.zeros((40, 383), np.float32)}, r"\[attention\] out.shape\[1\]: expected at least 384, got 383"),
        ({"out": np.zeros((39, 384), np.float32)}, r"\[attention\] out.shape\[0\]: expected 40, got 39"),
        ({"q": np.zeros((40, 5, 64), np.uint16)}, r"\[attention\] q.shape\[1\]: expected 1 to 16 times kv_heads 2, got 5"),
        ({"q": np.zeros((40, 6, 32), np.uint16)}, r"\[attention\] q.shape\[2\]: expected head_dim 64, got 32"),
        ({"pool": np.zeros((5, 2, 64 * 24), np.uint16)}, r"\[attention\] pool.shape\[2\]: expected 64 \* head_dim"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            _native.attention(**(good | change))
    partial = case.args() | {"row": 39, "start": 39, "kv_head": 0, "c_begin": 0, "c_end": 1}
    with pytest.raises(ValueError, match=r"\[attention_partial\] partial.shape\[1\]: expected group 3, got 2"):
        _native.attention_partial(**partial, partial=np.zeros((1, 2, 68), np.float32))
    with pytest.raises(ValueError, match=r"\[attention_partial\] c_end"):
        _native.attention_partial(**(partial | {"c_end": 2}), partial=np.zeros((1, 3, 68), np.float32))


def test_rope_sizes_are_checked() -> None:
    case = Rope(4, 0)
    for change, message in (
        ({"end": 29}, r"\[rope_kv\] end: expected begin <= end <= 28, got 29"),
        ({"stop": 5}, r"\[rope_kv\] cos_sin.shape\[0\]: expected at least 5, got 4"),
        ({"row": 3}, r"\[rope_kv\] row: expected room for 4 of 6 rows, got 3"),
        ({"q_norm": np.ones(63, np.float32)}, r"\[rope_kv\] q_norm: expected head_dim 64, got 63"),
    ):
        q, pool = case.run()
        good = {
            "q": q,
            "pool": pool,
            "table": case.table,
            "row": 1,
            "start": 0,
            "stop": 4,
            "begin": 0,
            "end": 28,
            "q_norm": None,
            "k_norm": None,
            "eps": 1e-5,
        }
        with pytest.raises(ValueError, match=message):
            _native.rope_kv(case.qkv, case.cos_sin, **(good | change))
