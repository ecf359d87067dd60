"""Safetensors folders: single and sharded, every lie refused by file and field, nothing pickled or executed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import HF, Tiny, cuts, file_name, hf_config, mutated, raw_safetensors, safetensors_bytes, write_folder

from headrace.errors import ModelError, UnsupportedModel
from headrace.models import families
from headrace.models.safetensors import SafetensorsFolder, parse_json


def folder_with(path: Path, data: bytes, config: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config or {}))
    (path / "model.safetensors").write_bytes(data)
    return path


def header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def one(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> bytes:
    return header(t={"dtype": dtype, "shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_read(tmp_path: Path, shards: int) -> None:
    tiny = Tiny(types=("F32", "F16", "BF16"))
    with SafetensorsFolder(write_folder(tmp_path, tiny, shards=shards)) as folder:
        assert folder.config == hf_config(tiny)
        assert len(folder.files) == shards
        assert len(folder.tensors) == len(tiny.tensors)
        for name, (kind, shape, data) in tiny.tensors.items():
            info = folder.tensors[file_name(name, HF, "model.layers.")]
            assert (info.type, info.shape, info.nbytes) == (kind, shape, len(data))
            assert folder.read(info.name) == data


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    data = safetensors_bytes({"scalar": ("F32", (), bytes(4)), "none": ("F16", (0, 5), b""), "none too": ("U8", (0,), b"")})
    with SafetensorsFolder(folder_with(tmp_path, data)) as folder:
        assert {name: info.nbytes for name, info in folder.tensors.items()} == {"scalar": 4, "none": 0, "none too": 0}


A, B = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}
TWICE = b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
# name -> (file, field the error names, words of the problem)
REFUSED: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "header", "0 bytes"),
    "header length 0": (raw_safetensors(b"  ", length=0), "header", "expected '{'"),
    "header length beyond the file": (raw_safetensors(b"{}", length=1 << 20), "header length", "the file has 10"),
    "header length that wraps": (raw_safetensors(b"{}", length=2**64 - 8), "header length", "at most"),
    "header above 100 MB": (raw_safetensors(b"{}", length=100_000_001), "header length", "at most 100000000"),
    "not an object": (raw_safetensors(b"[1]"), "header", "expected '{'"),
    "not JSON": (raw_safetensors(b"{nope}"), "header", "not JSON"),
    "not UTF-8": (raw_safetensors(b'{"\xff":1}'), "header", "not UTF-8"),
    "half a character": (raw_safetensors(b'{"\\ud800":1}'), "header", "surrogate"),
    "NaN": (raw_safetensors(b'{"t":NaN}'), "header", "NaN is not JSON"),
    "endless nesting": (raw_safetensors(b'{"t":' + b"[" * 200_000), "header", "nested too deeply"),
    "endless number": (raw_safetensors(b'{"t":' + b"9" * 20_000 + b"}"), "header", "not JSON"),
    "duplicate name": (raw_safetensors(TWICE, bytes(2)), "header", "'t' appears twice"),
    "metadata": (raw_safetensors(b'{"__metadata__":{"format":1}}'), "__metadata__", "object of strings"),
    "entry": (raw_safetensors(b'{"t":5}'), "t", "expected dtype, shape and data_offsets"),
    "entry with more": (raw_safetensors(header(t={**A, "x": 1}), bytes(8)), "t", "expected dtype"),
    "unknown dtype": (raw_safetensors(one(dtype="F4"), bytes(16)), "t", "unknown dtype 'F4'; known are F64, F32"),
    "dtype of another type": (raw_safetensors(one(dtype=["F32"]), bytes(16)), "t", "unknown dtype"),
    "shape": (raw_safetensors(one(shape="2,2"), bytes(16)), "t", "shape: expected"),
    "negative shape": (raw_safetensors(one(shape=[-2, -2]), bytes(16)), "t", "shape: expected"),
    "float in the shape": (raw_safetensors(one(shape=[2.0, 2]), bytes(16)), "t", "shape: expected"),
    "bool in the shape": (raw_safetensors(one(shape=[True, 4]), bytes(16)), "t", "shape: expected"),
    "shape of 2^63": (raw_safetensors(one(shape=[2**63]), bytes(16)), "t", "shape: expected"),
    "shape that wraps": (raw_safetensors(one(shape=[2**62, 4, 4]), bytes(16)), "t", "too large"),
    "zero times huge": (raw_safetensors(one(shape=[0, 2**62], offsets=[0, 0]), b""), "t", "too large"),
    "nine dimensions": (raw_safetensors(one(shape=[1] * 8 + [4]), bytes(16)), "t", "at most 8"),
    "offsets": (raw_safetensors(one(offsets=[0]), bytes(16)), "t", "two offsets"),
    "offsets reversed": (raw_safetensors(one(offsets=[16, 0]), bytes(16)), "t", "begin <= end"),
    "offsets negative": (raw_safetensors(one(offsets=[-16, 0]), bytes(16)), "t", "two offsets"),
    "offsets beyond the file": (raw_safetensors(one(offsets=[0, 16]), bytes(15)), "t", "<= 15"),
    "offsets that wrap": (raw_safetensors(one(offsets=[2**63 - 16, 2**63 - 1]), bytes(16)), "t", "begin <= end"),
    "odd size": (raw_safetensors(one(offsets=[0, 15]), bytes(15)), "t", "span 15 bytes; F32 of shape [2, 2] takes 16"),
    "overlap": (raw_safetensors(header(a=A, b={**B, "data_offsets": [4, 12]}), bytes(12)), "b", "overlaps"),
    "gap": (raw_safetensors(header(a=A, b={**B, "data_offsets": [9, 17]}), bytes(17)), "b", "gap of 1 bytes"),
    "gap at the start": (raw_safetensors(header(b=B), bytes(16)), "b", "gap of 8 bytes"),
    "something behind": (raw_safetensors(header(a=A), bytes(9)), "data", "take 8 bytes, the file has 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lies_are_refused(tmp_path: Path, name: str) -> None:
    data, field, words = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        SafetensorsFolder(folder_with(tmp_path, data))
    message = str(caught.value)
    assert caught.value.field == field, message
    assert words in message
    assert message.startswith(str(tmp_path / "model.safetensors"))


INDEXES: dict[str, tuple[Any, str]] = {
    "no map": ({"metadata": {}}, "weight_map: expected an object"),
    "empty map": ({"weight_map": {}}, "weight_map: expected an object"),
    "elsewhere": ({"weight_map": {"a": "../model.safetensors"}}, "a: expected the name of a safetensors file in this folder"),
    "absolute": ({"weight_map": {"a": "/etc/x.safetensors"}}, "a: expected the name"),
    "NUL": ({"weight_map": {"a": "a\0.safetensors"}}, "a: expected the name"),
    "pickled": ({"weight_map": {"a": "pytorch_model.bin"}}, "a: expected the name"),
    "a number": ({"weight_map": {"a": 5}}, "a: expected the name"),
    "missing file": ({"weight_map": {"a": "no.safetensors"}}, "no.safetensors: cannot be opened: No such file"),
    "missing tensor": ({"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}, "c: in the index but not in the file"),
    "extra tensor": ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, "a: the tensor is also in one.safetensors"),
    "other shard": ({"weight_map": {"b": "two.safetensors"}}, "a: in the file but not in the index for it"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_bad_indexes_are_refused(tmp_path: Path, name: str) -> None:
    index, words = INDEXES[name]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "one.safetensors").write_bytes(safetensors_bytes({"a": ("U8", (1,), b"x")}))
    (tmp_path / "two.safetensors").write_bytes(safetensors_bytes({"a": ("U8", (1,), b"x"), "b": ("U8", (1,), b"y")}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        SafetensorsFolder(tmp_path)
    assert words in str(caught.value)


def test_what_is_no_model_folder(tmp_path: Path) -> None:
    for make, words in (
        (lambda: None, "config.json: cannot be opened"),
        (lambda: (tmp_path / "config.json").write_text("[]"), "expected a JSON object, got a list"),
        (lambda: (tmp_path / "config.json").write_text("{}"), "expected model.safetensors or"),
        (lambda: (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02."), "pickled weights are never opened"),
        (lambda: (tmp_path / "generation_config.json").write_text('{"a":1,"a":2}'), "generation_config.json: the key 'a' appears twice"),
    ):
        make()
        with pytest.raises(ModelError, match=words):
            SafetensorsFolder(tmp_path)
    for name in ("weights.bin", "model.pt", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x" * 100)
        with pytest.raises(UnsupportedModel):
            families.open_source(tmp_path / name)


def test_only_json_and_safetensors_are_opened_and_nothing_runs(tmp_path: Path) -> None:
    """auto_map, code and pickles lie in the folder; neither is opened, whatever the configuration says."""
    marker = tmp_path / "ran"
    folder = write_folder(tmp_path / "model", Tiny(), {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04\x95")
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and watching:
            opened.append(os.fspath(arguments[0]) if not isinstance(arguments[0], int) else "")

    watching = True
    sys.addaudithook(hook)
    with families.open_source(folder) as source:
        families.describe(source)
    watching = False
    names = {Path(path).name for path in opened if str(path).startswith(str(folder))}
    assert names == {"config.json", "model.safetensors"}
    assert not marker.exists()
    assert "modeling_evil" not in sys.modules


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    folder_with(tmp_path, REFUSED["gap"][0])
    for _ in range(20):
        with pytest.raises(ModelError):
            SafetensorsFolder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_truncation_anywhere(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, Tiny(layers=1))
    data = (folder / "model.safetensors").read_bytes()
    for size in cuts(len(data)):
        (folder / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(ModelError):
            SafetensorsFolder(folder)


def test_mutations(tmp_path: Path) -> None:
    """Whatever happens to a header, a configuration or an index, the folder is understood or refused with a ModelError."""
    rng = np.random.default_rng(21)
    folder = write_folder(tmp_path, Tiny(layers=1), shards=2)
    refused = 0
    files = [path for path in folder.iterdir() if "00002" not in path.name]
    for i in range(900):
        path = files[i % len(files)]
        whole = path.read_bytes()
        reach = 8 + int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else len(whole)
        path.write_bytes(mutated(rng, whole, reach))
        try:
            with families.open_source(folder) as source:
                families.describe(source)
        except ModelError:
            refused += 1
        finally:
            path.write_bytes(whole)
    assert refused > 400


def test_json_values_keep_their_types() -> None:
    assert parse_json(Path("x"), b'{"a": [1, 2.5, null, true, "\\ud83d\\ude00"]}', "") == {"a": [1, 2.5, None, True, "\U0001f600"]}
