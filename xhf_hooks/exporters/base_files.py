"""Finds the base model's files, in a folder or in the local hub cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOKENIZER_FILES = ('tokenizer_config.json', 'tokenizer.json', 'tokenizer.model', 'vocab.json', 'vocab.txt')


def base_file(base_dir: str, name: str) -> Path | None:
    """A file of the base model, from its folder or the local hub cache. Offline."""
    if not base_dir:
        return None
    if Path(base_dir).is_dir():
        path = Path(base_dir) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(base_dir, name)
    except HFValidationError:  # not a valid hub name
        return None
    return Path(cached) if isinstance(cached, str) else None


def load_tokenizer(base_dir: str, *, trust_remote_code: bool) -> Any | None:
    """The base model's tokenizer; None if it has none. Runs on: rank 0."""
    if not any(base_file(base_dir, name) for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_dir, trust_remote_code=trust_remote_code, local_files_only=True)
