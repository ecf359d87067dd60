"""The listening socket, made before anything else: a module of its own because everything else takes time to import."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from headrace.errors import UsageError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Listen before anything is loaded, so that a taken port is known at once. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from None
    sock.setblocking(False)
    return sock


def bind_unix(path: Path) -> tuple[socket.socket, int]:
    """Listen on a unix socket that only this user can connect to; and its inode. What a dead server left is replaced. Raises UsageError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)  # the file is made with mode 0600: at no time can others connect
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
        inode = path.stat().st_ino
    except UsageError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise UsageError(f"--uds: cannot listen on {path}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock, inode


def _remove_stale(path: Path) -> None:
    """Raises UsageError where a server answers, or where something is that is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"--uds: {path} is there and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass  # somebody listens, and is busy
    raise UsageError(f"--uds: a server is listening on {path} already")


def remove_unix(path: Path, inode: int) -> None:
    """Remove a socket's file, unless another server has put its own there."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return sock.family == socket.AF_UNIX or ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """From PEM files; `key` may be in the same file. None without a certificate. Raises UsageError."""
    if cert is None:
        if key is not None:
            raise UsageError("--tls-key: needs --tls-cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise UsageError(f"--tls-key: {key or cert} is encrypted: a server has nobody to ask for its password")

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        raise UsageError(f"--tls-cert: {cert} and {key or cert} are no certificate with its key in PEM: {error.reason or error}") from None
    except OSError as error:
        raise UsageError(f"--tls-cert: {error.filename or cert} cannot be read: {error.strerror}") from None
    return context
