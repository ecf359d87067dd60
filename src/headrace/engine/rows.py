"""The samples that run: each has a row in the executor, and they are kept in policy order."""

from __future__ import annotations

from bisect import insort

from headrace.engine.blocks import BlockPool
from headrace.engine.plan import NewRow
from headrace.engine.policy import by_order
from headrace.engine.samples import Sample


class Rows:
    """`limit` rows. `running` is in policy order; `freed` are rows that the executor has not been told of."""

    __slots__ = ("_free", "freed", "limit", "num_prefilling", "num_requests", "running")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: list[Sample] = []
        self.freed: list[int] = []
        self.num_prefilling = 0  # samples
        self.num_requests = 0  # with a row or more
        self._free = list(range(limit - 1, -1, -1))

    def place(self, sample: Sample) -> NewRow:
        """Give a sample a row. What the executor must know of it, beside its blocks."""
        request, submit = sample.request, sample.request.submit
        sample.row = self._free.pop()
        sample.prefilling = True
        insort(self.running, sample, key=by_order)
        self.num_prefilling += 1
        self.num_requests += request.num_rows == 0
        request.num_rows += 1
        tokens, ends = sample.tokens.tobytes(), request.end_token_ids
        return NewRow(sample.row, tokens, request.num_prompt, submit.params, submit.seed, sample.index, ends)

    def vacate(self, sample: Sample) -> None:
        """Take a sample's row."""
        request = sample.request
        if self.running[-1] is sample:  # victims are, always
            self.running.pop()
        else:
            self.running.remove(sample)
        self._free.append(sample.row)
        self.freed.append(sample.row)
        self.num_prefilling -= sample.prefilling
        request.num_rows -= 1
        self.num_requests -= request.num_rows == 0
        sample.row = -1
        sample.prefilling = False

    def end_prefill(self, sample: Sample) -> None:
        """A sample has caught up: from now on it decodes."""
        sample.prefilling = False
        self.num_prefilling -= 1

    @property
    def last_is_batch(self) -> bool:
        """The last running sample is of the batch tier; in every order such samples are last."""
        return bool(self.running) and self.running[-1].request.submit.batch

    def take_freed(self) -> list[int]:
        """The rows freed since the last call."""
        freed, self.freed = self.freed, []
        return freed

    def check(self, pool: BlockPool) -> None:
        """Raises RuntimeError unless every row is free or has one sample, and the counts agree with them and with the pool."""
        refs = [0] * pool.num_blocks
        for sample in self.running:
            for block in sample.table:
                refs[block] += 1
        for what, expected, found in (
            ("rows", list(range(self.limit)), sorted([*self._free, *(sample.row for sample in self.running)])),
            ("policy order", sorted(self.running, key=by_order), self.running),
            ("samples prefilling", sum(sample.prefilling for sample in self.running), self.num_prefilling),
            ("holders of each block", pool.refs, refs),
            ("requests running", len({sample.request_id for sample in self.running}), self.num_requests),
        ):
            if expected != found:
                raise RuntimeError(f"[Rows.check] {what}: expected {expected}, found {found}")
