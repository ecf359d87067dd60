"""`headrace inspect`: what a model is and what it needs, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Any, cast

from headrace.config import Level
from headrace.models.hub import resolve_model
from headrace.models.inspect import inspect_model
from headrace.models.ledger import format_bytes


def run_inspect(reference: str | None, level: str, memory: str, *, as_json: bool) -> None:
    """Raises UsageError or ModelError."""
    from headrace.cli.engine_process import memory_budget

    told = inspect_model(resolve_model(reference), memory_budget(memory), cast("Level", level))
    if as_json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(told):
        table.add_row(name, text)
    console.print(table)
    if told.get("fits"):
        fits = Table(
            "context", "sequences", title=f"in {format_bytes(told['budget'])}, level {told['level']}", title_justify="left", box=None
        )
        for row in told["fits"]:
            fits.add_row(str(row["context"]), str(row["sequences"]))
        console.print(fits)


def _rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    size = sum(file["bytes"] for file in told["files"])
    rows = [("model", told["name"]), ("file", f"{told['path']} ({told['format']}, {format_bytes(size)})")]
    if vocabulary := told.get("vocabulary"):
        kind = "/".join(part for part in (vocabulary["kind"], vocabulary["pre_tokenizer"]) if part)
        template = "with" if vocabulary["chat_template"] else "no"
        rows.append(("vocabulary", f"{vocabulary['tokens']} tokens, {kind}, {template} chat template"))
    if told.get("vocabulary_only"):
        return [*rows, ("weights", "none: this file holds a vocabulary only")]
    config = told["config"]
    rows += [
        ("architecture", f"{told['architecture']}, {told['parameters'] / 1e6:,.1f} M parameters"),
        (
            "shape",
            f"{config['num_layers']} layers, hidden {config['hidden_size']}, {config['num_heads']} heads ({config['num_kv_heads']} for KV) "
            f"of {config['head_dim']}, feed-forward {config['intermediate_size']}, context {config['context_length']}",
        ),
        *(
            (f"tensors {kind}", f"{entry['tensors']} with {entry['values'] / 1e6:,.1f} M values, {format_bytes(entry['bytes'])}")
            for kind, entry in told["tensors"].items()
        ),
        ("loaded", ", ".join(f"{level} {format_bytes(count)}" for level, count in told["packed_bytes"].items())),
        ("KV cache", f"{format_bytes(told['kv_bytes_per_token'])} a token, blocks of {told['block_tokens']} tokens"),
    ]
    return rows
