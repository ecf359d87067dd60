"""`headrace tokenize`: a text's token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.errors import InvalidRequest, UsageError
from headrace.models.hub import resolve_model
from headrace.text.tokenizer import load_tokenizer


def read_text(file: str) -> str:
    """The whole of a file, or of standard input for `-`. Raises UsageError."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text: byte {error.start}") from None


def run_tokenize(reference: str, file: str, *, as_json: bool) -> None:
    """Raises UsageError or ModelError."""
    path, text = resolve_model(reference), read_text(file)
    tokenizer = load_tokenizer(path)
    try:
        ids = tokenizer.encode(text)
    except InvalidRequest as error:
        raise UsageError(error.message) from None
    if as_json:
        print(json.dumps(ids))
        return
    for token in ids:
        text, _ = tokenizer.piece(token)
        print(f"{token:>7}  {text!r}")
    print(f"{len(ids)} tokens")
