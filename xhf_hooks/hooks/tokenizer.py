"""What the config of an XTuner run adds to the tokenizer. Runs on: rank 0, before training."""

from __future__ import annotations

from typing import Any

from xhf_hooks.exporters.xtuner import chat_template as chat_templates
from xhf_hooks.telemetry.log import RunLog


def with_chat_template(config: Any, tokenizer: Any | None, log: RunLog) -> tuple[Any | None, list[int]]:
    """The tokenizer that chats as the run trains, and the ids of what ends its answers."""
    found = chat_templates.template_of_config(config)
    if found is None or tokenizer is None:
        return tokenizer, []
    name, template = found
    tokenizer, messages = chat_templates.apply_to_tokenizer(tokenizer, template, name)
    for message in messages:
        log.info(message)
    return tokenizer, chat_templates.eos_token_ids(tokenizer, template)
