"""The tokenizer that is written with the weights. Runs on: rank 0, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters.base_files import load_tokenizer
from xhf_hooks.registry import build_from_config


def find_tokenizer(option: Any | None, of_the_run: Any | None, exporter: Exporter) -> tuple[Any | None, list[str]]:
    """The tokenizer of the option, else of the run, else of the base model.

    Returns:
        The tokenizer or None, and warnings.

    Raises:
        OptionError: The option names a folder without tokenizer files.
    """
    tokenizer = option if option is not None else of_the_run
    if isinstance(tokenizer, dict):
        return build_from_config(tokenizer), []
    if isinstance(tokenizer, (str, Path)):
        found = load_tokenizer(str(tokenizer), trust_remote_code=False)
        if found is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', str(tokenizer))
        return found, []
    if tokenizer is None:
        tokenizer = exporter.base_tokenizer()
    if tokenizer is not None:
        return tokenizer, []
    base = f'the base model {exporter.base_dir!r}' if exporter.base_dir else 'a base model'
    warning = f'no tokenizer will be saved: neither the run nor {base} has one; set the option tokenizer'
    return None, [warning]
