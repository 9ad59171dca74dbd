"""The tokenizer of a finished run with its chat template; imports nothing that the config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.base_files import PROCESSOR_FILES, base_file, load_tokenizer
from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters.find_model import pretrained_in
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.format.text import error_text
from xhf_hooks.meta_model.beside import folder_beside
from xhf_hooks.meta_model.run_config import RunConfig
from xhf_hooks.meta_model.transformers_model import refused_as
from xhf_hooks.model import token_embeddings
from xhf_hooks.system.library_settings import quiet

#: Which tokenizers of every kind save.
_SAVED = 'tokenizer_config.json'
#: Options of ``from_pretrained`` that change what is saved and execute nothing.
_OPTIONS = (
    'padding_side',
    'truncation_side',
    'model_max_length',
    'chat_template',
    'pad_token',
    'eos_token',
    'bos_token',
    'unk_token',
)


def tokenizer_of_run(
    config: RunConfig | None,
    module: nn.Module,
    exporter: Exporter,
    checkpoint: Path,
    base: str | None,
    *,
    trust_remote_code: bool,
) -> tuple[Any | None, Sequence[int], list[str]]:
    """The tokenizer or processor to write, the EOS token ids of answers, and warnings for the log.

    What lies beside the checkpoint comes first, then what the run's config names, then what the base has.

    Args:
        module: The meta model.
        base: Folder or hub name given by the user.

    Raises:
        BaseModelError: It cannot be loaded, or has tokens whose embeddings nobody saved.
    """
    base_dir = base or exporter.base_dir
    tokenizer, notes = _beside(checkpoint, base_dir, trust_remote_code)
    if tokenizer is not None:
        _require_embeddings(tokenizer, module, exporter, checkpoint)
    fields = {} if config is None else config.fields
    given = fields.get('tokenizer')
    options = given if isinstance(given, Mapping) else {}
    plain = {name: options[name] for name in _OPTIONS if isinstance(options.get(name), (str, int))}
    for folder in (options.get('pretrained_model_name_or_path'), base, exporter.base_dir):
        if tokenizer is None and isinstance(folder, str):
            with quiet(), refused_as(BaseModelError, f'{folder}: its tokenizer cannot be loaded'):
                tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code, **plain)
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


def _beside(checkpoint: Path, base_dir: str, trust_remote_code: bool) -> tuple[Any | None, list[str]]:
    """The tokenizer or processor beside the checkpoint, None if there is none; and notes for the log."""
    folder = folder_beside(checkpoint, _SAVED, *PROCESSOR_FILES)
    if folder is None:
        return None, []
    found, notes = None, []
    with quiet(), refused_as(BaseModelError, f'{folder}: its tokenizer cannot be loaded'):
        if any((folder / name).is_file() for name in PROCESSOR_FILES):
            from transformers import AutoProcessor

            options = {'local_files_only': True, 'trust_remote_code': trust_remote_code}
            try:
                found = AutoProcessor.from_pretrained(folder, **options)
            except Exception as error:  # of a package that is missing here, for example
                told = f"{folder}: its processor cannot be loaded here, so OUT gets the base's, if any"
                notes = [f'{told} ({error_text(error)})']
        if found is None:
            found = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    tokenizer = getattr(found, 'tokenizer', found)
    if tokenizer is not None and hasattr(tokenizer, 'name_or_path') and base_file(base_dir, _SAVED):
        tokenizer.name_or_path = base_dir  # as in training: files are written in the words of the base
    return found, notes


def _require_embeddings(tokenizer: Any, module: nn.Module, exporter: Exporter, checkpoint: Path) -> None:
    """Refuse a tokenizer with more tokens than the base, of which the checkpoint has no embeddings."""
    tokenizer = getattr(tokenizer, 'tokenizer', tokenizer)
    weights = [weight for part in pretrained_in(module).values() for weight in token_embeddings(part)]
    n_rows = max((weight.shape[0] for weight in weights), default=None)
    if n_rows is None or not hasattr(tokenizer, '__len__') or len(tokenizer) <= n_rows:
        return
    if len(tokenizer) > exporter.n_base_tokens:
        raise BaseModelError(
            f'the tokenizer beside {checkpoint} has {len(tokenizer)} tokens, but the embeddings of {exporter.base_dir} '
            f'have {n_rows} rows, and the checkpoint has no others: if training added rows, nobody saved them (Trainer '
            f'saves frozen embeddings nowhere at ZeRO-3). Give with --base the model with the rows that it had then'
        )
