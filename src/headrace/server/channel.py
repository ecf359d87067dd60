"""The engine's end of the socketpair: commands in without waiting, events out without waiting.

The step loop must never wait for the API process. What the socket does not take now is kept, and further steps are merged into one
message, so a stalled reader costs the engine neither time nor more memory than the tokens themselves.
"""

from __future__ import annotations

import select
import socket

from headrace.request import Abort, StepEvents, Submit
from headrace.server.messages import Fatal, Frames, Hello, Planned, ProtocolError, Ready, command_decoder, frame

_READ_BYTES = 1 << 18


class PeerGone(Exception):
    """The API process closed its end or died."""


def merge(first: StepEvents, second: StepEvents) -> StepEvents:
    """Two messages as one: the columns of both, the later time and statistics. Changes and returns `first`."""
    if first.logprobs or second.logprobs:
        if not first.logprobs:
            first.logprobs = [None] * len(first.tokens)
        first.logprobs += second.logprobs or [None] * len(second.tokens)
    first.time = second.time
    first.request_ids += second.request_ids
    first.samples += second.samples
    first.tokens += second.tokens
    first.admitted += second.admitted
    first.finished += second.finished
    first.stalled += second.stalled
    first.refused += second.refused
    first.prompts += second.prompts
    if second.stats is not None:
        first.stats = second.stats
    return first


class Channel:
    """Non-blocking, framed; owned by the engine process."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = Frames()
        self._unsent = memoryview(b"")  # rest of a frame that is partly written
        self._merged: StepEvents | None = None  # events that wait for it
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def receive(self, *, wait: bool) -> list[Hello | Submit | Abort]:
        """The commands that have come. With `wait`, sleeps until there is one (and writes what is unsent meanwhile). Raises PeerGone."""
        commands: list[Hello | Submit | Abort] = []
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                if commands or not wait:
                    return commands
                self._sleep()
                continue
            except ConnectionError as error:
                raise PeerGone from error
            if not data:
                raise PeerGone
            commands += [command_decoder.decode(message) for message in self._frames.feed(data)]
            if commands and len(data) < _READ_BYTES:
                return commands

    def publish(self, events: StepEvents) -> None:
        """Send, or keep and merge. Never waits. Raises PeerGone."""
        self._flush()
        if self._unsent:
            self._merged = events if self._merged is None else merge(self._merged, events)
        else:
            self._write(frame(events))

    def send(self, message: Planned | Ready | Fatal) -> None:
        """Send a greeting or a farewell; waits until it is written."""
        self._sock.setblocking(True)
        try:
            self._sock.sendall(bytes(self._unsent) + frame(message))
        except OSError as error:
            raise PeerGone from error
        finally:
            self._sock.setblocking(False)
        self._unsent = memoryview(b"")

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) or self._merged is not None

    def _sleep(self) -> None:
        self._flush()
        self._poll.modify(self._sock, select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN)
        self._poll.poll()

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, memoryview(b"")
            self._write(unsent)
        if self._merged is not None and not self._unsent:
            merged, self._merged = self._merged, None
            self._write(frame(merged))

    def _write(self, data: bytes | memoryview) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except ConnectionError as error:
            raise PeerGone from error
        if sent < len(data):
            self._unsent = memoryview(data)[sent:]


def expect_hello(channel: Channel) -> Hello:
    """Wait for the greeting. Raises ProtocolError when something else comes first."""
    match channel.receive(wait=True):
        case [Hello() as hello]:
            return hello
        case commands:
            raise ProtocolError(f"expected one Hello first, got {[type(command).__name__ for command in commands]}")
