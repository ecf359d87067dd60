"""What a sample need not compute because the pool has it, or will have it by the end of the step."""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine.blocks import BlockPool
from headrace.engine.prefix import PrefixHasher
from headrace.engine.samples import Request, Sample


class Reuse(NamedTuple):
    """Blocks for the beginning of a sample's table."""

    shared: list[int]  # full blocks, published or promised, to hold
    source: int  # block to copy for the one after them, or -1
    start: int  # tokens that are there with these; 0: `filled` of the shared ones tells


class Sharing:
    """Finds, names and publishes blocks for samples.

    Full blocks go by their digest, through the pool's index, and may still be in the making. The last block of a sample is always its
    own, because its last token is always computed: what can be had of it is copied, from a cached full block or from a running sample
    that has the same prompt. With `caching` off only samples of one request share; with `enabled` off nobody does.
    """

    def __init__(self, pool: BlockPool, hasher: PrefixHasher, enabled: bool, caching: bool) -> None:
        self.enabled = enabled
        self._caching = enabled and caching
        self._pool = pool
        self._hasher = hasher
        self._sources: list[int] = []
        self._donors: dict[bytes, Sample] = {}  # digest of a whole prompt -> a running sample that has computed it

    def find(self, sample: Sample) -> Reuse:
        """The most that `sample`, which has no blocks yet, can reuse. Changes nothing."""
        if not self.enabled or not sample.request.is_scored:  # each of its rows must be computed
            return Reuse([], -1, 0)
        pool, size = self._pool, self._pool.block_tokens
        num_tokens, num_prompt = len(sample.tokens), sample.request.num_prompt
        last = (num_tokens - 1) // size  # the block of the last token
        tail = (num_prompt - 1) // size  # the block of the prompt's last token
        reach = min(num_prompt, num_tokens - 1)
        shared: list[int] = []
        if self._caching:
            self._name(sample, num_tokens // size)
            shared = pool.match(sample.links[:last])
        if len(shared) * size < reach:
            donor = self._donor(sample)
            if donor is not None:
                return Reuse(donor.table[:tail], donor.table[tail] if reach > tail * size else -1, reach)
        if self._caching and len(shared) == last and num_tokens % size == 0:
            source = pool.find(sample.links[last])
            if source >= 0 and pool.published[source] and all(pool.published[block] for block in shared):
                return Reuse(shared, source, num_tokens - 1)
        return Reuse(shared, -1, 0)

    def hold_source(self, block: int) -> None:
        """The plan copies from a block, which stays until that is done."""
        self._pool.hold((block,))
        self._sources.append(block)

    def release_sources(self) -> bool:
        """The plan is done. Whether there were any."""
        sources, self._sources = self._sources, []
        self._pool.release(sources)
        return bool(sources)

    def promise(self, sample: Sample, first: int) -> None:
        """From its block `first` on, a sample's full blocks are new: let others find them while they are made. The last one is its own."""
        # Whoever finds a block in the making may compute it: not one whose rows are still to be told.
        if self._caching and sample.request.is_scored:
            for i in range(first, (len(sample.tokens) - 1) // self._pool.block_tokens):
                self._pool.promise(sample.table[i], sample.links[i])

    def publish(self, sample: Sample, start: int, stop: int) -> None:
        """Tokens [start, stop) of a sample are computed: its blocks that became full can be shared."""
        if self._caching:
            size = self._pool.block_tokens
            full = stop // size
            if full > len(sample.links):
                self._name(sample, full)
            for i in range(start // size, full):
                self._pool.publish(sample.table[i], sample.links[i])

    def add_donor(self, sample: Sample) -> None:
        """A running sample has computed its whole prompt."""
        sample.has_prompt = True
        tail = sample.request.tail
        if tail is not None:
            self._donors.setdefault(tail.digest, sample)

    def drop_donor(self, sample: Sample) -> None:
        """A sample is about to lose its blocks."""
        sample.has_prompt = False
        tail = sample.request.tail
        if tail is not None and self._donors.get(tail.digest) is sample:
            del self._donors[tail.digest]

    def _donor(self, sample: Sample) -> Sample | None:
        request = sample.request
        for sibling in request.samples:
            if sibling.has_prompt:
                return sibling
        if request.tail is None:
            return None
        donor = self._donors.get(request.tail.digest)
        # The digests are equal; the tokens decide.
        if donor is None or donor.request.tail is None or not request.tail.equals(donor.request.tail):
            return None
        return donor

    def _name(self, sample: Sample, count: int) -> None:
        """Make the names of a sample's first `count` blocks, which are full."""
        request = sample.request
        if request.tail is None:
            self._name_prompt(request)
        links, size = sample.links, self._pool.block_tokens
        if not links:
            links.extend(request.links)
        parent = links[-1] if links else self._hasher.root(request.submit.cache_salt)
        while len(links) < count:
            begin = len(links) * size
            parent = self._hasher.extend(parent, sample.tokens[begin : begin + size].tobytes())
            links.append(parent)

    def _name_prompt(self, request: Request) -> None:
        size = 4 * self._pool.block_tokens
        prompt = request.submit.prompt
        parent = self._hasher.root(request.submit.cache_salt)
        for begin in range(0, len(prompt), size):
            parent = self._hasher.extend(parent, prompt[begin : begin + size])
            if begin + size <= len(prompt):
                request.links.append(parent)
        request.tail = parent
