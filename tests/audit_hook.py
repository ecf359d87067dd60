"""Tells what a process does to the outside: files, connections, programs."""

from __future__ import annotations

import sys
from typing import Any


def audit(path: str) -> None:
    """From now on a line a file, connection or program this process opens, other than of its own parts."""
    out = open(path, "w", buffering=1)  # noqa: SIM115 - until the end

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "socket.connect", "subprocess.Popen", "os.system", "os.exec", "socket.getaddrinfo", "exec"):
            out.write(f"{event} {arguments[0] if event != 'socket.connect' else arguments[1]}\n")

    sys.addaudithook(hook)
