"""The native executor: lowers the recorded network into one native program and runs plans on it.

A step is two calls that release the interpreter lock: `forward` (everything up to the logits) and `sample`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from headrace.config import BLOCK_TOKENS, EngineConfig, ModelConfig
from headrace.engine.plan import NewRow, Plan
from headrace.kernels import native
from headrace.models import decoder
from headrace.request import Embedding, PromptLogprobs, PromptTold, TokenLogprob

FORMATS = {"q4_0": 0, "q4_1": 1, "q8_0": 2, "bf16": 3}
PANEL = 32
STORE, ADD, SILU_MUL = 0, 1, 2


class Packed(Protocol):
    """A packed weight in the arena (models/pack.py)."""

    format: str
    n: int
    k: int
    address: int
    nbytes: int


class Model(Protocol):
    """What the executor needs of a loaded model (models/loader.py)."""

    config: ModelConfig
    weights: dict[str, Any]  # canonical name -> Packed, or float32 array


class NativeExecutor:
    """Runs plans on the kernels. Owns the KV pool and a row per running sample."""

    def __init__(self, model: Model, config: EngineConfig, threads: int) -> None:
        self.model = model
        shape = model.config
        self._vocab = shape.vocab_size
        self._table = decoder.rope_table(shape, config.context_length)
        self._masks_none: list[bytes] = []
        self.program = native.Program(
            threads=threads,
            max_tokens=max(config.max_batch_tokens, config.max_batch_size),
            max_rows=config.max_batch_size,
            max_blocks=-(-config.context_length // BLOCK_TOKENS),
            context=config.context_length,
            vocab=shape.vocab_size,
            num_blocks=config.num_blocks,
            num_layers=shape.num_layers,
            q_heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.sliding_window,
            score_scale=shape.head_dim**-0.5,
        )
        lowering = _Lowering(self.program, model, self._table)
        lowering.run(decoder.record(shape))
        self._biases = lowering.biases  # the program points into them
        self._max_logprobs = [-1] * config.max_batch_size
        self._prompts = [(0, 0)] * config.max_batch_size  # tokens, and `prompt_logprobs`
        self._sums: dict[int, npt.NDArray[np.float64]] = {}  # of rows whose embedding is in the making
        self._pooled = lowering.x, model.weights["final_norm"].ctypes.data, shape.norm_eps, shape.hidden_size
        self._num_logits = 0

    def forward(self, plan: Plan) -> None:
        program = self.program
        for new in plan.new_rows:
            self._set_row(new)
        for row, first, ids in plan.new_blocks:
            program.set_blocks(row, first, ids)
        chunks: list[int] = []
        for chunk in plan.chunks:
            chunks += (chunk.row, chunk.start, chunk.stop, chunk.logits_start)
        copies = [block for pair in plan.copies for block in pair]
        self._num_logits = program.forward(chunks, copies)

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        rows: list[int] = []
        at: list[int] = []
        end = 0
        for chunk in plan.chunks:
            end += chunk.stop - chunk.logits_start
            if chunk.samples:
                rows.append(chunk.row)
                at.append(end - 1)
        tops = max((self._max_logprobs[row] for row in rows), default=-1)
        allowed = [masks.get(row, b"") for row in rows] if masks else self._masks_none
        tokens, logprobs, ids, values = self.program.sample(rows, at, allowed, max(tops, 0))
        if tops < 0:
            return tokens, []
        return tokens, [
            None
            if (k := self._max_logprobs[row]) < 0
            else TokenLogprob(logprobs[i], tuple(ids[i * tops : i * tops + k]), tuple(values[i * tops : i * tops + k]))
            for i, row in enumerate(rows)
        ]

    def score(self, plan: Plan) -> list[PromptTold | None]:
        ends = list(accumulate(chunk.stop - chunk.logits_start for chunk in plan.chunks))
        token_ends = list(accumulate(chunk.num_tokens for chunk in plan.chunks))
        found: list[PromptTold | None] = []
        for number in plan.scored:
            row, start, stop, first, _ = plan.chunks[number]
            num_prompt, tops = self._prompts[row]
            if (total := self._sums.get(row)) is not None:
                self.program.pool(*self._pooled, token_ends[number] - (stop - start), stop - start, total.ctypes.data)
                found.append(Embedding(_unit(total).tobytes()) if stop == num_prompt else None)
                continue
            told = self.program.score(row, first, min(stop, num_prompt - 1), ends[number] - (stop - first), tops)
            found.append(PromptLogprobs(first + 1, *told))
        return found

    def logits(self) -> npt.NDArray[np.float32]:
        """The logits of the last step, [rows wanted, vocab]: a view that the next step overwrites. `sample` changes it in place."""
        ld = -(-self._vocab // 16) * 16
        size = self._num_logits * ld
        pointer: Any = (ctypes.c_float * size).from_address(self.program.logits_address())
        pointer.owner = self.program  # the memory lives as long as the view
        flat = np.frombuffer(pointer, dtype=np.float32)
        return flat.reshape(self._num_logits, ld)[:, : self._vocab]

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Force tokens onto a row instead of sampling them (quality runs, tests)."""
        for token in tokens:
            self.program.append(row, token)

    def _set_row(self, new: NewRow) -> None:
        p = new.params
        self._max_logprobs[new.row] = p.logprobs
        self._prompts[new.row] = new.num_prompt, p.prompt_logprobs
        self._sums.pop(new.row, None)
        if p.embed:
            self._sums[new.row] = np.zeros(self.model.config.hidden_size)
        self.program.set_row(
            row=new.row, tokens=new.tokens, num_prompt=new.num_prompt, temperature=p.temperature, top_p=p.top_p, min_p=p.min_p,
            top_k=p.top_k, repetition=p.repetition_penalty, presence=p.presence_penalty, frequency=p.frequency_penalty,
            seed=new.seed & (2**64 - 1), sample_index=new.sample_index, num_logprobs=p.logprobs, min_tokens=p.min_tokens,
            bias_ids=[i for i, _ in p.logit_bias], bias_values=[v for _, v in p.logit_bias], end_ids=list(new.end_token_ids),
        )  # fmt: skip


class _Lowering:
    """Walks the recorded operations and emits fused native ones.

    norm | q, k, v (one linear where adjacent) | rope + KV write | attention | o + residual | norm | gate, up + silu * | down + residual
    """

    def __init__(self, program: Any, model: Model, table: npt.NDArray[np.float32]) -> None:
        self.program = program
        self.model = model
        self.table = table
        shape = model.config
        self.x = program.buffer(shape.hidden_size)
        self.attended = program.buffer(shape.num_heads * shape.head_dim)
        self.offsets = {}
        column = 0
        for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
            self.offsets[name] = column
            column += -(-heads * shape.head_dim // PANEL) * PANEL
        self.qkv = program.buffer(column)
        self.logits = program.buffer(shape.vocab_size)
        self.hidden = self._activations(shape.hidden_size, ("q", "k", "v", "gate_up"), extra=("head",))
        self.context = self._activations(shape.num_heads * shape.head_dim, ("o",))
        self.inner = self._activations(shape.intermediate_size, ("down",))
        self.biases: list[npt.NDArray[np.float32]] = []

    def _activations(self, k: int, names: tuple[str, ...], extra: tuple[str, ...] = ()) -> int:
        formats = {self.model.weights[name].format for name in extra}
        for layer in range(self.model.config.num_layers):
            formats |= {self.model.weights[f"layers.{layer}.{name}"].format for name in names}
        return cast(int, self.program.activations(k, any(f != "bf16" for f in formats), "bf16" in formats))

    def run(self, ops: list[decoder.Op]) -> None:
        selected = False
        parts: list[decoder.Linear] = []  # of q, k, v
        norms, rotary = {"q": 0, "k": 0}, 0  # of the layer at hand
        for i, op in enumerate(ops):
            match op:
                case decoder.Embed():
                    w = self.model.weights[op.weight]
                    self.program.embed(FORMATS[w.format], w.address, w.n, w.k, 1.0, self.x)
                case decoder.Select():
                    selected = True
                case decoder.RmsNorm():
                    self.program.rms_norm(self.x, self._floats(op.weight), op.eps, self.model.config.hidden_size, self.hidden, selected)
                case decoder.Linear(out="q" | "k" | "v"):
                    parts.append(op)
                    if op.out == "v":
                        self._qkv(parts)
                        parts = []
                case decoder.HeadNorm():
                    norms[op.x] = self._floats(op.weight)
                case decoder.Rope():
                    rotary = 2 * self.table.shape[1]
                case decoder.Attention():
                    columns = (self.offsets[name] for name in ("q", "k", "v"))
                    eps, table = self.model.config.norm_eps, self.table.ctypes.data
                    self.program.rope_kv(self.qkv, *columns, norms["q"], norms["k"], eps, table, rotary, op.layer)
                    self.program.attention(self.attended, op.layer)
                    norms, rotary = {"q": 0, "k": 0}, 0
                case decoder.Linear(x="a"):
                    self.program.quantize(self.attended, self.model.config.num_heads * self.model.config.head_dim, self.context)
                    self._linear("o", op.weight, self.context, self.x, ADD)
                case decoder.SiluMul():
                    name = cast(decoder.Linear, ops[i - 2]).weight.removesuffix("gate") + "gate_up"
                    self._linear("gate_up", name, self.hidden, self.inner, SILU_MUL)
                case decoder.Linear(x="g"):
                    self._linear("down", op.weight, self.inner, self.x, ADD)
                case decoder.Linear(out="logits"):
                    self._linear("head", op.weight, self.hidden, self.logits, STORE, selected=True)
        self.program.finish(self.logits)

    def _qkv(self, parts: list[decoder.Linear]) -> None:
        """One linear for each run of parts that lie together in the arena and share a format."""
        segments: list[tuple[Packed, int, int]] = []  # first weight, columns, offset
        for part in parts:
            w: Packed = self.model.weights[part.weight]
            if segments:
                first, columns, offset = segments[-1]
                if first.format == w.format and first.address + _panels(columns) * (first.nbytes // _panels(first.n)) == w.address:
                    segments[-1] = (first, self.offsets[part.out] - offset + w.n, offset)
                    continue
            segments.append((w, w.n, self.offsets[part.out]))
        bias = self._joined_bias(parts)
        for first, columns, offset in segments:
            self.program.linear(
                "qkv", FORMATS[first.format], first.address, columns, first.k, self.hidden, self.qkv, offset, STORE,
                bias.ctypes.data + 4 * offset if bias is not None else 0, False,
            )  # fmt: skip

    def _joined_bias(self, parts: list[decoder.Linear]) -> npt.NDArray[np.float32] | None:
        if parts[0].bias is None:
            return None
        joined = np.zeros(self.offsets["v"] + _panels(self.model.weights[parts[-1].weight].n) * PANEL, dtype=np.float32)
        for part in parts:
            values = self.model.weights[cast(str, part.bias)]
            joined[self.offsets[part.out] : self.offsets[part.out] + len(values)] = values
        self.biases.append(joined)
        return joined

    def _linear(self, name: str, weight: str, act: int, out: int, epilogue: int, selected: bool = False) -> None:
        w: Packed = self.model.weights[weight]
        self.program.linear(name, FORMATS[w.format], w.address, w.n, w.k, act, out, 0, epilogue, 0, selected)

    def _floats(self, name: str) -> int:
        return int(self.model.weights[name].ctypes.data)


def _unit(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The vector at length 1; zeros stay."""
    return (vector / (np.sqrt(vector @ vector) or 1.0)).astype(np.float32)


def _panels(n: int) -> int:
    return -(-n // PANEL)
