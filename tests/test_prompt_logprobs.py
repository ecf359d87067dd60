"""Log-probabilities of prompts, and prompts that answers begin with: the kernels, the policy above them, and the endpoints."""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np
import pytest
from engine_oracle import World
from engine_oracle import submit as simulated_submit
from golden_runs import GOLDEN, TINY, golden
from native_driver import Driver
from scripted_engine import ServerProcess

from headrace.config import SCORED_ROWS, EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.scheduler import Scheduler
from headrace.executors.native import NativeExecutor
from headrace.kernels import native
from headrace.models.hub import default_model_path
from headrace.models.loader import Model, load_model
from headrace.request import SamplingParams, StepEvents, Submit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BEST = 4


# The kernels


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(default_model_path())


class Scores:
    """What was told of a prompt, as arrays over its tokens but the first."""

    def __init__(self, num_prompt: int, best: int) -> None:
        self.count, self.best = num_prompt - 1, best
        self.logprobs, self.ranks = np.full(self.count, np.nan, np.float32), np.zeros(self.count, np.int32)
        self.ids, self.values = np.zeros((self.count, best), np.int32), np.full((self.count, best), np.nan, np.float32)

    def add(self, told: Any) -> None:
        rows = slice(told.first - 1, told.first - 1 + len(told.logprobs) // 4)
        self.logprobs[rows] = np.frombuffer(told.logprobs, np.float32)
        self.ranks[rows] = np.frombuffer(told.ranks, np.int32)
        self.ids[rows] = np.frombuffer(told.top_ids, np.int32).reshape(-1, self.best)
        self.values[rows] = np.frombuffer(told.top_logprobs, np.float32).reshape(-1, self.best)

    def bits(self) -> bytes:
        assert not np.isnan(self.logprobs).any()
        return b"".join(each.tobytes() for each in (self.logprobs, self.ranks, self.ids, self.values))


def request(request_id: int, prompt: list[int], best: int = BEST, max_tokens: int = 4, **more: Any) -> Submit:
    params = SamplingParams(max_tokens, temperature=0.0, prompt_logprobs=best, ignore_eos=True)
    return Submit(request_id, array("i", prompt).tobytes(), params, 1, 0.0, **more)


def serve(model: Any, requests: list[Submit], **settings: Any) -> tuple[dict[int, Scores], dict[int, list[int]], int]:
    """Scores and answers (of the first sample) of requests that run together, and the tokens taken from the cache."""
    config = EngineConfig(**{"context_length": 256, "num_blocks": 100, "max_batch_size": 8, "step_target_s": 0} | settings)
    executor = NativeExecutor(model, config, 2)
    engine = Engine(Scheduler(config, time.monotonic), executor, scorer=executor)
    scores = {each.request_id: Scores(len(each.prompt) // 4, max(0, each.params.prompt_logprobs)) for each in requests}
    answers: dict[int, list[int]] = {each.request_id: [] for each in requests}

    def hear(events: StepEvents | None) -> None:
        if events is not None:
            assert not events.refused
            for request_id, told in events.prompts:
                scores[request_id].add(told)
            for request_id, sample, token in zip(events.request_ids, events.samples, events.tokens, strict=True):
                answers[request_id] += [token] * (sample == 0)

    for each in requests:
        hear(engine.apply(each))
    while engine.has_work:
        hear(engine.step())
        engine.scheduler.check()
    return scores, answers, engine.scheduler.tally.cached_tokens


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 7919 + i * 104729 + 11) % 49000 for i in range(length)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("level", native.levels())
def test_they_are_those_of_the_logits(model: Model, level: str) -> None:
    before = native.level()
    native.use(level)
    try:
        prompt = prompt_of(9 if level == "scalar" else 90)
        scores, _, _ = serve(model, [request(1, prompt, max_tokens=1)])
        logits = Driver(model).logits(prompt)[:-1]
    finally:
        native.use(before)
    found, rows, next_ids = scores[1], np.arange(len(prompt) - 1), np.array(prompt[1:])
    expected = log_softmax(logits)
    assert np.abs(found.logprobs - expected[rows, next_ids]).max() < 2e-5
    assert (found.ranks == 1 + (logits > logits[rows, next_ids][:, None]).sum(axis=1)).all()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :BEST]
    assert (found.ids == order).all()
    assert np.abs(found.values - np.take_along_axis(expected, order, axis=1)).max() < 2e-5


@pytest.mark.parametrize("name", TINY)
def test_they_are_transformers_own(name: str) -> None:
    """As near as the logits are (tests/test_golden_tiny.py)."""
    expected = golden(f"tiny/{name}/logits")
    ids = expected["ids"].tolist()
    scores, _, _ = serve(load_model(GOLDEN / "tiny" / name, "bf16"), [request(1, ids, max_tokens=1)], max_batch_tokens=40)
    theirs = log_softmax(expected["logits"])[np.arange(len(ids) - 1), ids[1:]]
    sigma = np.asarray(expected["sigma"])[: len(ids) - 1]
    assert (np.abs(scores[1].logprobs - theirs) < 6 * sigma).all()


def test_the_same_bits_however_a_prompt_is_cut(model: Model) -> None:
    """Alone or beside others, in small chunks, beside requests with the same prompts, in a pool too small for all; and the answers stay."""
    prompts = [prompt_of(length, salt) for salt, length in enumerate((1, 2, 33, 64, 65, 66, 150))]
    expected, answers = {}, {}
    for i, prompt in enumerate(prompts):
        scores, alone, _ = serve(model, [request(i, prompt)], max_batch_tokens=512)
        expected[i], answers[i] = scores[i].bits(), alone[i]
    together = [request(i, prompt) for i, prompt in enumerate(prompts)]
    plain = [request(100 + i, prompt, best=-1) for i, prompt in enumerate(prompts)]
    for settings in ({"max_batch_tokens": 512}, {"max_batch_tokens": 23}, {"max_batch_tokens": 7, "max_batch_size": 3}, {"num_blocks": 9}):
        for requests in (together, [*plain, *together], [*together, *plain]):
            scores, found, _ = serve(model, requests, **settings)
            for i in range(len(prompts)):
                assert scores[i].bits() == expected[i], (settings, i)
                assert found[i] == answers[i]
            assert all(found[100 + i] == answers[i] for i in range(len(prompts)) if len(requests) > len(prompts))


def test_what_is_scored_comes_from_no_cache_and_goes_into_it(model: Model) -> None:
    prompt = prompt_of(100)
    _, _, cached = serve(model, [request(1, prompt), request(2, prompt)], max_batch_size=1)
    assert cached == 0
    _, _, cached = serve(model, [request(1, prompt), request(2, prompt, best=-1)], max_batch_size=1)
    assert cached == 96  # its whole blocks


def test_the_samples_of_a_request_share_a_prompt_that_is_scored_once(model: Model) -> None:
    scores, _, _ = serve(model, [request(1, prompt_of(70), num_samples=3)])
    alone, _, _ = serve(model, [request(1, prompt_of(70))])
    assert scores[1].bits() == alone[1].bits()


# The policy


def test_a_step_makes_a_bounded_number_of_rows() -> None:
    """However many prompts want them; each gets on in turn, and those that want none are not held up."""
    config = EngineConfig(context_length=512, num_blocks=600, max_batch_size=8, max_batch_tokens=512, step_target_s=0, policy="fcfs")
    world = World(config)
    for i in range(3):
        world.submit(simulated_submit(i, [i] * 200, prompt_logprobs=2))
    world.submit(simulated_submit(3, [3] * 200))
    world.finish()
    first = world.plans[0]
    assert [chunk.num_tokens for chunk in first.chunks] == [SCORED_ROWS, 200]
    most = max(sum(chunk.stop - chunk.logits_start for chunk in plan.chunks) for plan in world.plans)
    assert most <= SCORED_ROWS + 8
    assert len(world.plans) < 3 * 200 / SCORED_ROWS + 8


@pytest.mark.parametrize("restart_after", [1, 2, 3, 5])
def test_a_restarted_engine_tells_the_same(restart_after: int) -> None:
    """What had been told before is told again: World compares."""
    world = World(EngineConfig(context_length=256, num_blocks=100, max_batch_tokens=32, step_target_s=0))
    for i in range(2):
        world.submit(simulated_submit(i, [i] * 70, 10, prompt_logprobs=1, num_samples=2))
    for _ in range(restart_after):
        world.step()
    world.restart()
    world.finish()


# The endpoints


def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": chr(token)}


def test_prompt_logprobs_of_a_completion(server: ServerProcess) -> None:
    body = server.complete(["abc", "x"], prompt_logprobs=2, n=2)
    a, b, c = ord("a"), ord("b"), ord("c")
    expected = [
        None,
        {str(b): entry(b, -0.125, 2), str(b + 1): entry(b + 1, 0.0, 1)},
        {str(c): entry(c, -0.25, 2), str(c + 1): entry(c + 1, -0.125, 1)},
    ]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected, [None], [None]]
    assert [choice["text"] for choice in body["choices"]] == ["abc", "abc", "x", "x"]
    assert list(expected[1] or ()) == [str(b), str(a + 2)]
    assert "prompt_logprobs" not in server.complete("abc")["choices"][0]


def test_prompt_logprobs_of_a_chat(server: ServerProcess) -> None:
    _, body = server.post(CHAT, {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 0, "temperature": 0})
    assert body["prompt_logprobs"] == [None, {str(ord("b")): entry(ord("b"), -0.125, 1)}]
    assert body["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo(server: ServerProcess, logprobs: int | None) -> None:
    """The prompt's text in front, streamed or whole, its tokens in `logprobs`; a stop string in it stops nothing."""
    body = {"prompt": ["héy 1", "no"], "echo": True, "logprobs": logprobs, "n": 2, "temperature": 0, "stop": "1", "max_tokens": 100}
    whole = server.complete(body.pop("prompt"), **body)["choices"]
    assert [choice["text"] for choice in whole] == ["héy 1héy "] * 2 + ["nono"] * 2
    streamed: dict[int, list[Any]] = {}
    for event in server.stream(COMPLETIONS, body | {"prompt": ["héy 1", "no"]}):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).append(choice)
    for choice in whole:
        pieces = streamed[choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name, values in choice["logprobs"].items():
            assert [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]] == values
    if logprobs is None:
        return
    found = whole[2]["logprobs"]
    assert found["tokens"] == ["n", "o", "n", "o", "<|im_end|>"]
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    assert found["token_logprobs"] == [None, -0.125, -0.25, -0.25, -0.25]
    assert found["top_logprobs"][:2] == [None, {"o": -0.125} | ({"p": 0.0} if logprobs else {})]
    assert whole[0]["logprobs"]["text_offset"][:7] == [0, 1, 1, 2, 3, 4, 5]


def test_both_at_once_each_with_its_own_number(server: ServerProcess) -> None:
    (choice,) = server.complete("ab", echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [3]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


def test_an_echo_is_cut_as_the_prompt_is(server: ServerProcess) -> None:
    assert server.complete("hello", echo=True, truncate_prompt_tokens=2)["choices"][0]["text"] == "lolo"
    assert server.complete([104, 105], echo=True, max_tokens=1)["choices"][0]["text"] == "hih"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": ["x" * 1000] * 4, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": "x" * 1000, "echo": True, "logprobs": 5, "n": 20}, "logprobs"),
    ],
    ids=str,
)
def test_what_is_refused(server: ServerProcess, more: dict[str, Any], param: str) -> None:
    status, body = server.post(COMPLETIONS, {"prompt": "x"} | more)
    assert (status, body["error"]["param"]) == (400, param)
