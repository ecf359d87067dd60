"""What travels between the API process and an engine process: typed msgpack in length-prefixed frames over a socketpair.

A frame is four bytes of length (little end first) and one message. `request.py` has the commands and the events; here are the greeting
and what follows from it. Nothing is ever pickled, so neither side can make the other run code.
"""

from __future__ import annotations

import msgspec

from headrace.errors import HeadraceError, MemoryBudgetExceeded, ModelError, UnsupportedModel, UsageError
from headrace.request import PROTOCOL_VERSION, Abort, StepEvents, Submit

MAX_FRAME_BYTES = 1 << 28  # a merged message of a long stall; anything longer is a broken peer


class EngineSettings(msgspec.Struct, frozen=True):
    """What an engine process is started with: all a restarted one needs. 0 and "" leave the choice to it."""

    model: str  # path of a GGUF file or a model folder
    level: str = "auto"
    threads: int = 0
    memory: str = ""  # budget, as a person writes it: 2GiB, 60%
    context_length: int = 0  # tokens, prompt and answer together
    max_batch_size: int = 256
    max_batch_tokens: int = 512
    step_target_s: float = 0.2
    itl_target_s: float = 0.0
    policy: str = "shortest"
    batching: str = "continuous"
    kv_reservation: str = "paged"
    prefix_cache: bool = True
    max_waiting: int = 1024
    secret: bytes = b""  # keys the prefix index
    record: str = ""  # path of a file to append every decision to


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First frame of the API process. What an earlier engine process found out is given to the next, which then is its equal."""

    protocol: int
    settings: EngineSettings
    manifest: bytes = b""  # of the packed weights that lie in the shared descriptor already; none yet
    num_blocks: int = 0  # 0: as the memory budget allows


class Planned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The memory ledger, told before anything is loaded: (purpose, bytes, remark)."""

    rows: list[tuple[str, int, str]]
    text: str = ""  # the same for people


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Told by an engine process whose model is loaded."""

    protocol: int
    context_length: int  # tokens, prompt and answer together
    num_blocks: int
    block_tokens: int
    vocab_size: int
    level: str = ""
    isa: str = ""
    threads: int = 0
    manifest: bytes = b""


class Fatal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Last frame of an engine process that cannot go on. `kind` names a class of headrace.errors where the text may be shown."""

    kind: str
    message: str


_FATAL_KINDS: dict[str, type[HeadraceError]] = {
    "UsageError": UsageError,
    "ModelError": ModelError,
    "UnsupportedModel": UnsupportedModel,
    "MemoryBudgetExceeded": MemoryBudgetExceeded,
}


def fatal_error(fatal: Fatal) -> HeadraceError:
    """The exception an engine process ended with, as the same class when it is one a person can act upon."""
    kind = _FATAL_KINDS.get(fatal.kind, HeadraceError)
    error = kind.__new__(kind)
    Exception.__init__(error, fatal.message)
    return error


_encoder = msgspec.msgpack.Encoder()
command_decoder: msgspec.msgpack.Decoder[Hello | Submit | Abort] = msgspec.msgpack.Decoder(Hello | Submit | Abort)
event_decoder: msgspec.msgpack.Decoder[Planned | Ready | Fatal | StepEvents] = msgspec.msgpack.Decoder(Planned | Ready | Fatal | StepEvents)


class ProtocolError(HeadraceError):
    """The peer speaks another version, or not this protocol at all."""


def check_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(f"the other process speaks protocol {theirs}, expected {PROTOCOL_VERSION}: two versions of headrace are mixed")


def frame(message: msgspec.Struct) -> bytes:
    """One message as it goes over the wire."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    buffer[:4] = (len(buffer) - 4).to_bytes(4, "little")
    return bytes(buffer)


class Frames:
    """Cuts a byte stream into messages; keeps what is incomplete."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The complete messages in what has come so far. Raises ProtocolError on an impossible length."""
        buffer = self._buffer + data if self._buffer else data
        messages: list[bytes] = []
        start, end = 0, len(buffer)
        while end - start >= 4:
            length = int.from_bytes(buffer[start : start + 4], "little")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
            if end - start - 4 < length:
                break
            messages.append(buffer[start + 4 : start + 4 + length])
            start += 4 + length
        self._buffer = buffer[start:]
        return messages
