"""The two protocols without a socket: OpenAI's fields, and the frames between the processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, InvalidRequest, ModelError, RequestError, UnsupportedParameter
from headrace.request import PROTOCOL_VERSION, Abort, SamplingParams, StepEvents, Submit, TokenLogprob
from headrace.server import protocol
from headrace.server.channel import Channel, PeerGone, expect_hello, merge
from headrace.server.formats import ChatFormat, CompletionFormat, event
from headrace.server.messages import (
    MAX_FRAME_BYTES,
    EngineSettings,
    Fatal,
    Frames,
    Hello,
    ProtocolError,
    Ready,
    check_version,
    command_decoder,
    event_decoder,
    fatal_error,
    frame,
)
from headrace.server.metrics import Histogram
from headrace.server.wire import MAX_QUEUED_BYTES, SlowReader, Wire

LIMITS = protocol.Limits(vocab_size=1000, context_length=100)


def parse(**fields: Any) -> protocol.CompletionRequest:
    return protocol.parse_completion(json.dumps({"prompt": "x"} | fields).encode())


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


# Every honoured field, a good value, and what it becomes.
HONOURED: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, 0.5), "top_p": (0.25, 0.25), "top_k": (7, 7), "min_p": (0.125, 0.125), "presence_penalty": (-2, -2.0),
    "frequency_penalty": (2, 2.0), "repetition_penalty": (1.5, 1.5), "logit_bias": ({"9": -100, "3": 1.5}, ((3, 1.5), (9, -100.0))),
    "min_tokens": (4, 4), "stop_token_ids": ([5, 2, 5], (2, 5)), "ignore_eos": (True, True),
    "prompt_logprobs": (3, 3), "allowed_token_ids": ([5, 2, 5], ids(2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("field", HONOURED)
def test_honoured_fields_arrive(field: str) -> None:
    value, becomes = HONOURED[field]
    neutral = protocol.sampling_params(parse(), LIMITS, 16, -1)
    assert neutral == SamplingParams(max_tokens=16)
    changed = protocol.sampling_params(parse(**{field: value}), LIMITS, 16, -1)
    assert getattr(changed, field) == becomes
    assert msgspec.structs.replace(changed, **{field: getattr(neutral, field)}) == neutral
    assert protocol.sampling_params(parse(**{field: None}), LIMITS, 16, -1) == neutral


def test_every_field_is_in_a_table() -> None:
    """A field is honoured by name, harmless, or refused: never two of them, and `SamplingParams` has none we forgot."""
    of_completions = {*protocol.REFUSED, *protocol.REFUSED_IN_COMPLETIONS}
    for struct, refused in ((protocol.ChatRequest, {*protocol.REFUSED}), (protocol.CompletionRequest, of_completions)):
        honoured = set(struct.__struct_fields__)
        assert not honoured & refused
        assert not honoured & set(protocol.HARMLESS)
        assert not refused & set(protocol.HARMLESS)
        assert set(SamplingParams.__struct_fields__) - {"grammar", "embed"} <= honoured  # of several fields, and of a route


@pytest.mark.parametrize("field", protocol.REFUSED | protocol.REFUSED_IN_COMPLETIONS)
def test_refused_fields(field: str) -> None:
    neutral = (protocol.REFUSED | protocol.REFUSED_IN_COMPLETIONS)[field]
    for value in (None, *neutral):
        parse(**{field: value})
    with pytest.raises(UnsupportedParameter) as refused:
        parse(**{field: "something else"})
    assert refused.value.param == field


def test_true_is_not_one() -> None:
    with pytest.raises(UnsupportedParameter):
        parse(length_penalty=True)
    with pytest.raises(UnsupportedParameter):
        parse(use_beam_search=0)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_error(data: bytes) -> None:
    for read in (protocol.parse_chat, protocol.parse_completion):
        with contextlib.suppress(RequestError):
            read(data)


ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    [],
    [[]],
    [1],
    ["a"],
    [1, "a"],
    [[1]],
    {},
    {"1": 1},
]


@given(st.dictionaries(st.sampled_from([*protocol.CompletionRequest.__struct_fields__, "other"]), st.sampled_from(ODD), max_size=4))
def test_any_json_is_a_request_or_an_error(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest, UnsupportedParameter):
        request = parse(**fields)
        protocol.completion_prompts(request, 1000)
        protocol.stop_strings(request)
        protocol.num_samples(request)
        protocol.sampling_params(request, LIMITS, 16, -1)


def test_seeds() -> None:
    assert protocol.draw_seed(parse(seed=5)) == 5
    assert protocol.draw_seed(parse(seed=-1)) == 2**64 - 1
    drawn = {protocol.draw_seed(parse()) for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.parametrize("text", ["plain", 'quote " and \\', "\x00\x1f\u2028 é 😀", "</script>"])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("with_usage", [False, True])
def test_edges_make_the_same_chunk(text: str, kind: Any, with_usage: bool) -> None:
    fmt = kind("00ff", 1, 'a "model" é', with_usage=with_usage)
    head, tail = fmt.edges(3)
    assert head + msgspec.json.encode(text) + tail == event(fmt.piece(3, text))
    assert ("usage" in json.loads((head + b'""' + tail)[6:])) is with_usage


# Frames


def events(**columns: Any) -> StepEvents:
    empty: dict[str, Any] = {
        name: [] for name in ("request_ids", "samples", "tokens", "logprobs", "admitted", "finished", "stalled", "refused")
    }
    return StepEvents(time=1.5, **(empty | columns))


def test_messages_survive_the_wire() -> None:
    submit = Submit(
        7, b"\1\0\0\0", SamplingParams(3, stop_token_ids=(1, 2), logit_bias=((1, -0.5),)), 2**64 - 1, 1.0, 2, (b"", b"\2\0\0\0")
    )
    hello = Hello(PROTOCOL_VERSION, EngineSettings(model="m", secret=b"\xff\0"), b"{}", 5)
    for command in (submit, Abort(9), hello):
        assert command_decoder.decode(frame(command)[4:]) == command
    logprob = TokenLogprob(-0.5, (1,), (-0.5,))
    for told in (
        Ready(1, 2, 3, 4, 5, isa="x"),
        Fatal("ModelError", "m"),
        events(request_ids=[1], samples=[0], tokens=[5], logprobs=[logprob]),
    ):
        assert event_decoder.decode(frame(told)[4:]) == told
    with pytest.raises(msgspec.DecodeError):
        command_decoder.decode(frame(Ready(1, 2, 3, 4, 5))[4:])


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_frames_come_out_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(message).to_bytes(4, "little") + message for message in messages)
    frames = Frames()
    got: list[bytes] = []
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, stop in pairwise(edges):
        got += frames.feed(stream[start:stop])
    assert got == messages


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ProtocolError):
        Frames().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="two versions"):
        check_version(PROTOCOL_VERSION + 1)


def test_fatal_errors_keep_their_kind() -> None:
    error = fatal_error(Fatal("ModelError", "file: field: problem"))
    assert type(error) is ModelError
    assert str(error) == "file: field: problem"
    assert type(fatal_error(Fatal("KeyError", "x"))) is HeadraceError


def test_merged_events() -> None:
    logprob = TokenLogprob(-1.0, (), ())
    first = events(request_ids=[1, 2], samples=[0, 0], tokens=[5, 6], finished=[(1, 0, "stop")])
    second = events(request_ids=[2], samples=[0], tokens=[7], logprobs=[logprob], admitted=[(3, 1.0, 0)], stalled=[(2, 0.5)])
    second.time = 2.5
    both = merge(first, second)
    assert (both.tokens, both.logprobs) == ([5, 6, 7], [None, None, logprob])
    assert (both.time, both.finished, both.admitted, both.stalled) == (2.5, [(1, 0, "stop")], [(3, 1.0, 0)], [(2, 0.5)])
    assert merge(both, events(request_ids=[2], samples=[0], tokens=[8])).logprobs == [None, None, logprob, None]


def test_a_stalled_reader_stalls_no_engine() -> None:
    """Far more than the socket takes is published without waiting; all of it arrives, in order, in fewer messages."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    steps = 20_000
    for i in range(steps):
        channel.publish(events(request_ids=[1, 2], samples=[0, 0], tokens=[i, -i]))
    assert channel.has_unsent
    got: list[int] = []
    messages = 0

    def read() -> None:
        nonlocal messages
        frames = Frames()
        while len(got) < 2 * steps:
            for message in frames.feed(ours.recv(1 << 16)):
                told = event_decoder.decode(message)
                assert isinstance(told, StepEvents)
                got.extend(told.tokens)
                messages += 1
        ours.sendall(frame(Abort(5)))

    reader = threading.Thread(target=read)
    reader.start()
    assert channel.receive(wait=True) == [Abort(5)]  # what is unsent leaves while the engine waits for work
    reader.join()
    assert got == [token for i in range(steps) for token in (i, -i)]
    assert messages < steps
    assert not channel.has_unsent
    assert channel.receive(wait=False) == []
    ours.close()
    with pytest.raises(PeerGone):
        channel.receive(wait=True)
    theirs.close()


def test_commands_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    data = frame(Abort(1)) + frame(Abort(2))
    ours.sendall(data[:9])
    assert channel.receive(wait=False) in ([], [Abort(1)])
    rest = threading.Timer(0.05, ours.sendall, [data[9:]])
    rest.start()
    got = channel.receive(wait=True)
    assert got[-1] == Abort(2)
    rest.join()
    ours.sendall(frame(Abort(3)))
    with pytest.raises(ProtocolError, match="Hello"):
        expect_hello(channel)
    ours.close()
    theirs.close()


def test_histogram() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert (histogram.count, histogram.total) == (4, 12.0)


def test_wire_keeps_order_through_a_pause() -> None:
    """`send` waits at some point: what is written meanwhile follows in order, and no more than the limit is kept."""

    async def main() -> None:
        room = asyncio.Event()
        room.set()
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            await room.wait()
            sent.append(message.get("body", b"start"))

        wire = Wire(send)
        wire.start(200, [])
        wire.write(b"1")
        assert sent == [b"start", b"1"]
        room.clear()
        for i in range(2, 6):
            wire.write(b"%d" % i)
        with pytest.raises(SlowReader):
            wire.write(bytes(MAX_QUEUED_BYTES + 1))
        assert sent == [b"start", b"1"]
        room.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert sent == [b"start", b"1", b"2", b"3", b"4", b"5"]
        wire.write(b"6")
        assert sent[-1] == b"6"

    asyncio.run(main())
