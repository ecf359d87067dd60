"""Long fuzzing of the model readers and packers: python tests/fuzz_models.py [SECONDS] [SEED].

Every mutated file is loaded or refused with a ModelError; anything else is printed with the seed that makes it again, and exits 1. The
short form of this runs in the tests; run this one under the sanitizers after the native packers or a reader have changed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from helpers_models import Tiny, mutated, write_folder, write_gguf

from headrace.errors import ModelError
from headrace.models.gguf import StringArray
from headrace.models.loader import prepare

QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")


def header_of(path: Path, data: bytes) -> int:
    """How far the part of a file reaches whose meaning is worth attacking."""
    if path.suffix == ".safetensors":
        return 8 + int.from_bytes(data[:8], "little")
    return min(len(data), 6000)


def attempt(seed: int, folder: Path) -> str:
    """One mutated model, by its seed: "loaded", or "refused"."""
    rng = np.random.default_rng(seed)
    architecture = str(rng.choice(["llama", "qwen2", "qwen3", "mistral"]))
    tiny = Tiny(
        architecture, layers=1, seed=seed, types=QUANTIZED if rng.random() < 0.5 else ("F32", "F16", "BF16"), tied=bool(rng.random() < 0.5)
    )
    if rng.random() < 0.5:
        path = target = write_gguf(folder / "model.gguf", tiny)
    else:
        plain = Tiny(architecture, layers=1, seed=seed, types=("F32", "F16", "BF16"), tied=tiny.tied)
        path = write_folder(folder / "model", plain, shards=2)
        files = sorted(path.iterdir())
        target = files[int(rng.integers(len(files)))]
    data = target.read_bytes()
    reach = header_of(target, data) if rng.random() < 0.8 else len(data)
    changed = mutated(rng, data, reach)
    target.write_bytes(changed[: int(rng.integers(0, len(changed) + 1))] if rng.random() < 0.1 else changed)
    try:
        with prepare(path, str(rng.choice(["auto", "bf16", "int8", "int4"]))) as prepared:  # type: ignore[arg-type]
            for value in getattr(prepared.source, "metadata", {}).values():
                if isinstance(value, StringArray):
                    value.tolist()
            prepared.load()
        return "loaded"
    except ModelError:
        return "refused"


def main(seconds: float, seed: int) -> int:
    counts = {"loaded": 0, "refused": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts[attempt(seed, Path(folder))] += 1
            except Exception as error:
                print(f"seed {seed}: {type(error).__name__}: {error}")
                return 1
        seed += 1
    print(f"{counts['loaded']} loaded, {counts['refused']} refused")
    return 0


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0] if numbers else 60.0, int(numbers[1]) if len(numbers) > 1 else int(time.time())))
