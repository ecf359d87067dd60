"""Embeddings: the kernels with the engine above them, and the endpoint."""

from __future__ import annotations

import time
from array import array
from base64 import b64decode
from typing import Any

import golden_runs
import numpy as np
import openai
import pytest
from golden_runs import GOLDEN, TINY, golden
from scripted_engine import ServerProcess

from headrace.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.scheduler import Scheduler
from headrace.executors import interpreter
from headrace.executors.native import NativeExecutor
from headrace.models.hub import default_model_path
from headrace.models.loader import Model, load_model
from headrace.request import Embedding, SamplingParams, Submit


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(default_model_path())


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 7919 + i * 104729 + 11) % 49000 for i in range(length)]


def embed(model: Any, prompts: list[list[int]], others: list[Submit] | None = None, **settings: Any) -> tuple[list[bytes], int]:
    """The vectors of prompts that run together, and the tokens taken from the cache."""
    config = EngineConfig(**{"context_length": 256, "num_blocks": 100, "max_batch_size": 8, "step_target_s": 0} | settings)
    executor = NativeExecutor(model, config, 2)
    engine = Engine(Scheduler(config, time.monotonic), executor, scorer=executor)
    params = SamplingParams(1, temperature=0.0, embed=True)
    for each in others or ():
        engine.apply(each)
    for i, prompt in enumerate(prompts):
        engine.apply(Submit(i, array("i", prompt).tobytes(), params, 1, 0.0))
    vectors: dict[int, bytes] = {}
    while engine.has_work:
        events = engine.step()
        assert events is not None
        for request_id, told in events.prompts:
            if isinstance(told, Embedding):
                assert request_id not in vectors
                vectors[request_id] = told.vector
        engine.scheduler.check()
    return [vectors[i] for i in range(len(prompts))], engine.scheduler.tally.cached_tokens


@pytest.mark.parametrize("name", TINY)
def test_embeddings_are_the_mean_of_what_the_head_is_given(name: str) -> None:
    """Against float64; the bf16 level's rounding turns a vector by little, and that of the last token alone is another one."""
    config, weights = golden_runs.canonical(name)
    ids = golden(f"tiny/{name}/logits")["ids"].tolist()
    hidden = interpreter.hidden(config, weights, ids)
    expected = hidden.mean(axis=0) / np.linalg.norm(hidden.mean(axis=0))
    (vector,), _ = embed(load_model(GOLDEN / "tiny" / name, "bf16"), [ids], max_batch_tokens=40)
    found = np.frombuffer(vector, np.float32)
    assert len(found) == config.hidden_size
    assert abs(np.linalg.norm(found.astype(np.float64)) - 1) < 1e-6
    assert found @ expected > 0.9999
    assert found @ (hidden[-1] / np.linalg.norm(hidden[-1])) < 0.999


def test_embeddings_have_the_same_bits_however_a_prompt_is_cut(model: Model) -> None:
    prompts = [prompt_of(length, salt) for salt, length in enumerate((1, 2, 33, 64, 65, 150))]
    expected = [embed(model, [prompt])[0][0] for prompt in prompts]
    assert len(set(expected)) == len(prompts)
    others = [
        Submit(100 + i, array("i", prompt).tobytes(), SamplingParams(4, temperature=0.0, prompt_logprobs=i % 3 - 1), 1, 0.0)
        for i, prompt in enumerate(prompts)
    ]
    for settings in ({"max_batch_tokens": 512}, {"max_batch_tokens": 23}, {"max_batch_tokens": 7, "max_batch_size": 3}, {"num_blocks": 9}):
        for beside in ([], others):
            found, cached = embed(model, prompts, beside, **settings)
            assert found == expected, settings
            assert beside or not cached


# The endpoint


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("ab", [[2, 97, 98]]),
        (["ab", "c"], [[2, 97, 98], [1, 99, 99]]),
        ([7, 8, 9], [[3, 7, 9]]),
        ([[7, 8, 9], [5]], [[3, 7, 9], [1, 5, 5]]),
    ],
    ids=str,
)
def test_the_embeddings_endpoint(server: ServerProcess, given: Any, vectors: list[list[int]]) -> None:
    status, body = server.post("/v1/embeddings", {"input": given, "model": "scripted"})
    assert status == 200, body
    assert (body["object"], body["model"]) == ("list", "scripted")
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", i) for i in range(len(vectors))]
    assert [each["embedding"] for each in body["data"]] == [[*vector, 0.5] for vector in vectors]
    tokens = sum(vector[0] for vector in vectors)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    _, packed = server.post("/v1/embeddings", {"input": given, "encoding_format": "base64"})
    assert [list(array("f", b64decode(each["embedding"]))) for each in packed["data"]] == [each["embedding"] for each in body["data"]]


def test_embeddings_by_the_official_client(server: ServerProcess) -> None:
    """Which asks for base64 by itself."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model="scripted", input=["hello", "x"])
    assert [each.embedding for each in found.data] == [[5, ord("h"), ord("o"), 0.5], [1, ord("x"), ord("x"), 0.5]]
    assert found.usage.total_tokens == 6


def test_embeddings_are_counted_as_what_they_are(server: ServerProcess) -> None:
    before = [server.metric(name) for name in ("generation_tokens_total", "prompt_tokens_total")]
    asked = server.metric("requests_total", endpoint="embeddings")
    server.post("/v1/embeddings", {"input": ["abc", "de"], "truncate_prompt_tokens": 2})
    assert server.metric("requests_total", endpoint="embeddings") == asked + 1
    assert [server.metric(name) for name in ("generation_tokens_total", "prompt_tokens_total")] == [before[0], before[1] + 4]


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"dimensions": 2}, "unsupported_parameter", "dimensions"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["a"] * 257}, "invalid_value", "input"),
        ({"input": "x" * 3000}, "context_length_exceeded", "input"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
    ids=str,
)
def test_embeddings_that_are_refused(server: ServerProcess, more: dict[str, Any], code: str, param: str) -> None:
    status, body = server.post("/v1/embeddings", {"input": "x"} | more)
    assert (status, body["error"]["code"], body["error"]["param"]) == (404 if param == "model" else 400, code, param)
