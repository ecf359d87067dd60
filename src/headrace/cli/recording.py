"""`headrace serve --record FILE` and `headrace replay FILE`: every decision of an engine, and whether it would decide so again.

A recording is JSON lines: a header with the configuration for each engine process that wrote to the file, then each command and each step
(its plan and the tokens that came of it) with the clock readings since the line before. Given the same commands, tokens and readings the
same scheduler makes the same plans, so a recording reproduces a decision seen on a server without its model. It holds prompts.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.config import EngineConfig
from headrace.engine.loop import Engine, StepRecord
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.errors import UsageError
from headrace.request import Abort, Command, Submit, TokenLogprob

VERSION = 1
_BUFFER_BYTES = 1 << 20


class Header(msgspec.Struct, frozen=True, tag="engine"):
    """The first line of an engine process."""

    version: int
    config: EngineConfig
    end_token_ids: tuple[int, ...]


class CommandLine(msgspec.Struct, frozen=True, tag="command"):
    """A command, before the scheduler had it: of a request with a grammar that is when the grammar was compiled."""

    clock: list[float]  # readings since the line before
    command: Submit | Abort


class StepLine(msgspec.Struct, frozen=True, tag="step"):
    """A step, after it was committed."""

    clock: list[float]
    plan: Plan
    tokens: list[int]


Line = Header | CommandLine | StepLine
_decoder = msgspec.json.Decoder(Line)


class Recorder:
    """What the engine tells its `record`, written to a file that is appended to; the scheduler gets its time from `clock`.

    A disk that is full ends the recording and not the server.
    """

    def __init__(self, path: str, config: EngineConfig, end_token_ids: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._file: BinaryIO | None = open(path, "ab", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed at exit
        self._encoder = msgspec.json.Encoder()
        self._now = clock
        self._readings: list[float] = []
        self._write(Header(VERSION, config, tuple(end_token_ids)))
        atexit.register(self.close)

    def clock(self) -> float:
        now = self._now()
        self._readings.append(now)
        return now

    def __call__(self, event: Command | StepRecord) -> None:
        readings, self._readings = self._readings, []
        if isinstance(event, StepRecord):
            self._write(StepLine(readings, event.plan, event.tokens))
        else:
            self._write(CommandLine(readings, event))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                print(f"warning: the recording's end is lost: {error.strerror}", file=sys.stderr, flush=True)

    def _write(self, line: Line) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            print(f"warning: recording stopped: {error.strerror}", file=sys.stderr, flush=True)
            self._file = None


def create(path: Path) -> str:
    """An empty file to record into. Raises UsageError."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise UsageError(f"--record {path}: {error.strerror}") from None
    return str(path.resolve())


class _Replayed:
    """The executor and the clock of a replay: the recorded tokens and readings, and the plan that was made."""

    def __init__(self, readings: Iterable[float]) -> None:
        self.readings = deque(readings)
        self.tokens: list[int] = []
        self.plan: Plan | None = None

    def clock(self) -> float:
        """The last one stays: whoever asks more often than before has decided otherwise already."""
        return self.readings.popleft() if len(self.readings) > 1 else self.readings[0]

    def forward(self, plan: Plan) -> None:
        self.plan = plan

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        return self.tokens, []


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found. `different_at`: the line of the first step whose plan came out otherwise, 0 if none did."""

    engines: int
    commands: int
    steps: int
    different_at: int = 0


def read(path: Path) -> list[Line]:
    """The lines of a recording; a last one that is cut off is left out. Raises UsageError, naming file and line."""
    try:
        raw = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    lines: list[Line] = []
    for number, text in enumerate(raw[:-1], 1):
        try:
            lines.append(_decoder.decode(text))
        except (msgspec.DecodeError, UsageError) as error:
            raise UsageError(f"{path}, line {number}: not a line of a recording: {error}") from None
        line = lines[-1]
        if isinstance(line, Header) and line.version != VERSION:
            raise UsageError(f"{path}, line {number}: recording of version {line.version}, expected {VERSION}")
    if not lines or not isinstance(lines[0], Header):
        raise UsageError(f"{path}, line 1: expected the header of a recording")
    return lines


def replay(lines: list[Line], progress: Callable[[int], None] = lambda line: None) -> Replay:
    """Run the commands through a new scheduler and compare every plan with the recorded one."""
    headers = [(i, line) for i, line in enumerate(lines) if isinstance(line, Header)]
    commands = steps = 0
    for (start, header), stop in zip(headers, [*(i for i, _ in headers[1:]), len(lines)], strict=True):
        part = [line for line in lines[start + 1 : stop] if not isinstance(line, Header)]
        replayed = _Replayed(reading for line in part for reading in line.clock)
        # A command that nothing followed has no readings yet: its engine was ended before it could be applied.
        while part and isinstance(part[-1], CommandLine):
            part.pop()
        engine = Engine(Scheduler(header.config, replayed.clock, header.end_token_ids), replayed)
        for number, line in enumerate(part, start + 2):
            progress(number)
            if isinstance(line, CommandLine):
                commands += 1
                engine.admit(line.command)
            else:
                replayed.plan, replayed.tokens = None, line.tokens
                engine.step()
                if replayed.plan != line.plan:
                    return Replay(len(headers), commands, steps, number)
                steps += 1
    return Replay(len(headers), commands, steps)


def run_replay(path: Path, *, as_json: bool) -> int:
    """Returns the exit code: 1 if a plan came out otherwise."""
    lines = read(path)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=len(lines))
        found = replay(lines, lambda line: bar.update(task, completed=line))
    if as_json:
        print(msgspec.json.encode(found).decode())
    elif found.different_at:
        print(f"{path}, line {found.different_at}: another plan than the recorded one, after {found.steps} equal steps")
    else:
        print(f"{found.steps} steps and {found.commands} commands of {found.engines} engine process(es): the same plans")
    return 1 if found.different_at else 0
