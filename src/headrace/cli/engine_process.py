"""The engine process of a real model: `python -m headrace.cli.engine_process --socket FD --weights FD`, started by the server.

In order: read the file's header, tell the memory ledger or refuse, pack the weights into shared memory (or map what an earlier process
packed), wire executor, scheduler and engine, run them once, and serve.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headrace import machine
from headrace.cli.recording import Recorder
from headrace.config import BLOCK_TOKENS, KV_LEVEL, NUMERICS_VERSION, EngineConfig, Level, Policy
from headrace.engine import faults
from headrace.engine.loop import Engine
from headrace.engine.prefix import PrefixHasher
from headrace.engine.scheduler import Scheduler
from headrace.errors import UsageError
from headrace.executors.grammars import GrammarRows, Matcher
from headrace.request import PROTOCOL_VERSION, SamplingParams, Submit
from headrace.server import engine_process
from headrace.server.messages import EngineSettings, Hello, Planned, Ready

if TYPE_CHECKING:
    from headrace.models.ledger import Ledger
    from headrace.models.loader import Model

_WARM_UP_TOKENS = 40  # more than a block, so that every kernel has run once


def memory_budget(text: str) -> int:
    """Bytes this process and the API process may take together. Raises UsageError."""
    from headrace.models.ledger import default_budget, parse_bytes

    memory = machine.memory()
    return parse_bytes(text, memory.limit) if text else default_budget(memory.limit, memory.available)


def choose_context(settings: EngineSettings, model_context: int) -> int:
    """The context length to serve. Raises UsageError for more than the model has."""
    if settings.context_length > model_context:
        raise UsageError(f"--context: expected at most the model's {model_context} tokens, got {settings.context_length}")
    return settings.context_length or model_context


def engine_config(settings: EngineSettings, context_length: int, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        context_length=context_length,
        num_blocks=num_blocks,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        step_target_s=settings.step_target_s,
        itl_target_s=settings.itl_target_s,
        policy=cast("Policy", settings.policy),
        batching=cast("Any", settings.batching),
        kv_reservation=cast("Any", settings.kv_reservation),
        prefix_cache=settings.prefix_cache,
        max_waiting=settings.max_waiting,
    )


def load(hello: Hello, weights_fd: int, tell: Callable[[Planned], None]) -> tuple[Model, bytes, Ledger | None]:
    """The model, its manifest if the weights are shared, and the ledger if this is the first engine process."""
    from headrace.models import arena, ledger, loader

    settings = hello.settings
    if hello.manifest:
        return loader.attach(weights_fd, msgspec.json.decode(hello.manifest)), hello.manifest, None
    with loader.prepare(settings.model, cast("Level", settings.level)) as prepared:
        shape = prepared.config
        context = choose_context(settings, shape.context_length)
        plan = ledger.plan_memory(
            shape,
            weights=prepared.nbytes,
            budget=memory_budget(settings.memory),
            max_batch_size=settings.max_batch_size,
            context_length=context,
            activations=ledger.estimate_activations(shape, settings.max_batch_tokens, settings.max_batch_size, context),
        )
        tell(Planned(plan.rows(), str(plan)))
        if weights_fd >= 0 and arena.shared_huge_pages():
            os.ftruncate(weights_fd, arena.rounded(prepared.nbytes))
            model = prepared.load(arena.Arena(weights_fd, prepared.nbytes, writable=True))
            return model, msgspec.json.encode(model.manifest()), plan
        # Without huge pages shared weights would be read at two thirds of the speed: a restart packs again instead.
        return prepared.load(arena.Arena.private(prepared.nbytes)), b"", plan


def prefix_scope(model: Model) -> tuple[str, ...]:
    """Everything that keys and values depend on beside the tokens: what the root of the prefix index is made from."""
    from headrace.kernels import native

    return (f"numerics {NUMERICS_VERSION}", f"isa {native.level()}", f"model {model.digest}", f"weights {model.level}", f"kv {KV_LEVEL}")


def build(hello: Hello, weights_fd: int, tell: Callable[[Planned], None]) -> tuple[engine_process.EngineLike, Ready]:
    """Raises HeadraceError."""
    from headrace.executors.native import NativeExecutor
    from headrace.kernels import native

    fault = faults.parse(os.environ.get(faults.ENVIRONMENT, ""))
    settings = hello.settings
    threads = settings.threads or machine.threads()
    model, manifest, plan = load(hello, weights_fd, tell)
    shape = model.config
    context = choose_context(settings, shape.context_length)
    num_blocks = hello.num_blocks or (plan.num_blocks if plan is not None else 0)
    config = engine_config(settings, context, num_blocks)
    executor = NativeExecutor(cast("Any", model), config, threads)
    recorder = Recorder(settings.record, config, model.end_token_ids) if settings.record else None
    clock = recorder.clock if recorder is not None else time.monotonic
    scheduler = Scheduler(config, clock, model.end_token_ids, PrefixHasher(prefix_scope(model), settings.secret))
    masks = grammars(str(model.path), shape.vocab_size, model.end_token_ids)
    engine = Engine(scheduler, executor, masks, recorder, scorer=executor)
    warm_up(engine, shape.vocab_size, context)
    ready = Ready(
        PROTOCOL_VERSION, context, num_blocks, BLOCK_TOKENS, shape.vocab_size, model.level, str(native.level()), threads, manifest=manifest
    )
    restarted = hello.num_blocks > 0
    return faults.inject(fault, engine, restarted), ready


def grammars(path: str, vocab_size: int, end_ids: tuple[int, ...]) -> GrammarRows:
    """What follows the grammars of requests. The libraries and the vocabulary are loaded when the first one comes."""

    @cache
    def compiler() -> Callable[[str], Matcher]:
        from headrace.text.grammar import Compiler
        from headrace.text.tokenizer import load_tokenizer

        return Compiler(lambda: load_tokenizer(path), vocab_size, end_ids)

    def compile_grammar(grammar: str) -> Matcher:
        return compiler()(grammar)

    return GrammarRows(compile_grammar, vocab_size)


def warm_up(engine: Engine, vocab_size: int, context: int) -> None:
    """A short request of our own, so that the first client does not pay for first touches."""
    prompt = array("i", [i % vocab_size for i in range(min(_WARM_UP_TOKENS, context - 2))])
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.apply(Submit(0, prompt.tobytes(), params, 0, time.monotonic(), cache_salt="warm-up"))
    while engine.has_work:
        engine.step()


if __name__ == "__main__":
    sys.exit(engine_process.main(build, sys.argv[1:]))
