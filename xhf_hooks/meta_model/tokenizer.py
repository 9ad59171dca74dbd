"""The tokenizer of a finished run with its chat template; imports nothing that the config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters.base_files import base_file, load_tokenizer
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.meta_model.beside import tokenizer_beside
from xhf_hooks.meta_model.run_config import RunConfig
from xhf_hooks.meta_model.transformers_model import refused_as
from xhf_hooks.system.library_settings import quiet

#: Options of ``from_pretrained`` that change what is saved and execute nothing.
_OPTIONS = (
    *('padding_side', 'truncation_side', 'model_max_length', 'chat_template'),
    *('pad_token', 'eos_token', 'bos_token', 'unk_token'),
)


def tokenizer_of_run(
    config: RunConfig | None, exporter: Exporter, checkpoint: Path, base: str | None, *, trust_remote_code: bool
) -> tuple[Any | None, Sequence[int], list[str]]:
    """The tokenizer or processor to write, the EOS token ids of answers, and warnings for the log.

    What lies beside the checkpoint comes first, then what the run's config names, then what the base has.

    Args:
        base: Folder or hub name given by the user.

    Raises:
        BaseModelError: It cannot be loaded.
    """
    fields = {} if config is None else config.fields
    beside, notes = tokenizer_beside(checkpoint, trust_remote_code=trust_remote_code)
    if beside is not None:
        own = getattr(beside, 'tokenizer', beside)
        if base_file(base or exporter.base_dir, 'tokenizer_config.json') and hasattr(own, 'name_or_path'):
            own.name_or_path = base or exporter.base_dir  # as in training: files are written in the words of the base
    given = fields.get('tokenizer')
    options = given if isinstance(given, Mapping) else {}
    named = options.get('pretrained_model_name_or_path')
    plain = {name: options[name] for name in _OPTIONS if isinstance(options.get(name), (str, int))}
    folders = [folder for folder in (named, base) if isinstance(folder, str)]
    tokenizer = beside
    for folder in folders if tokenizer is None else ():
        with quiet(), refused_as(BaseModelError, f'{folder}: its tokenizer cannot be loaded'):
            tokenizer = tokenizer or load_tokenizer(folder, trust_remote_code=trust_remote_code, **plain)
    if tokenizer is None:
        with quiet(), refused_as(BaseModelError, f'{exporter.base_dir}: its tokenizer cannot be loaded'):
            tokenizer = exporter.base_tokenizer()
    if tokenizer is None:
        where, remedy = (f' in {base}', '') if base else ('', '; set --base to a folder with one')
        return None, [], [*notes, f'no tokenizer was found{where}, so OUT has none{remedy}']
    if not hasattr(tokenizer, 'chat_template') or getattr(tokenizer, 'tokenizer', None) is not None:
        return tokenizer, [], notes  # a processor, or for images alone
    try:
        tokenizer, eos_token_ids, messages = tokenizer_for_run(tokenizer, fields, may_import=False)
        return tokenizer, eos_token_ids, [*notes, *messages]
    except OptionError as error:
        return tokenizer, [], [*notes, f'the chat template of training was not written: {error}']
