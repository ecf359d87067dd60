"""The life of the API process: serve from the first moment, become ready, drain on a signal, end with a code that tells."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable

from headrace.errors import HeadraceError, Unavailable
from headrace.server.app import Application
from headrace.server.codec import TextCodec
from headrace.server.cors import with_cors
from headrace.server.http import make_server

log = logging.getLogger("headrace")

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class Runner:
    """Holds what must happen in order: the loop's signals, the engine, the text side, the HTTP server."""

    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        load_codec: Callable[[], TextCodec],
        *,
        shutdown_timeout_s: float = 10.0,
        on_ready: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
        read_timeout_s: float = 30.0,
    ) -> None:
        self.app = app
        app.when_ready, app.when_fatal = self.announce, self.on_fatal
        self.error: HeadraceError | None = None  # why it ended, when not by a signal
        self._sock = sock
        self._load_codec = load_codec
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_ready = on_ready
        self._server = make_server(with_cors(app, app.settings.cors_origins), tls=tls, read_timeout_s=read_timeout_s)
        self._exit_code = EXIT_OK
        self._stopping: asyncio.Task[None] | None = None
        self._announced = False

    async def run(self) -> int:
        """Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self.app.worker.connect()
        loading = loop.create_task(self._load_text())
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            loading.cancel()
            await self.app.worker.close()
            await loop.run_in_executor(None, self.app.front.reporter.close)
        return self._exit_code

    async def _load_text(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.app.codec = await loop.run_in_executor(None, self._load_codec)
        except HeadraceError as error:
            self.on_fatal(error)
        except Exception as error:
            log.exception("the tokenizer could not be loaded")
            self.on_fatal(HeadraceError(f"the tokenizer could not be loaded: {type(error).__name__}"))
        else:
            self.announce()

    def announce(self) -> None:
        """Called when the engine is ready, and when the text side is; tells the first time both are."""
        if not self._announced and self.app.is_ready:
            self._announced = True
            # What is loaded now stays; collections need only look at what requests bring.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 20)
            self._on_ready()

    def on_fatal(self, error: HeadraceError) -> None:
        """Nothing more can be served: end, and say so by the exit code."""
        self.error = error
        self._exit_code = EXIT_FAILED if type(error) is HeadraceError else EXIT_USAGE
        if self._announced:
            log.error("%s", error)
        asyncio.get_running_loop().call_later(0.05, self._exit)  # error frames leave first

    def _on_signal(self, number: int) -> None:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._drain())
        else:
            log.warning("stopped at once")
            if not self._exit_code:
                self._exit_code = 128 + number
            self._stopping.cancel()
            self.app.fail_all(Unavailable("the server was stopped"))
            self._exit()

    async def _drain(self) -> None:
        app = self.app
        app.draining = True
        if app.answers:
            log.info("finishing %d requests, at most %.0f s", len(app.answers), self._shutdown_timeout_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(app.idle.wait(), self._shutdown_timeout_s)
        app.fail_all(Unavailable("the server is shutting down"))
        await asyncio.sleep(0.02)
        self._exit()

    def _exit(self) -> None:
        self._server.should_exit = True
