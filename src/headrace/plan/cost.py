"""Seconds a step takes: of each group of operations the greater of computing and reading, the exchange between devices, what is fixed.

Few factors, each a share of a published peak or a time with a cause, so that what was fitted on one model holds for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.engine.plan import Chunk
from headrace.errors import UsageError
from headrace.plan.devices import Device
from headrace.plan.factors import Factors
from headrace.plan.memory import Level
from headrace.plan.shape import Shape

VALUE_BYTES = 2  # of activations, and of what devices exchange
TRAFFIC = 14  # times the hidden size a layer's steps between the matrix products read and write, values a token; not split over devices


class CostModel:
    """Of a model at a level on `tp` devices. Call the parts with token counts; all times in seconds."""

    def __init__(self, shape: Shape, device: Device, level: Level, tp: int, factors: Factors, kv_value_bytes: float = 2) -> None:
        if tp < 1 or tp > device.max_tp:
            raise UsageError(f"--tp: {device.name} goes together in up to {device.max_tp}, asked for {tp}")
        if reason := device.refusal(level.compute):
            raise UsageError(f"level {level.name}: {reason}")
        self.shape, self.device, self.level, self.tp, self.factors = shape, device, level, tp, factors
        peak_16 = device.peak("bf16") or device.peak("fp16")
        compute = factors.compute_16 if level.compute == "bf16" else factors.compute_8
        flops = compute * device.peak(level.compute)
        self._bandwidth = bandwidth = factors.bandwidth * device.bandwidth

        # (seconds to read, seconds a token to compute) of what every token goes through, of the experts, and of the output layer.
        def both(kind: str) -> tuple[float, float]:
            weights = [w for w in shape.weights if w.kind == kind]
            read = sum(level.weight_bytes(w) / min(tp, w.parts) for w in weights) / bandwidth
            return read, sum(2 * w.values / min(tp, w.parts) for w in weights) / flops

        self._linear, self._expert = both("linear"), both("expert")
        self._active_share = shape.active_experts / shape.num_experts if shape.num_experts else 0.0
        head = [w for w in shape.weights if w.kind == ("head" if any(w.kind == "head" for w in shape.weights) else "embed")]
        values = sum(w.values for w in head) / tp
        self._head = values * level.head_bits / 8 / bandwidth, 2 * values / (factors.compute_16 * peak_16)

        # A token that is attended to: read (of a decoding sequence), and multiplied (in a prompt).
        self._windows = [(group.window, group.bytes_per_token(tp, kv_value_bytes) / bandwidth) for group in shape.groups if group.kv_heads]
        attention = factors.attention * peak_16
        self._pairs = [
            (group.window, 2 * group.layers * group.query_heads / tp * group.query_dim / attention)
            for group in shape.groups
            if group.kv_heads
        ]
        self._state = sum(2 * g.layers * g.state_bytes / tp for g in shape.groups) / bandwidth  # read and written for each sequence
        self._traffic = TRAFFIC * shape.num_layers * shape.hidden_size * VALUE_BYTES / bandwidth
        self._fixed = factors.step_s + shape.num_layers * factors.layer_s
        self._exchange = self._meetings = 0.0
        if tp > 1:
            self._meetings = 2 * shape.num_layers * factors.link_s
            moved = 2 * (tp - 1) / tp * shape.hidden_size * VALUE_BYTES
            self._exchange = 2 * shape.num_layers * moved / (factors.link * device.link)

    def weights_s(self, tokens: float, rows: float) -> float:
        """Everything that does not depend on the context: `tokens` computed, `rows` of them with logits."""
        read, compute = self._linear
        seconds = max(read, tokens * compute)
        if self._active_share:
            read, compute = self._expert
            touched = 1 - (1 - self._active_share) ** tokens  # experts that some token chose
            seconds += max(read * touched, tokens * self._active_share * compute)
        read, compute = self._head
        return seconds + max(read, rows * compute) + tokens * self._traffic

    def attend_s(self, context: float) -> float:
        """One decoding sequence reads its `context` tokens."""
        return sum(seconds * (min(context, window) if window else context) for window, seconds in self._windows) + self._state

    def attend_all_s(self, contexts: Sequence[int], more: int = 0) -> float:
        """Decoding sequences of these contexts, each `more` tokens further. Whole numbers are added, so the order does not matter."""
        total, rows = sum(contexts) + more * len(contexts), len(contexts)
        seconds = rows * self._state
        for window, per_token in self._windows:
            seconds += per_token * (sum([min(context + more, window) for context in contexts]) if window else total)
        return seconds

    def prompt_s(self, start: float, stop: float) -> float:
        """A chunk [start, stop) of a prompt attends: to all before it, and half of itself; what lies before is read once."""
        count = stop - start
        seconds = 0.0
        for window, pair in self._pairs:
            before = start + count / 2
            seconds += pair * count * (min(before, window) if window else before)
        return max(seconds, self.attend_s(stop))

    def overhead_s(self, tokens: float, rows: float) -> float:
        """Fixed, for each sequence, and between devices."""
        return self._fixed + rows * self.factors.row_s + self.exchange_s(tokens)

    def exchange_s(self, tokens: float) -> float:
        """Two all-reduces a layer."""
        return self._meetings + tokens * self._exchange

    def compute_bound(self, tokens: float) -> bool:
        """Whether so many tokens take longer to compute than their weights to read."""
        read, compute = self._linear
        return tokens * compute > read

    def step_s(self, chunks: Iterable[Chunk]) -> float:
        """A step as the scheduler planned it, prompts and decoding mixed."""
        tokens = rows = 0
        prompts = 0.0
        contexts = []
        for _, start, stop, _, samples in chunks:
            tokens += stop - start
            rows += samples
            if stop - start == 1:
                contexts.append(stop)
            else:
                prompts += self.prompt_s(start, stop)
        return self.weights_s(tokens, rows) + prompts + self.attend_all_s(contexts) + self.overhead_s(tokens, rows)

    def decode_s(self, rows: float, context: float) -> float:
        """A step that decodes a token of each of `rows` sequences of `context` tokens."""
        return self.weights_s(rows, rows) + rows * self.attend_s(context) + self.overhead_s(rows, rows)

    def mixed_s(self, rows: float, context: float, prompt: float) -> float:
        """Such a step, with a whole prompt in it."""
        total = rows + prompt
        return self.weights_s(total, rows + 1) + rows * self.attend_s(context) + self.prompt_s(0, prompt) + self.overhead_s(total, rows + 1)
