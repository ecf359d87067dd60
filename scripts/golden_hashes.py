"""Write tests/golden/hashes.json: hashes of float32 logits at every level this machine has (docs/numerics.md).

    python scripts/golden_hashes.py

Levels that this machine lacks keep the hashes they have, if the numerics version is the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from golden_runs import HASHES, all_hashes, numerics_version

from headrace.kernels import native


def main() -> None:
    before = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    version = numerics_version()
    levels = before.get("levels", {}) if before.get("version") == version else {}
    for level in native.levels():
        native.use(level)
        levels[level] = all_hashes()
    HASHES.write_text(json.dumps({"version": version, "levels": dict(sorted(levels.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
