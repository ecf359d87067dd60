"""What a model's size and speed depend on, and nothing else: its weights, and what its layers keep for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "expert", "embed", "head", "vector"]


@dataclass(frozen=True, slots=True)
class Weight:
    """`count` equal tensors of (n, k). `parts`: over how many devices one can be split; 1: each device has all of it."""

    name: str
    kind: Kind
    n: int
    k: int
    count: int
    parts: int

    @property
    def values(self) -> int:
        """Numbers in all of them."""
        return self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same for each token: `kv_heads` keys of `key_dim` and values of `value_dim`.

    A latent (MLA) is one head that all devices hold (`split` false). `state_bytes` is what a layer with linear attention keeps for a
    sequence of any length.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0  # tokens kept; 0: all
    split: bool = True
    state_bytes: int = 0
    query_heads: int = 0
    query_dim: int = 0  # key plus value width of a query head in prefill: half of the flops of one attended token

    def heads_on(self, tp: int) -> int:
        """KV heads a device holds: never below one."""
        return max(1, -(-self.kv_heads // tp)) if self.split else self.kv_heads

    def bytes_per_token(self, tp: int = 1, value_bytes: float = 2) -> float:
        """On one device of `tp`, for each token within the window."""
        return self.layers * self.heads_on(tp) * (self.key_dim + self.value_dim) * value_bytes

    def bytes_at(self, tokens: float, tp: int = 1, value_bytes: float = 2) -> float:
        """On one device of `tp`, for a sequence of `tokens`."""
        kept = min(tokens, self.window) if self.window else tokens
        state = self.layers * self.state_bytes / (tp if self.split else 1)
        return self.bytes_per_token(tp, value_bytes) * kept + state


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as the planner sees it. Sizes in numbers, not bytes: a level gives the bytes (plan/memory.py)."""

    name: str
    architecture: str
    source: str  # where the numbers are from
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    weights: tuple[Weight, ...]
    groups: tuple[KVGroup, ...]
    num_experts: int = 0
    active_experts: int = 0  # routed experts that a token meets
    file_bytes: int = 0  # of the tensors, when they come from a file that is quantized already

    @property
    def parameters(self) -> int:
        return sum(weight.values for weight in self.weights)

    @property
    def active_parameters(self) -> float:
        """Numbers a token is multiplied with."""
        share = self.active_experts / self.num_experts if self.num_experts else 0.0
        return sum(w.values * (share if w.kind == "expert" else 1.0) for w in self.weights if w.kind not in ("embed", "vector"))

    def kv_bytes_per_token(self, tp: int = 1, value_bytes: float = 2) -> float:
        """On one device of `tp`, what one more token takes in a long sequence (layers with a window take no more)."""
        return sum(group.bytes_per_token(tp, value_bytes) for group in self.groups if not group.window)

    def kv_bytes(self, tokens: float, tp: int = 1, value_bytes: float = 2) -> float:
        """On one device of `tp`, what a sequence of `tokens` takes."""
        return sum(group.bytes_at(tokens, tp, value_bytes) for group in self.groups)
