"""Grammars: what is accepted and refused, and that a constrained sample is what it would be alone, uninterrupted, undisturbed."""

from __future__ import annotations

import json
import random
import re
from array import array
from concurrent.futures import Future
from typing import Any

import pytest
from chat_templates import CHATML, tokenizer_with
from conftest import ScriptedExecutor
from engine_oracle import submit

from headrace.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.scheduler import Scheduler
from headrace.errors import InvalidRequest
from headrace.executors.grammars import MAX_COMPILED, GrammarRows
from headrace.executors.simulated import SimulatedExecutor, VirtualClock
from headrace.request import Abort, SamplingParams, StepEvents, Submit
from headrace.text import grammar
from headrace.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_with(CHATML)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> grammar.Compiler:
    return grammar.Compiler(lambda: tokenizer, tokenizer.vocab_size + 5, [tokenizer.eos_ids[0]])


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1}


def walk(matcher: grammar.Matcher, rng: random.Random, end_id: int, limit: int = 4000) -> list[int]:
    """Random allowed tokens up to the end."""
    found: list[int] = []
    while len(found) < limit:
        token = rng.choice(sorted(allowed(matcher.mask())))
        if token == end_id:
            return found
        matcher.accept([token])
        found.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("source", "good"),
    [
        (grammar.schema_grammar(SCHEMA), lambda text: isinstance(json.loads(text)["age"], int)),
        (grammar.choice_grammar(["yes", 'no "way"\n', "é☂"]), lambda text: text in ("yes", 'no "way"\n', "é☂")),
        (grammar.regex_grammar("[0-9]{3}-(a|b)+c"), lambda text: re.fullmatch("[0-9]{3}-(a|b)+c", text)),
        (grammar.lark_grammar('start: "a" b "c"\nb: "[" b "]" | "x"'), lambda text: re.fullmatch(r"a(\[*)x(\]*)c", text)),
    ],
)
def test_random_walks_stay_inside(tokenizer: Tokenizer, compiler: grammar.Compiler, source: str, good: Any) -> None:
    grammar.check(source)
    for seed in range(20):
        ids = walk(compiler(source).copy(), random.Random(seed), tokenizer.eos_ids[0])
        text = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert good(text), text
        assert not tokenizer.control_ids & set(ids)


def test_only_the_end_is_allowed_after_the_end(tokenizer: Tokenizer, compiler: grammar.Compiler) -> None:
    matcher = compiler(grammar.choice_grammar(["ab"]))
    matcher.accept(tokenizer.encode("ab"))
    end = tokenizer.eos_ids[0]
    assert allowed(matcher.mask()) == {end}
    matcher.accept([end])
    assert allowed(matcher.mask()) == {end}


def test_white_space_is_bounded(tokenizer: Tokenizer, compiler: grammar.Compiler) -> None:
    """A model that likes line feeds cannot write them for ever."""
    matcher = compiler(grammar.schema_grammar({"type": "object"}))
    matcher.accept(tokenizer.encode("{"))
    count = 0
    while (blank := allowed(matcher.mask()) & set(tokenizer.encode("\n \t"))) and count < 100:
        matcher.accept([min(blank)])
        count += 1
    assert 0 < count < 60


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: grammar.schema_grammar({"type": "nope"}), "nope"),
        (lambda: grammar.schema_grammar({"type": "string", "pattern": "("}), "unclosed"),
        (lambda: grammar.schema_grammar({"not": {}}), "not"),
        (lambda: grammar.schema_grammar(False), "not"),
        (lambda: grammar.schema_grammar({"$ref": "https://example.com/x"}), "not fetch"),
        (lambda: grammar.schema_grammar({"enum": ["x" * 70_000]}), "at most"),
        (lambda: grammar.regex_grammar("a("), "unclosed"),
        (lambda: grammar.regex_grammar("(" * 8000 + ")" * 8000), "nest"),
        (lambda: grammar.regex_grammar("a" * 20_000), "at most"),
        (lambda: grammar.lark_grammar("start: nothing"), "unknown name"),
        (lambda: grammar.lark_grammar("start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'), "too big"),
        (lambda: grammar.choice_grammar([]), "1 to"),
    ],
)
def test_bad_grammars_are_refused(make: Any, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        grammar.check(make())
    assert len(caught.value.message) <= 300


def test_the_longest_chain_of_rules_has_the_stack_it_needs() -> None:
    """On the usual stack of a thread it ends the process."""
    from headrace.threads import deep_pool

    rules, i = ["start: a0"], 0
    while len(source := "\n".join([*rules, f'a{i}: "x"'])) < grammar.MAX_SOURCE_CHARS - 16:
        rules.append(f"a{i}: a{i + 1}")
        i += 1
    with deep_pool(1, "test") as pool:
        pool.submit(grammar.check, grammar.lark_grammar(source)).result()


def test_grammars_that_are_kept_are_bounded() -> None:
    """However many clients think of; one that was dropped is made again when a row needs it."""
    made: list[str] = []

    def compile_grammar(source: str) -> grammar.Matcher:
        made.append(source)
        return COMPILER(source)

    rows = GrammarRows(compile_grammar, 257)
    sources = [grammar.choice_grammar([f"{i}"]) for i in range(100)]
    for source in sources:
        rows.compile(source).result()
    assert len(rows._compiled) == MAX_COMPILED
    rows.compile(sources[-1]).result()
    assert len(made) == 100
    rows.compile(sources[0]).result()
    assert len(made) == 101


# In the engine


class ByteModel:
    """A compiler over 256 byte tokens and an end token, for the simulated executor."""

    vocab_size = 257
    control_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


END = 256
COMPILER = grammar.Compiler(ByteModel, 257, [END])
PAIR = grammar.regex_grammar("[a-z]{3,20}=[0-9]{1,3}")


def engine_of(num_blocks: int = 100, max_batch_size: int = 8) -> Engine:
    clock = VirtualClock(1.0)
    config = EngineConfig(context_length=256, num_blocks=num_blocks, max_batch_size=max_batch_size)
    scheduler = Scheduler(config, clock, (END,), block_tokens=4)
    executor = SimulatedExecutor(clock, num_blocks, vocab_size=257, block_tokens=4)
    rows = GrammarRows(COMPILER, 257)
    rows.compile(PAIR).result()  # so that when a request joins the queue is no matter of threads
    return Engine(scheduler, executor, rows)


def constrained(request_id: int, prompt: list[int], seed: int = 0, source: str = PAIR, **more: Any) -> Submit:
    params = SamplingParams(max_tokens=40, temperature=1.0, grammar=source)
    return Submit(request_id, array("i", prompt).tobytes(), params, seed, 1.0, **more)


def run(engine: Engine, commands: list[Submit]) -> dict[tuple[int, int], list[int]]:
    """The tokens of each sample; all must come to their own end."""
    heard: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str] = {}

    def hear(events: StepEvents | None) -> None:
        if events is not None:
            assert not events.refused
            for request_id, sample, token in zip(events.request_ids, events.samples, events.tokens, strict=True):
                heard.setdefault((request_id, sample), []).append(token)
            reasons.update({(request_id, sample): reason for request_id, sample, reason in events.finished})

    for command in commands:
        hear(engine.apply(command))
    while engine.has_work:
        hear(engine.step())
        engine.scheduler.check()
    constrained = {command.request_id for command in commands if command.params.grammar}
    assert {reason for (request_id, _), reason in reasons.items() if request_id in constrained} <= {"stop"}
    assert not {"error", "abort"} & {*reasons.values()}
    return heard


def text_of(ids: list[int]) -> str:
    assert ids[-1] == END
    return bytes(ids[:-1]).decode()


def test_constrained_samples_among_free_ones_match_and_are_as_if_alone() -> None:
    commands = [constrained(i, [i + 1] * 60, seed=i, num_samples=1 + i % 2) for i in range(6)]
    free = [submit(100 + i, [i] * 30, max_tokens=90) for i in range(2)]
    engine = engine_of(num_blocks=42)  # too few for all: some are preempted
    heard = run(engine, [*commands, *free])
    assert engine.scheduler.tally.preemptions > 0
    for command in commands:
        alone = run(engine_of(), [command])
        for key, ids in alone.items():
            assert heard[key] == ids
            assert re.fullmatch("[a-z]{3,20}=[0-9]{1,3}", text_of(ids))


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_resumed_sample_goes_on_with_the_same_tokens(cut: int) -> None:
    whole = run(engine_of(), [constrained(1, [5] * 20, seed=3, num_samples=2)])
    emitted = tuple(array("i", whole[1, sample][:cut]).tobytes() for sample in (0, 1))
    rest = run(engine_of(), [constrained(1, [5] * 20, seed=3, num_samples=2, emitted=emitted)])
    for sample in (0, 1):
        assert whole[1, sample][:cut] + rest[1, sample] == whole[1, sample]


def test_the_end_of_a_grammar_ends_a_sample_before_min_tokens() -> None:
    params = SamplingParams(max_tokens=50, min_tokens=40, grammar=grammar.choice_grammar(["yes"]))
    heard = run(engine_of(), [Submit(1, array("i", [1, 2, 3]).tobytes(), params, 0, 1.0)])
    assert text_of(heard[1, 0]) == "yes"


def allowing(*tokens: int, source: str = "", max_tokens: int = 40, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens, allowed_token_ids=array("i", tokens).tobytes(), grammar=source, **more)


def test_only_allowed_tokens_are_said() -> None:
    """The model's end token ends a sample only where it is in the list."""
    for tokens in ((7,), (3, 255), (0, 31, 32, 64)):
        heard = run(engine_of(), [Submit(1, array("i", [1, 2]).tobytes(), allowing(*tokens), 0, 1.0, num_samples=2)])
        for sample in (0, 1):
            assert len(heard[1, sample]) == 40
            assert set(heard[1, sample]) <= set(tokens)
    (ids,) = run(engine_of(), [Submit(1, array("i", [1, 2]).tobytes(), allowing(5, 6, END), 0, 1.0)]).values()
    assert ids[-1] == END
    assert set(ids[:-1]) <= {5, 6}


def test_allowed_tokens_and_a_grammar_hold_together() -> None:
    """The end of the grammar is the answer's, though the end token is not in the list."""
    letters = [ord(letter) for letter in "xyz=12"]
    params = allowing(*letters, source=PAIR)
    heard = run(engine_of(), [Submit(i, array("i", [i]).tobytes(), params, i, 1.0) for i in range(4)])
    for ids in heard.values():
        assert re.fullmatch("[xyz]{3,20}=[12]{1,3}", text_of(ids))


def test_a_grammar_that_the_allowed_tokens_cannot_follow_is_an_error() -> None:
    engine = engine_of()
    engine.apply(Submit(1, array("i", [1]).tobytes(), allowing(*b"abc", source=PAIR, min_tokens=30), 0, 1.0))
    reasons = []
    while engine.has_work:
        if (events := engine.step()) is not None:
            reasons += events.finished
    assert reasons == [(1, 0, "error")]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_resumed_sample_is_allowed_the_same(cut: int) -> None:
    params = allowing(*range(0, 250, 7))
    (whole,) = run(engine_of(), [Submit(1, array("i", [5]).tobytes(), params, 3, 1.0)]).values()
    emitted = (array("i", whole[:cut]).tobytes(),)
    (rest,) = run(engine_of(), [Submit(1, array("i", [5]).tobytes(), params, 3, 1.0, emitted=emitted)]).values()
    assert whole[:cut] + rest == whole


class SlowCompiler:
    """A compilation that ends when the test says so."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def compile(self, grammar: str) -> Future[None]:
        return self.future

    def begin(self, plan: Any) -> None: ...

    def masks(self) -> dict[int, bytes]:
        return {}

    def accept(self, plan: Any, tokens: list[int]) -> tuple[int, ...]:
        return tuple(chunk.row for chunk in plan.chunks if chunk.samples)


def slow_engine(tokens: list[int]) -> tuple[Engine, SlowCompiler]:
    slow = SlowCompiler()
    scheduler = Scheduler(EngineConfig(context_length=256, num_blocks=16), VirtualClock(1.0), (END,))
    return Engine(scheduler, ScriptedExecutor(tokens), slow), slow


def test_nobody_waits_for_a_compilation() -> None:
    engine, slow = slow_engine([1, 2, 3])
    assert engine.apply(constrained(1, [1])) is None
    engine.apply(submit(2, [1], max_tokens=2))
    assert [engine.step().request_ids for _ in range(2)] == [[2], [2]]  # type: ignore[union-attr]
    assert engine.has_work
    assert engine.step() is None
    slow.future.set_exception(InvalidRequest("too hard"))
    events = engine.step()
    assert events is not None
    assert [(refusal.request_id, refusal.message) for refusal in events.refused] == [(1, "too hard")]
    assert not engine.has_work


def test_a_request_may_leave_while_its_grammar_is_compiled() -> None:
    engine, slow = slow_engine([1])
    engine.apply(constrained(1, [1]))
    engine.apply(Abort(1))
    assert not engine.has_work
    slow.future.set_result(None)
    assert engine.step() is None


def test_a_grammar_that_gives_up_is_an_error_and_not_an_end() -> None:
    engine, slow = slow_engine([END])
    engine.apply(constrained(1, [1]))
    slow.future.set_result(None)
    events = engine.step()
    assert events is not None
    assert events.finished == [(1, 0, "error")]
