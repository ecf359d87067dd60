"""The life of an engine process: greets, has the model loaded, then runs the step loop until the API process goes away.

It is started by `worker.py` with one end of a socketpair, and it outlives its parent by nothing: the kernel kills it when the parent
dies, and the closed socket ends it otherwise. Stop signals are the parent's business (a terminal sends them to both).
Which model and which engine is not said here: `main` takes the function that builds them.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.request import Command, StepEvents
from headrace.server.channel import Channel, PeerGone, expect_hello
from headrace.server.messages import Fatal, Hello, Planned, Ready, check_version

_PR_SET_PDEATHSIG = 1


class EngineLike(Protocol):
    """What the loop needs of an engine (`headrace.engine.loop.Engine`, or a scripted one in tests)."""

    @property
    def has_work(self) -> bool:
        """False: `step` would do nothing until the next command."""

    def apply(self, command: Command) -> StepEvents | None:
        """Take in one command; a refusal is an event."""

    def step(self) -> StepEvents | None:
        """Advance once."""


def serve(engine: EngineLike, channel: Channel) -> None:
    """Serve until the API process goes away (PeerGone). Sleeps only when there is nothing to do, and never spins."""
    while True:
        for command in channel.receive(wait=not engine.has_work):
            if isinstance(command, Hello):
                continue
            events = engine.apply(command)
            if events is not None:
                channel.publish(events)
        if engine.has_work:
            events = engine.step()
            if events is not None:
                channel.publish(events)


class Builder(Protocol):
    """Loads the model and wires an engine."""

    def __call__(self, hello: Hello, weights_fd: int, tell: Callable[[Planned], None]) -> tuple[EngineLike, Ready]:
        """`weights_fd`: a memfd for packed weights, which `hello.manifest` describes if they are there. Raises HeadraceError."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent does die; leave now if that has happened already."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def run(build: Builder, sock: socket.socket, weights_fd: int = -1) -> int:
    """The life of an engine process on its end of the socketpair. Returns the exit code."""
    channel = Channel(sock)
    try:
        hello = expect_hello(channel)
        try:
            check_version(hello.protocol)
            engine, ready = build(hello, weights_fd, channel.send)
        except HeadraceError as error:
            channel.send(Fatal(type(error).__name__, str(error)))
            return 2
        except MemoryError:
            channel.send(Fatal("MemoryBudgetExceeded", "the machine has no memory left for the model"))
            return 2
        # Everything loaded so far lives as long as the process: no collection need ever walk it again.
        gc.collect()
        gc.freeze()
        channel.send(ready)
        serve(engine, channel)
    except PeerGone:
        return 0
    return 0


def main(build: Builder, arguments: list[str]) -> int:
    """Entry point of an engine process. Returns the exit code."""
    import argparse

    parser = argparse.ArgumentParser(prog="headrace-engine", description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--weights", type=int, default=-1)
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args(arguments)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    if options.parent:
        die_with_parent(options.parent)
    return run(build, socket.socket(fileno=options.socket), options.weights)
