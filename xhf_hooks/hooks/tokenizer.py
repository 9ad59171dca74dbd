"""The tokenizer that goes out with the weights. Runs on: rank 0, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters import chat_template as chat_templates
from xhf_hooks.exporters.sidecar import load_tokenizer
from xhf_hooks.registry import BUILDER


def find_tokenizer(runner: Any, option: Any, exporter: Exporter) -> Any | None:
    """Build it from the hook's option, the run's config or the base model, the first that there is.

    Raises:
        OptionError: The option names a folder without one.
    """
    tokenizer = option if option is not None else runner.cfg.get('tokenizer')
    if isinstance(tokenizer, dict):
        return BUILDER.build(dict(tokenizer))
    if isinstance(tokenizer, (str, Path)):
        found = load_tokenizer(str(tokenizer), trust_remote_code=False)
        if found is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', str(tokenizer))
        return found
    if tokenizer is None:
        tokenizer = exporter.base_tokenizer()
    if tokenizer is None:
        runner.logger.warning(
            'HFCheckpointHook: no tokenizer: the config has none, and neither has the base model '
            f'{exporter.base_dir!r}. The folder will hold weights and configs only; set tokenizer'
        )
    return tokenizer


def with_chat_template(runner: Any, tokenizer: Any | None) -> tuple[Any | None, list[int]]:
    """The tokenizer that chats as the run trains, and the ids of what ends its answers."""
    found = chat_templates.template_of_config(runner.cfg)
    if found is None or tokenizer is None:
        return tokenizer, []
    name, template = found
    tokenizer, messages = chat_templates.apply_to_tokenizer(tokenizer, template, name)
    for message in messages:
        runner.logger.info(f'HFCheckpointHook: {message}')
    return tokenizer, chat_templates.stop_token_ids(tokenizer, template)
