"""Print what `make setup` installs, from pyproject.toml: the package's dependencies, or (`--no-deps`) those installed without their own.

python scripts/dependencies.py [--no-deps | --extra NAME | --build]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise SystemExit(f"pyproject.toml: not a requirement: {requirement!r}")
    return match.group().lower()


def main(arguments: list[str]) -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    dependencies: list[str] = settings["project"]["dependencies"]
    bare: list[str] = settings["tool"]["headrace"]["no-deps"]
    match arguments:
        case []:
            chosen = [d for d in dependencies if name_of(d) not in bare]
        case ["--no-deps"]:
            bounded = {name_of(d): d for d in dependencies}
            chosen = [bounded.get(name, name) for name in bare]
        case ["--extra", extra]:
            chosen = settings["project"]["optional-dependencies"][extra]
        case ["--build"]:
            chosen = settings["build-system"]["requires"]
        case _:
            raise SystemExit(__doc__)
    print("\n".join(chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
