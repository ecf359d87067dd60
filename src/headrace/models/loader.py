"""From a path to a model whose weights lie packed in shared memory, in two steps: `prepare` reads headers only, `load` fills the arena.

with prepare(path, "auto") as prepared:      # configuration, bytes at this level: what the memory ledger needs
    model = prepared.load()                  # reads and packs, or raises ModelError and leaves nothing behind
other = attach(fd, model.manifest())         # in another process: the same pages, no file
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.config import Level, ModelConfig, RopeConfig
from headrace.errors import ModelError
from headrace.models import pack
from headrace.models.arena import Arena
from headrace.models.families import Network, describe, open_source
from headrace.models.gguf import GGUFFile
from headrace.models.pack import PackedWeight
from headrace.models.safetensors import SafetensorsFolder
from headrace.models.source import TensorInfo

MANIFEST_VERSION = 1
PIECE_BYTES = 512 << 10  # of the file at once: read and packed while it is in the second-level cache
MAX_THREADS = 2  # packing is bound by memory from there on
_EDGE_BYTES = 64  # of each tensor's beginning and end, that a digest is made from

Weight = PackedWeight | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. Packed weights hold addresses into `arena`, so they are valid as long as the model is referenced."""

    config: ModelConfig
    level: Level
    weights: dict[str, Weight]  # canonical name -> packed weight, or float32 vector (norms, biases)
    arena: Arena
    path: Path  # the GGUF file or the folder it came from
    kind: str  # gguf, safetensors
    end_token_ids: tuple[int, ...]
    digest: str  # names what the files hold: see `digest_of`
    source: GGUFFile | SafetensorsFolder | None = None  # closed; its metadata is what a tokenizer is made from. None when attached

    def manifest(self) -> dict[str, Any]:
        """What another process needs to use the same arena: plain JSON values."""
        weights: dict[str, dict[str, Any]] = {}
        for name, weight in self.weights.items():
            if isinstance(weight, PackedWeight):
                weights[name] = {"format": weight.format, "n": weight.n, "k": weight.k, "offset": weight.offset}
            else:
                weights[name] = {"shape": list(weight.shape), "offset": int(weight.ctypes.data) - self.arena.address}
        return {
            "version": MANIFEST_VERSION,
            "nbytes": self.arena.nbytes,
            "config": asdict(self.config),
            "level": self.level,
            "weights": weights,
            "path": str(self.path),
            "kind": self.kind,
            "end_token_ids": list(self.end_token_ids),
            "digest": self.digest,
        }


class Prepared:
    """An opened, understood and laid out model file; nothing is allocated yet. Close it, or use it as a context manager."""

    def __init__(self, source: GGUFFile | SafetensorsFolder, level: Level) -> None:
        self.source = source
        self.level = level
        self.network: Network = describe(source)
        self.layout: pack.Layout = pack.plan(self.network, level)

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that `load` needs."""
        return self.layout.nbytes

    def load(self, arena: Arena | None = None, threads: int = MAX_THREADS) -> Model:
        """Read and pack every weight, with `threads` threads. Memory beyond the arena: one piece of the file a thread."""
        arena = arena or Arena.create(self.layout.nbytes)
        if arena.nbytes < self.layout.nbytes:
            raise ValueError(f"[load] arena: expected at least {self.layout.nbytes} bytes, got {arena.nbytes}")
        if self.network.untied_copy is not None:
            self._check_copy(self.network.uses["embed"].tensor, self.network.untied_copy)
        tasks: list[pack.Task] = []
        for item in self.layout.packed:
            pack.zero_padding(item, arena.address + item.offset)
            for part in item.parts:
                file = self.source.file_of(part.use.tensor)
                tasks += pack.split(item, part, file, self.config, PIECE_BYTES)
        tasks.sort(key=lambda task: (str(task.file.path), task.position))  # disks like it in order
        _run(tasks, arena, max(1, min(threads, MAX_THREADS)))
        weights: dict[str, Weight] = {
            item.name: PackedWeight(item.format, item.n, item.k, arena.address + item.offset, item.nbytes, item.offset)
            for item in self.layout.packed
        }
        for vector in self.layout.floats:
            array = arena.array(vector.offset, vector.shape, np.float32)
            array[:] = pack.read_vector(self.source.file_of(vector.part.use.tensor), vector, self.config)
            weights[vector.name] = array
        if self.config.tie_embeddings:
            weights["head"] = weights["embed"]
        ends, source = self.network.end_token_ids, self.source
        return Model(self.config, self.level, weights, arena, source.path, source.kind, ends, digest_of(self.config, source), source)

    def _check_copy(self, embed: TensorInfo, head: TensorInfo) -> None:
        """A head stored beside a tied embedding is a copy of it, or the file contradicts its configuration."""
        file, other = self.source.file_of(head), self.source.file_of(embed)
        same = (embed.type, embed.nbytes) == (head.type, head.nbytes)
        at = 0
        while same and at < head.nbytes:
            count = min(PIECE_BYTES, head.nbytes - at)
            same = file.read(count, head.offset + at, head.name) == other.read(count, embed.offset + at, embed.name)
            at += count
        if not same:
            raise ModelError(file.path, head.name, f"tie_word_embeddings is true, but the tensor differs from {embed.name}")

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _run(tasks: list[pack.Task], arena: Arena, threads: int) -> None:
    """All tasks on a few threads; the first error ends them and is raised."""
    local = threading.local()

    def work(task: pack.Task) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(PIECE_BYTES)
        pack.run(task, local.buffer, arena.address + task.item.offset)

    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        futures = [pool.submit(work, task) for task in tasks]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
    for future in done:
        future.result()


def prepare(path: str | Path, level: Level = "auto") -> Prepared:
    """Open a GGUF file or model folder and lay its weights out. Raises ModelError or UnsupportedModel."""
    source = open_source(path)
    try:
        return Prepared(source, level)
    except BaseException:
        source.close()
        raise


def load_model(path: str | Path, level: Level = "auto", arena: Arena | None = None) -> Model:
    """`prepare` and `load` in one. Raises ModelError or UnsupportedModel; nothing is left behind then."""
    with prepare(path, level) as prepared:
        return prepared.load(arena)


def attach(fd: int, manifest: dict[str, Any]) -> Model:
    """The model another process loaded into the memfd `fd`, mapped read-only. The caller keeps the descriptor.

    Raises ValueError for a manifest of another version or one that points outside the memfd.
    """
    if manifest["version"] != MANIFEST_VERSION:
        raise ValueError(f"[attach] manifest: expected version {MANIFEST_VERSION}, got {manifest['version']}")
    arena = Arena(fd, manifest["nbytes"], writable=False)
    rope = dict(manifest["config"]["rope"])
    rope["freq_factors"] = tuple(rope["freq_factors"])
    config = ModelConfig(**{**manifest["config"], "rope": RopeConfig(**rope)})
    weights: dict[str, Weight] = {}
    for name, entry in manifest["weights"].items():
        offset = entry["offset"]
        if "shape" in entry:
            weights[name] = arena.array(offset, tuple(entry["shape"]), np.float32)
        else:
            nbytes = pack.packed_bytes(entry["format"], entry["n"], entry["k"])
            arena.check(offset, nbytes)
            weights[name] = PackedWeight(entry["format"], entry["n"], entry["k"], arena.address + offset, nbytes, offset)
    if config.tie_embeddings:
        weights["head"] = weights["embed"]
    path, ends = Path(manifest["path"]), tuple(manifest["end_token_ids"])
    return Model(config, manifest["level"], weights, arena, path, manifest["kind"], ends, manifest["digest"])


def digest_of(config: ModelConfig, source: GGUFFile | SafetensorsFolder) -> str:
    """Tells models apart without reading them whole: configuration, and each tensor's name, type, shape, first and last bytes."""
    digest = blake2b(repr(config).encode(), digest_size=16)
    for name, tensor in sorted(source.tensors.items()):
        digest.update(repr((name, tensor.type, tensor.shape)).encode())
        edge = min(_EDGE_BYTES, tensor.nbytes)
        for offset in (tensor.offset, tensor.offset + tensor.nbytes - edge):
            digest.update(source.file_of(tensor).read(edge, offset, name))
    return digest.hexdigest()
