"""The pool of KV blocks: ids, digests and counts. It knows no requests and no tokens' meaning.

A block is in exactly one state:

    free     nothing of worth in it
    held     by one sample or more (`refs`)
    cached   nobody holds it, but it is published: a later prompt may want it; the longest unused goes first when blocks run out

A held block may carry a name (a `Prefix`) before its contents are there: it is *promised*, and `filled` says how many of its tokens are
computed, or will be by the end of the step being scheduled. Whoever holds it may go on filling it. When it is full and computed it is
*published*. A promised block that nobody holds any more is simply free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.config import BLOCK_TOKENS
from headrace.engine.prefix import Prefix


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens, all free at first."""

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.refs = [0] * num_blocks  # holders of each block
        self.filled = [0] * num_blocks  # of a held or cached block: its leading tokens that are there by the end of this step
        self.published = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._names: list[Prefix | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}  # digest -> the block that is published or promised under it

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks `take` can give: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, each with one holder; cached ones are evicted, longest unused first. None if there are too few."""
        if count > len(self._free) + len(self._cached):
            return None
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self.refs[block] = 1
            self.filled[block] = 0
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each: of a block that is held, or cached."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._cached[block]
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each, a table in its order: let go from the end, so that of a chain the tail is evicted first."""
        for block in reversed(blocks):
            refs = self.refs[block] - 1
            if refs < 0:
                raise RuntimeError(f"[BlockPool.release] block {block}: nobody holds it")
            self.refs[block] = refs
            if refs == 0:
                if self.published[block]:
                    self._cached[block] = None
                else:
                    self._forget(block)
                    self._free.append(block)

    def promise(self, block: int, name: Prefix) -> None:
        """A held block will come to hold `name`'s tokens. Without effect when another block has that digest: this one stays private."""
        if name.digest not in self._index:
            self._index[name.digest] = block
            self._names[block] = name

    def publish(self, block: int, name: Prefix) -> None:
        """A held block is full and computed. Without effect when another block has that digest: this one stays private."""
        if self._names[block] is None:
            self.promise(block, name)
            if self._names[block] is None:
                return
        self.published[block] = True
        self.filled[block] = self.block_tokens

    def find(self, name: Prefix) -> int:
        """The block published or promised under `name`, or -1. The tokens are compared, not only the digests. Changes nothing."""
        block = self._index.get(name.digest, -1)
        if block >= 0:
            held = self._names[block]
            if held is None or not name.equals(held):
                return -1
        return block

    def match(self, chain: Iterable[Prefix]) -> list[int]:
        """Blocks of the longest known beginning of `chain`. Changes nothing."""
        blocks = []
        for name in chain:
            block = self.find(name)
            if block < 0:
                break
            blocks.append(block)
        return blocks

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of them are cached: `hold` makes these unavailable to `take`."""
        return sum(self.refs[block] == 0 for block in blocks)

    def check(self) -> None:
        """Raises RuntimeError unless free + cached + held is all blocks, none twice, and the index agrees with them."""
        seen = [0] * self.num_blocks
        for block in (*self._free, *self._cached, *(block for block, refs in enumerate(self.refs) if refs)):
            seen[block] += 1
        faults = [f"block {block} is in {count} states" for block, count in enumerate(seen) if count != 1]
        for block in range(self.num_blocks):
            name = self._names[block]
            if self.refs[block] < 0:
                faults.append(f"block {block} has {self.refs[block]} holders")
            if name is not None and self._index.get(name.digest) != block:
                faults.append(f"block {block} has a name that the index does not know")
            if self.published[block] and (name is None or self.filled[block] != self.block_tokens):
                faults.append(f"block {block} is published without a name, or before it is full")
            if not 0 <= self.filled[block] <= self.block_tokens:
                faults.append(f"block {block} is filled to {self.filled[block]}")
            if self.refs[block] == 0 and self.published[block] != (block in self._cached):
                faults.append(f"block {block} is published {self.published[block]} and cached {block in self._cached}")
            if self.refs[block] == 0 and name is not None and not self.published[block]:
                faults.append(f"block {block} is promised by nobody")
        if len(self._index) != sum(name is not None for name in self._names):
            faults.append(f"{len(self._index)} digests for {sum(name is not None for name in self._names)} named blocks")
        if faults:
            raise RuntimeError("[BlockPool.check] " + "; ".join(faults))

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._index[name.digest]
            self._names[block] = None
        self.published[block] = False
