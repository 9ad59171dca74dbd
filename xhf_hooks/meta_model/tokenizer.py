"""The tokenizer of a finished run with its chat template; imports nothing that the config names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xhf_hooks.errors import BaseModelError, OptionError, XhfError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters.tokenizer import load_tokenizer
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.meta_model.parse_config import parse_config
from xhf_hooks.meta_model.run_config import RunConfig
from xhf_hooks.meta_model.transformers_model import in_one_line
from xhf_hooks.model import quiet

#: Options of ``from_pretrained`` that change what is saved and execute nothing.
_OPTIONS = (
    *('padding_side', 'truncation_side', 'model_max_length', 'chat_template'),
    *('pad_token', 'eos_token', 'bos_token', 'unk_token'),
)
_TEMPLATE_NAME = re.compile(r'(?:xtuner\.utils\.(?:templates\.)?)?(?:PROMPT_TEMPLATE\.)?(\w+)')


def tokenizer_of_run(
    config: RunConfig | None, exporter: Exporter, base: str | None, *, trust_remote_code: bool
) -> tuple[Any | None, Sequence[int], list[str]]:
    """The tokenizer to write, the EOS token ids of answers, and warnings for the log.

    Args:
        base: Folder or hub name given by the user; takes precedence over the config.
    """
    tokenizer, warnings = _load(config, exporter, base, trust_remote_code)
    if tokenizer is None:
        note = 'no tokenizer was found, so OUT has none; set --base to a folder with one'
        return None, [], [*warnings, note if base is None else f'no tokenizer was found in {base}, so OUT has none']
    if config is None:
        return tokenizer, [], warnings
    try:
        tokenizer, eos_token_ids, messages = tokenizer_for_run(tokenizer, _with_templates(config.fields))
        return tokenizer, eos_token_ids, [*warnings, *messages]
    except OptionError as error:
        return tokenizer, [], [*warnings, f'the chat template of training was not written: {error}']


def _load(
    config: RunConfig | None, exporter: Exporter, base: str | None, trust_remote_code: bool
) -> tuple[Any | None, list[str]]:
    """The tokenizer in the folder, else the base model's; and warnings."""
    folder = base or (config.tokenizer_folder() if config is not None else None)
    where = folder or exporter.base_dir
    try:
        with quiet():
            tokenizer = None if folder is None else load_tokenizer(folder, trust_remote_code=trust_remote_code)
            return exporter.base_tokenizer() if tokenizer is None else _with_options(tokenizer, config), []
    except (XhfError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, ImportError) or 'trust_remote_code' not in str(error):
            raise BaseModelError(f'{where}: its tokenizer cannot be loaded ({in_one_line(error)})') from None
        return None, [f'{where}: the tokenizer has custom code; if you trust it, add --trust-remote-code']


def _with_options(tokenizer: Any, config: RunConfig | None) -> Any:
    options = {} if config is None else config.fields.get('tokenizer')
    for name in _OPTIONS if isinstance(options, Mapping) else ():
        if isinstance(options.get(name), (str, int)):
            setattr(tokenizer, name, options[name])
            tokenizer.init_kwargs[name] = options[name]
    return tokenizer


def _with_templates(value: Any, key: str = '') -> Any:
    """A copy of the config with names of XTuner's templates replaced by the templates.

    Raises:
        OptionError: XTuner has no such template, or is not installed.
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
    """XTuner's PROMPT_TEMPLATE, parsed: importing XTuner takes many seconds."""
    found = find_spec('xtuner')
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder) / 'utils' / 'templates.py'
        if file.is_file():
            templates = parse_config(file.read_text(encoding='utf-8'), str(file)).get('PROMPT_TEMPLATE')
            return templates if isinstance(templates, Mapping) else {}
    return {}
