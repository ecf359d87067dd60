"""The block pool against a model of sets, and the names of what blocks hold."""

from __future__ import annotations

from array import array

import pytest
from engine_oracle import FUZZ
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.blocks import BlockPool
from headrace.engine.prefix import Prefix, PrefixHasher

HASHER = PrefixHasher(("model",), b"secret")


def chain(*blocks: list[int], hasher: PrefixHasher = HASHER, salt: str = "") -> list[Prefix]:
    """The names of consecutive blocks."""
    parent, names = hasher.root(salt), []
    for tokens in blocks:
        parent = hasher.extend(parent, array("i", tokens).tobytes())
        names.append(parent)
    return names


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.take(count)
    assert blocks is not None
    return blocks


def published(pool: BlockPool, names: list[Prefix]) -> list[int]:
    blocks = taken(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    return blocks


class PoolMachine(RuleBasedStateMachine):
    """Contents are tuples of the tokens from the start; the model knows for each block who holds it and what it is good for."""

    @initialize(size=st.integers(1, 9), collide=st.booleans())
    def start(self, size: int, collide: bool) -> None:
        self.pool = BlockPool(size, block_tokens=2)
        self.hasher = PrefixHasher((), b"", (lambda data: b"one") if collide else None)
        self.collide = collide
        self.refs: dict[int, int] = {}
        self.cached: list[int] = []  # longest unused first
        self.named: dict[int, tuple[int, ...]] = {}  # promised or published
        self.public: set[int] = set()

    def name(self, content: tuple[int, ...]) -> Prefix:
        return chain(*[[token, token] for token in content], hasher=self.hasher)[-1]

    def is_named(self, content: tuple[int, ...]) -> bool:
        """With one digest for everything, whatever has it is in the way of all others."""
        return bool(self.named) if self.collide else content in self.named.values()

    contents = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        free = self.pool.num_blocks - len(self.refs) - len(self.cached)
        blocks = self.pool.take(count)
        if count > free + len(self.cached):
            assert blocks is None
            return
        assert blocks is not None
        assert len(blocks) == len(set(blocks)) == count
        evicted, self.cached = self.cached[: max(0, count - free)], self.cached[max(0, count - free) :]
        assert set(evicted) <= set(blocks)
        for block in evicted:
            self.public.discard(block)
            del self.named[block]
        for block in blocks:
            assert block not in self.refs
            assert block not in self.cached
            assert block not in self.named
            assert self.pool.filled[block] == 0
            self.refs[block] = 1

    @precondition(lambda self: self.refs or self.cached)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.refs, *self.cached})))
        assert self.pool.num_unheld([block]) == (block in self.cached)
        self.pool.hold([block])
        self.refs[block] = self.refs.get(block, 0) + 1
        self.cached = [other for other in self.cached if other != block]

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                if block in self.public:
                    self.cached.append(block)
                else:
                    self.named.pop(block, None)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), content=contents, computed=st.booleans())
    def promise_or_publish(self, data: st.DataObject, content: tuple[int, ...], computed: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        content = self.named.get(block, content)  # a block's name never changes while it is held
        if not computed and block in self.named:
            return
        (self.pool.publish if computed else self.pool.promise)(block, self.name(content))
        if block not in self.named and not self.is_named(content):
            self.named[block] = content
        if computed and block in self.named:
            self.public.add(block)

    @rule(content=contents)
    def match(self, content: tuple[int, ...]) -> None:
        by_content = {known: block for block, known in self.named.items()}
        expected = []
        for length in range(1, len(content) + 1):
            if content[:length] not in by_content:
                break
            expected.append(by_content[content[:length]])
        names = chain(*[[token, token] for token in content], hasher=self.hasher)
        assert self.pool.match(names) == expected

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_held == len(self.refs)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_available == self.pool.num_blocks - len(self.refs)
        assert {block for block, is_public in enumerate(self.pool.published) if is_public} == self.public


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=int(150 * FUZZ), stateful_step_count=40, deadline=None, derandomize=True)


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(4)
    names = chain([1], [2], [3], [4])
    blocks = published(pool, names)
    pool.release(blocks)
    for left in (3, 2, 1, 0):
        taken(pool, 1)
        assert pool.match(names) == blocks[:left]


def test_the_longest_unused_chain_is_evicted_first() -> None:
    pool = BlockPool(4)
    first, second = chain([1], [2]), chain([3], [4])
    first_blocks, second_blocks = published(pool, first), published(pool, second)
    pool.release(first_blocks)
    pool.release(second_blocks)
    pool.hold(first_blocks)  # used again
    pool.release(first_blocks)
    taken(pool, 2)
    assert pool.match(first) == first_blocks
    assert pool.match(second) == []


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(3)
    names = chain([1])
    pool.release(published(pool, names))
    assert pool.take(4) is None
    assert pool.match(names)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 1, 0)


def test_a_promise_without_holders_is_forgotten() -> None:
    pool = BlockPool(2)
    (name,) = chain([1])
    (block,) = taken(pool, 1)
    pool.promise(block, name)
    assert pool.find(name) == block
    assert not pool.published[block]
    pool.release([block])
    assert pool.find(name) == -1
    assert pool.num_free == 2


def test_the_second_block_with_the_same_contents_stays_private() -> None:
    pool = BlockPool(2)
    (name,) = chain([1])
    first, second = taken(pool, 2)
    pool.publish(first, name)
    pool.publish(second, name)
    pool.release([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 1)
    assert pool.find(name) == first


def test_a_forced_collision_is_a_miss() -> None:
    hasher = PrefixHasher((), b"", lambda data: b"one")
    pool = BlockPool(4)
    (name,) = chain([1], hasher=hasher)
    (block,) = published(pool, [name])
    assert pool.find(chain([1], hasher=hasher)[0]) == block
    assert pool.find(chain([2], hasher=hasher)[0]) == -1, "other tokens"
    assert pool.find(chain([7], [1], hasher=hasher)[1]) == -1, "the same tokens after others"
    assert pool.find(chain([1], hasher=hasher, salt="tenant")[0]) == -1, "the same tokens of another tenant"


def test_a_child_is_found_after_its_parent_was_computed_anew() -> None:
    pool = BlockPool(3)
    names = chain([1], [2])
    parent, child = published(pool, names)
    pool.release([parent])
    pool.take(2)  # the parent is evicted, the child still held
    assert pool.match(names) == []
    pool.publish(parent, chain([1])[0])
    assert pool.match(chain([1], [2])) == [parent, child]


def test_digests_depend_on_everything() -> None:
    def digest(scope: tuple[str, ...] = ("a", "b"), secret: bytes = b"s", salt: str = "t", tokens: tuple[int, ...] = (1,)) -> bytes:
        return chain(*[[token] for token in tokens], hasher=PrefixHasher(scope, secret), salt=salt)[-1].digest

    different = [
        digest(), digest(scope=("ab", "")), digest(scope=("a", "b", "")), digest(salt=""), digest(scope=("a", "bt"), salt=""),
        digest(secret=b"z"), digest(tokens=(2,)), digest(tokens=(1, 1)), digest(tokens=(2, 1)),
        digest(secret=b"s" * 65), digest(secret=b"s" * 66),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert len(digest()) == 16
    assert digest() == digest()


def test_release_of_what_nobody_holds_is_an_error() -> None:
    pool = BlockPool(2)
    (block,) = taken(pool, 1)
    pool.release([block])
    with pytest.raises(RuntimeError, match=f"block {block}: nobody holds it"):
        pool.release([block])


@pytest.mark.parametrize("fault", ["lost", "twice", "holders", "index", "early", "unnamed", "stale"])
def test_check_finds(fault: str) -> None:
    pool = BlockPool(4)
    names = chain([1], [2])
    first, second = published(pool, names)
    pool.release([second])
    pool.check()
    match fault:
        case "lost":
            pool._free.pop()
        case "twice":
            pool._free.append(first)
        case "holders":
            pool.refs[first] = 0
        case "index":
            del pool._index[names[0].digest]
        case "early":
            pool.filled[first] = 1
        case "unnamed":
            pool._names[second] = None
        case "stale":
            pool.published[second] = False
    with pytest.raises(RuntimeError, match="check"):
        pool.check()
