"""The listening socket, made before anything else: a module of its own because everything else takes time to import."""

from __future__ import annotations

import ipaddress
import socket

from headrace.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """Listen before anything is loaded, so that a taken port is known at once. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from None
    sock.setblocking(False)
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback
