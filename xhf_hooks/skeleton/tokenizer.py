"""The tokenizer of a finished run, chatting as the run was trained, without importing what its config names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters import Exporter, chat_template
from xhf_hooks.exporters.sidecar import load_tokenizer
from xhf_hooks.skeleton.config_text import parse_config
from xhf_hooks.skeleton.run_config import RunConfig

#: Options of ``from_pretrained`` that change what is saved, and run nothing.
_OPTIONS = (
    *('padding_side', 'truncation_side', 'model_max_length', 'chat_template'),
    *('pad_token', 'eos_token', 'bos_token', 'unk_token'),
)
_TEMPLATE_NAME = re.compile(r'(?:xtuner\.utils\.(?:templates\.)?)?(?:PROMPT_TEMPLATE\.)?(\w+)')


def find_tokenizer(
    config: RunConfig | None, exporter: Exporter, base: str | None, *, trust_remote_code: bool
) -> tuple[Any | None, list[int], list[str]]:
    """The tokenizer to write, the tokens that end an answer, and warnings for the log.

    Args:
        base: Given by the user, instead of what the config names.
    """
    tokenizer, warnings = _load(config, exporter, base, trust_remote_code)
    if tokenizer is None:
        where = 'set --base' if base is None else f'{base} has none'
        return None, [], [*warnings, f'no tokenizer was found: the folder holds weights and configs only; {where}']
    if config is None:
        return tokenizer, [], warnings
    try:
        found = chat_template.template_of_config(_with_templates(config.fields))
        if found is None:
            return tokenizer, [], warnings
        name, template = found
        tokenizer, messages = chat_template.apply_to_tokenizer(tokenizer, template, name)
        return tokenizer, chat_template.stop_token_ids(tokenizer, template), [*warnings, *messages]
    except OptionError as error:
        return tokenizer, [], [*warnings, f'the chat template of training is not written: {error}']


def _load(
    config: RunConfig | None, exporter: Exporter, base: str | None, trust_remote_code: bool
) -> tuple[Any | None, list[str]]:
    folder = base or (config.tokenizer_folder() if config is not None else None)
    if folder is not None:
        try:
            tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            if 'trust_remote_code' not in str(error):
                raise BaseModelError(f'{folder}: its tokenizer cannot be loaded ({error})') from None
            return None, [f'{folder}: its tokenizer has code of its own; if you trust it, add --trust-remote-code']
        if tokenizer is not None:
            return _with_options(tokenizer, config), []
    return exporter.base_tokenizer(), []


def _with_options(tokenizer: Any, config: RunConfig | None) -> Any:
    options = {} if config is None else config.fields.get('tokenizer')
    for name in _OPTIONS if isinstance(options, Mapping) else ():
        if isinstance(options.get(name), (str, int)):
            setattr(tokenizer, name, options[name])
            tokenizer.init_kwargs[name] = options[name]
    return tokenizer


def _with_templates(value: Any, key: str = '') -> Any:
    """A copy of the config with XTuner's templates in the place of their names.

    Raises:
        OptionError: The name is not one of XTuner's, or XTuner is not installed.
    """
    if isinstance(value, Mapping):
        return {name: _with_templates(item, name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_templates(item) for item in value]
    if key in ('template', 'prompt_template') and isinstance(value, str):
        name = _TEMPLATE_NAME.fullmatch(value)
        templates = _xtuner_templates()
        if name is None or name[1] not in templates:
            raise OptionError('prompt_template', f'one of {sorted(templates)} (xtuner must be installed)', value)
        return templates[name[1]]
    return value


def _xtuner_templates() -> Mapping[str, Any]:
    """XTuner's PROMPT_TEMPLATE, read and not imported, which would take many seconds."""
    found = find_spec('xtuner')
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder) / 'utils' / 'templates.py'
        if file.is_file():
            templates = parse_config(file.read_text(encoding='utf-8'), str(file)).get('PROMPT_TEMPLATE')
            return templates if isinstance(templates, Mapping) else {}
    return {}
