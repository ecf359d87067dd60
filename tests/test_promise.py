"""Promise 1 on the default model, at every level this machine has: the same request gives the same bits whatever else runs.

Every comparison is of hashes of whole rows of float32 logits, or of tokens and log-probabilities, with a run of the prompt alone, in one
chunk, without a cache.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from itertools import pairwise

import pytest
from native_driver import GREEDY, Driver

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.plan import Chunk, NewRow, Plan
from headrace.engine.scheduler import Scheduler
from headrace.executors.native import NativeExecutor
from headrace.kernels import native
from headrace.models.hub import default_model_path
from headrace.models.loader import Model, load_model
from headrace.request import SamplingParams, Submit

LEVELS = native.levels()
ANSWER = 5
SEEDED = SamplingParams(max_tokens=1 << 20, temperature=0.9, top_p=0.95, top_k=50)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(default_model_path())


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.use(request.param)
    yield request.param
    native.use(before)


def prompts(count: int, level: str) -> list[list[int]]:
    """Lengths around block and chunk borders. The scalar level, a specification, is hundreds of times slower: short ones there."""
    lengths = [5, 1, 9, 3] if level == "scalar" else [70, 1, 33, 130, 64, 31, 2, 96, 65, 17]
    return [[(i * 7919 + j * 104729 + 11) % 49000 for j in range(lengths[i % len(lengths)])] for i in range(count)]


def alone(model: Model, level: str, count: int, params: SamplingParams) -> tuple[list[list[str]], list[list[int]]]:
    driver = Driver(model)
    hashes, answers = [], []
    for i, prompt in enumerate(prompts(count, level)):
        h, a = driver.run([prompt], answer=ANSWER, params=params, seeds=[i])
        hashes.append(h[0])
        answers.append(a[0])
    return hashes, answers


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_batch_chunk_and_threads(model: Model, level: str, params: SamplingParams) -> None:
    slow = level == "scalar"
    count = 3 if slow else 33
    expected = alone(model, level, count, params)
    assert len({tuple(h) for h in expected[0]}) == count  # different prompts, different logits
    for batch in (2, 3) if slow else (2, 5, 33):
        for chunk, threads in ((1 << 30, 2), (2, 1)) if slow else ((1 << 30, 2), (1 << 30, 1), (7, 2), (32, 2), (50, 1)):
            driver = Driver(model, threads=threads, seed=chunk % 97)
            got = driver.run(prompts(batch, level), chunk=chunk, answer=ANSWER, params=params, seeds=range(batch))
            assert got == (expected[0][:batch], expected[1][:batch]), f"batch {batch}, chunk {chunk}, {threads} threads"


def test_chunk_of_one(model: Model, level: str) -> None:
    expected = alone(model, level, 2, GREEDY)
    assert Driver(model, threads=1).run(prompts(2, level), chunk=1, answer=ANSWER) == expected


@pytest.mark.parametrize("level", [name for name in LEVELS if name != "scalar"], indirect=True)
def test_threads_that_come_late(model: Model, level: str) -> None:
    """Many more threads than cores: some find a stage, or the whole step, done without them."""
    for batch, answer in ((2, 40), (9, 10)):
        expected = Driver(model, threads=1).run(prompts(batch, level), answer=answer)
        for threads in (3, 9):
            assert Driver(model, threads=threads).run(prompts(batch, level), answer=answer) == expected, f"batch {batch}, {threads} threads"


def test_chunks_whose_logits_nobody_wants(model: Model, level: str) -> None:
    """Of one token and of several: what they leave is keys and values, in every layer."""
    prompt = list(range(500, 509))
    expected, _ = Driver(model).run([prompt])
    for cuts in ((1,), (1, 2), (4, 5), (8,)):
        driver = Driver(model)
        plan = Plan(new_rows=[NewRow(0, array("i", prompt).tobytes(), len(prompt), GREEDY, 0, 0, ())], new_blocks=[(0, 0, driver.free[:2])])
        for start, stop in pairwise((0, *cuts, len(prompt))):
            plan.chunks = [Chunk(0, start, stop, len(prompt) - 1 if stop == len(prompt) else stop, False)]
            driver.executor.forward(plan)
            plan = Plan()
        assert driver.hash_rows(driver.executor.logits()) == expected[0][-1:], cuts


def test_prefix_hit(model: Model, level: str) -> None:
    """A second row that starts after blocks which another row computed."""
    if level == "scalar":
        shared = BLOCK_TOKENS
        prompt = list(range(700, 700 + shared + 3))
    else:
        shared = 2 * BLOCK_TOKENS
        prompt = prompts(4, level)[3]
    expected, _ = Driver(model).run([prompt])
    driver = Driver(model)
    driver.run([prompt[:shared]])  # into the blocks it took and gave back
    blocks = driver.free[-(shared // BLOCK_TOKENS) :]
    plan = Plan(chunks=[Chunk(1, shared, len(prompt), shared, False)])
    plan.new_rows.append(NewRow(1, array("i", prompt).tobytes(), len(prompt), GREEDY, 0, 0, ()))
    plan.new_blocks.append((1, 0, blocks + driver.free[:4]))
    driver.executor.forward(plan)
    got = driver.hash_rows(driver.executor.logits())
    assert got == expected[0][shared:]


# The scalar level, a specification, is too slow for this load; what it adds, the scheduler, is above the kernels.
@pytest.mark.parametrize("level", [name for name in LEVELS if name != "scalar"], indirect=True)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_and_sharing_in_a_tiny_pool(model: Model, level: str, params: SamplingParams) -> None:
    """The whole engine: a pool too small for its load preempts; identical prompts share blocks; answers and log-probabilities stay."""
    requests = []
    for i in range(8):
        prompt = prompts(8, level)[(1, 2, 5, 7)[i // 2]][:40]  # pairs of identical prompts, short beside their answers
        p = SamplingParams(
            max_tokens=80, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, logprobs=2, ignore_eos=True
        )
        requests.append(Submit(i, array("i", prompt).tobytes(), p, seed=100 + i, received=0.0))

    def serve(num_blocks: int, batch: int, cache: bool) -> tuple[dict[int, list[object]], int]:
        config = EngineConfig(
            context_length=256, num_blocks=num_blocks, max_batch_size=batch, max_batch_tokens=160, prefix_cache=cache, step_target_s=0
        )
        engine = Engine(Scheduler(config, time.monotonic), NativeExecutor(model, config, 2))
        for request in requests:
            assert engine.apply(request) is None
        tokens: dict[int, list[object]] = {i: [] for i in range(8)}
        preemptions = 0
        while engine.has_work:
            events = engine.step()
            assert events is not None
            for request_id, token, logprob in zip(events.request_ids, events.tokens, events.logprobs, strict=True):
                tokens[request_id].append((token, logprob))
            preemptions = events.stats.preemptions if events.stats else preemptions
        engine.scheduler.pool.check()
        return tokens, preemptions

    expected, none = serve(num_blocks=100, batch=1, cache=False)
    assert none == 0
    assert all(len(answer) == 80 for answer in expected.values())
    for blocks, cache in ((10, True), (10, False), (100, True)):
        got, preemptions = serve(blocks, batch=8, cache=cache)
        assert got == expected, f"{blocks} blocks, cache {cache}"
        assert (preemptions > 0) == (blocks == 10)
