"""The tokenizer of a finished run with its chat template; imports nothing that the config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters.hf_assets import quiet
from xhf_hooks.exporters.tokenizer import load_tokenizer
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.meta_model.run_config import RunConfig
from xhf_hooks.meta_model.transformers_model import refused_as

#: Options of ``from_pretrained`` that change what is saved and execute nothing.
_OPTIONS = (
    *('padding_side', 'truncation_side', 'model_max_length', 'chat_template'),
    *('pad_token', 'eos_token', 'bos_token', 'unk_token'),
)


def tokenizer_of_run(
    config: RunConfig | None, exporter: Exporter, base: str | None, *, trust_remote_code: bool
) -> tuple[Any | None, Sequence[int], list[str]]:
    """The tokenizer to write, the EOS token ids of answers, and warnings for the log.

    Args:
        base: Folder or hub name given by the user; takes precedence over the config.

    Raises:
        BaseModelError: It cannot be loaded.
    """
    fields = {} if config is None else config.fields
    given = fields.get('tokenizer')
    options = given if isinstance(given, Mapping) else {}
    named = options.get('pretrained_model_name_or_path')
    folder = base or (named if isinstance(named, str) else '')
    plain = {name: options[name] for name in _OPTIONS if isinstance(options.get(name), (str, int))}
    with quiet(), refused_as(BaseModelError, f'{folder or exporter.base_dir}: its tokenizer cannot be loaded'):
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code, **plain) or exporter.base_tokenizer()
    if tokenizer is None:
        where, remedy = (f' in {base}', '') if base else ('', '; set --base to a folder with one')
        return None, [], [f'no tokenizer was found{where}, so OUT has none{remedy}']
    try:
        tokenizer, eos_token_ids, messages = tokenizer_for_run(tokenizer, fields, may_import=False)
        return tokenizer, eos_token_ids, [*messages]
    except OptionError as error:
        return tokenizer, [], [f'the chat template of training was not written: {error}']
