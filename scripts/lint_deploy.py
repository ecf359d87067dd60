"""Check deploy/: the Dockerfile by hadolint, the manifests by kubernetes-validate, the unit by systemd-analyze where that is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEPLOY = Path(__file__).parents[1] / "deploy"
TOOLS = Path(sys.executable).parent
CUSTOM = ("podmonitor.yaml",)  # of kinds that are not Kubernetes' own: no schema comes with the validator


def run(*command: str | Path) -> bool:
    print("+", *(Path(part).name if isinstance(part, Path) else part for part in command), flush=True)
    return subprocess.run(command, check=False).returncode == 0


def unit_is_good(unit: Path) -> bool:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        print(f"{unit.name} was not verified: systemd-analyze is not installed (it comes with systemd)")
        return True
    # The command is not installed where it is checked: an executable stands in for it, everything else is as written.
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / unit.name
        copy.write_text(text)
        print(f"+ systemd-analyze verify {unit.name}", flush=True)
        done = subprocess.run([tool, "verify", "--man=no", copy], check=False, capture_output=True, text=True)
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode == 0 and not done.stderr  # what it does not know it ignores, and says so only


def main() -> int:
    manifests = [path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if path.name not in CUSTOM]
    good = [
        run(TOOLS / "hadolint", DEPLOY / "Dockerfile"),
        run(TOOLS / "kubernetes-validate", "--strict", "--quiet", *manifests),
        *(unit_is_good(unit) for unit in sorted(DEPLOY.glob("*.service"))),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
