"""The API process's end of the engine: starts it, sends requests, hands out what each step did, and starts it again when it dies.

All methods run on the event loop's thread. The table of open requests holds what a fresh engine needs to go on: the submitted request
and, per sample, the ids that came back. A request that was open at two crashes in a row is ended with an error instead of a third try.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import repeat

import msgspec

from headrace import errors
from headrace.errors import EngineFailed, HeadraceError, RequestError
from headrace.request import PROTOCOL_VERSION, Abort, StepEvents, Submit
from headrace.server.listener import Listener
from headrace.server.messages import (
    EngineSettings,
    Fatal,
    Frames,
    Hello,
    Planned,
    ProtocolError,
    Ready,
    check_version,
    event_decoder,
    fatal_error,
    frame,
)

log = logging.getLogger("headrace.worker")

ENGINE_COMMAND = (sys.executable, "-m", "headrace.cli.engine_process")
_SEND_BUFFER_BYTES = 1 << 20
_MAX_CRASHES = 3  # in _CRASH_WINDOW_S; one more is not bad luck
_CRASH_WINDOW_S = 60.0
_MAX_REQUEST_CRASHES = 2


class _Entry:
    __slots__ = ("crashes", "listener", "lost_at", "samples", "submit")

    def __init__(self, submit: Submit, listener: Listener) -> None:
        self.submit = submit
        self.samples = listener.samples
        self.listener = listener
        self.crashes = 0
        self.lost_at = 0.0  # when a crash interrupted it; 0: it runs or waits undisturbed


class _EngineSocket(asyncio.Protocol):
    def __init__(self, worker: Worker, generation: int) -> None:
        self._worker = worker
        self._generation = generation
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        worker = self._worker
        if self._generation != worker.generation:
            return
        try:
            for message in self._frames.feed(data):
                worker.on_message(event_decoder.decode(message))
        except (ProtocolError, msgspec.DecodeError):
            log.exception("engine process sent what is not the protocol")
            worker.kill_engine()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._generation == self._worker.generation:
            self._worker.on_lost()


class Worker:
    """One engine process and the requests it has."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        command: Sequence[str] = (),
        on_planned: Callable[[Planned], None] = lambda planned: None,
        watchdog_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.ready: Ready | None = None  # None: loading, restarting or gone
        self.limits: Ready | None = None  # what the engine said first; stays through restarts
        self.memory: list[tuple[str, int]] = []  # the ledger: bytes by purpose
        self.generation = 0
        self.restarts = 0
        self.fatal: HeadraceError | None = None
        self._command = tuple(command) or ENGINE_COMMAND
        self._on_planned = on_planned
        self._on_ready: Callable[[Ready], None] = lambda ready: None
        self._on_fatal: Callable[[HeadraceError], None] = lambda error: None
        self._on_events: Callable[[StepEvents], None] = lambda events: None
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._table: dict[int, _Entry] = {}
        self._next_id = 1
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._crash_times: list[float] = []
        self._closing = False
        self._heard = 0.0  # when the engine last said anything, or was given work while idle
        self._watchdog: asyncio.TimerHandle | None = None
        self._weights_fd = -1
        self._connecting: asyncio.Task[None] | None = None

    def listen(
        self,
        *,
        on_ready: Callable[[Ready], None],
        on_fatal: Callable[[HeadraceError], None],
        on_events: Callable[[StepEvents], None],
    ) -> None:
        """Who hears that an engine is ready (again), that none will be, and what each step did."""
        self._on_ready, self._on_fatal, self._on_events = on_ready, on_fatal, on_events

    # Life of the process

    def spawn(self) -> None:
        """Start the engine process. Needs no event loop, so it can be the very first thing a server does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            if self._weights_fd < 0:
                # Packed weights outlive an engine process: the next one packs nothing.
                self._weights_fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
            arguments = ["--socket", str(theirs.fileno()), "--weights", str(self._weights_fd), "--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                [*self._command, *arguments], pass_fds=(theirs.fileno(), self._weights_fd), stdin=subprocess.DEVNULL, close_fds=True
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self.generation += 1

    async def connect(self) -> None:
        """Take the spawned process into the running event loop and greet it."""
        if self._sock is None:
            self.spawn()
        sock, self._sock = self._sock, None
        generation = self.generation
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _EngineSocket(self, generation), sock=sock)
        self._transport = transport
        self._heard = self._clock()
        before = self.limits
        manifest, num_blocks = (before.manifest, before.num_blocks) if before is not None else (b"", 0)
        transport.write(frame(Hello(PROTOCOL_VERSION, self.settings, manifest, num_blocks)))
        if self._watchdog is None and self._watchdog_s:
            self._watchdog = loop.call_later(1.0, self._watch)

    async def close(self) -> None:
        """End the engine process and wait for it. Open requests are failed."""
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None:
            self._transport.close()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        process = self._process
        if process is not None:
            if self.ready is None:
                process.kill()  # it is loading, and would not look up before it is done
            for _ in range(200):
                if process.poll() is not None:
                    break
                await asyncio.sleep(0.01)
            else:
                process.kill()
                process.wait()
        if self._weights_fd >= 0:
            os.close(self._weights_fd)
            self._weights_fd = -1
        self.ready = None
        self._fail_all(errors.Unavailable("the server is shutting down"))

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def kill_engine(self) -> None:
        """End the engine process now; what follows is the same as after a crash."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    # Requests

    @property
    def num_open(self) -> int:
        return len(self._table)

    def submit(self, make: Callable[[int], Submit], listener: Listener) -> int:
        """Send a request to the engine, or keep it until the engine is back. Returns its id."""
        request_id = self._next_id
        self._next_id += 1
        if self.fatal is not None:
            raise EngineFailed("the engine has stopped")
        submit = make(request_id)
        if not self._table:
            self._heard = self._clock()
        self._table[request_id] = _Entry(submit, listener)
        if self.ready is not None and self._transport is not None:
            self._transport.write(frame(submit))
        return request_id

    def abort(self, request_id: int) -> None:
        """Forget a request and tell the engine. Unknown ids are ignored."""
        if self._table.pop(request_id, None) is not None and self.ready is not None and self._transport is not None:
            self._transport.write(frame(Abort(request_id)))

    # What the engine says

    def on_message(self, message: Planned | Ready | Fatal | StepEvents) -> None:
        self._heard = self._clock()
        if type(message) is StepEvents:
            self._dispatch(message)
        elif isinstance(message, Ready):
            check_version(message.protocol)
            self.ready = self.limits = message
            for entry in self._table.values():
                self._resubmit(entry)
            self._on_ready(message)
        elif isinstance(message, Planned):
            self.memory = [(purpose.lower().replace(" ", "_"), size) for purpose, size, _ in message.rows]
            if self.limits is None:
                self._on_planned(message)
        elif isinstance(message, Fatal):
            self._give_up(fatal_error(message))

    def _dispatch(self, events: StepEvents) -> None:
        table = self._table
        touched: dict[int, _Entry] = {}
        with_logprobs = bool(events.logprobs)
        logprobs = events.logprobs or repeat(None)
        for request_id, sample, token, logprob in zip(events.request_ids, events.samples, events.tokens, logprobs, strict=with_logprobs):
            entry = table.get(request_id)
            if entry is not None:
                target = entry.samples[sample]
                if target.reason is None:
                    target.tokens.append(token)
                    if with_logprobs:
                        target.logprobs.append(logprob)
                    touched[request_id] = entry
        for request_id, at, cached in events.admitted:
            entry = table.get(request_id)
            if entry is not None:
                if entry.lost_at:
                    entry.listener.stalled(max(0.0, at - entry.lost_at))
                    entry.lost_at = 0.0
                entry.listener.admitted(at, cached)
        for request_id, seconds in events.stalled:
            entry = table.get(request_id)
            if entry is not None:
                entry.listener.stalled(seconds)
        for request_id, sample, reason in events.finished:
            entry = table.get(request_id)
            if entry is not None and entry.samples[sample].reason is None:
                entry.samples[sample].reason = reason
                touched[request_id] = entry
        for request_id, told in events.prompts:
            entry = table.get(request_id)
            if entry is not None:
                entry.listener.scored(told)
        for refusal in events.refused:
            entry = table.pop(refusal.request_id, None)
            if entry is not None:
                kind = getattr(errors, refusal.kind, EngineFailed)
                entry.listener.failed(kind(refusal.message, param=refusal.param))
        self._on_events(events)
        at = events.time
        for request_id, entry in touched.items():
            if entry.listener.flush(at) and request_id in table:
                if any(sample.reason is None for sample in entry.samples):
                    self.abort(request_id)  # ended by its text (a stop string): the engine is still at it
                else:
                    del table[request_id]
            elif len(entry.samples) > 1 and request_id in table:
                self._end_samples(request_id, entry)

    def _end_samples(self, request_id: int, entry: _Entry, again: bool = False) -> None:
        """Tell the engine of samples that a stop string has ended, while others of the request go on."""
        for index, sample in enumerate(entry.samples):
            if sample.finish is not None and (sample.reason is None or (again and sample.reason == "abort")):
                sample.reason = "abort"
                if self._transport is not None:
                    self._transport.write(frame(Abort(request_id, index)))

    # Crashes

    def on_lost(self) -> None:
        """The socket is closed: the process is dead or about to be."""
        if self._closing or self.fatal is not None:
            return
        was_ready, self.ready, self._transport = self.ready, None, None
        code = self._reap()
        now = self._clock()
        self._crash_times = [t for t in self._crash_times if now - t < _CRASH_WINDOW_S] + [now]
        if was_ready is None or len(self._crash_times) > _MAX_CRASHES:
            self._give_up(HeadraceError(f"the engine process ended with code {code}" + ("" if was_ready else " while loading")))
            return
        log.error("the engine process ended with code %s; starting another for %d open requests", code, len(self._table))
        for request_id, entry in list(self._table.items()):
            entry.crashes += 1
            if entry.crashes >= _MAX_REQUEST_CRASHES:
                del self._table[request_id]
                entry.listener.failed(EngineFailed("the engine failed twice while it ran this request"))
            elif not entry.lost_at:
                entry.lost_at = now
        self.restarts += 1
        try:
            self.spawn()
        except OSError as error:
            self._give_up(HeadraceError(f"the engine process cannot be started: {error}"))
            return
        self._connecting = asyncio.get_running_loop().create_task(self.connect())

    def _resubmit(self, entry: _Entry) -> None:
        emitted = tuple(sample.tokens.tobytes() for sample in entry.samples)
        submit = msgspec.structs.replace(entry.submit, emitted=emitted) if any(emitted) else entry.submit
        if self._transport is not None:
            self._transport.write(frame(submit))
            self._end_samples(submit.request_id, entry, again=True)

    def _reap(self) -> int | None:
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _watch(self) -> None:
        """Kill an engine that has work and says nothing: a hung step is a crash."""
        self._watchdog = asyncio.get_running_loop().call_later(1.0, self._watch)
        if self.ready is not None and self._table and self._clock() - self._heard > self._watchdog_s:
            log.error("the engine has said nothing for %.0f s with %d open requests", self._watchdog_s, len(self._table))
            self.kill_engine()

    def _give_up(self, error: HeadraceError) -> None:
        if self.fatal is None:
            self.fatal = error
            self.ready = None
            self._fail_all(EngineFailed("the engine has stopped"))
            self._on_fatal(error)

    def _fail_all(self, error: RequestError) -> None:
        table, self._table = self._table, {}
        for entry in table.values():
            entry.listener.failed(error)
