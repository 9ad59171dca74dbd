"""The tokenizer of a finished run with its chat template; imports nothing that the config names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.base_model.files import PROCESSOR_FILES, LocatedBase, find_base_folder
from xhf_hooks.base_model.tokenizer import load_tokenizer
from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.exporters.find_model import pretrained_in
from xhf_hooks.format.text import error_text, some
from xhf_hooks.meta_model.run_config import RunConfig, Unread
from xhf_hooks.meta_model.trainer_files import config_folder, folder_of_trainer_files, is_save_of_hook
from xhf_hooks.meta_model.transformers_model import refused_as
from xhf_hooks.model import token_embeddings
from xhf_hooks.sources.checkpoint.find import FoundCheckpoint
from xhf_hooks.system.library_settings import quiet

#: Which tokenizers of every kind save.
_SAVED = 'tokenizer_config.json'
#: Options of ``from_pretrained`` that say where a tokenizer is, and whether its code may run.
_OF_LOADING = re.compile(
    r'type|pretrained_model_name_or_path|trust_remote_code|cache_dir|force_download|local_files_only|proxies|token'
    r'|resume_download|(code_)?revision|subfolder|use_auth_token|config|.*_files?'
)


def tokenizer_of_run(
    config: RunConfig | None,
    module: nn.Module,
    exporter: Exporter,
    found: FoundCheckpoint,
    base: str | None,
    *,
    trust_remote_code: bool,
) -> tuple[Any | None, Sequence[int], list[str]]:
    """The tokenizer or processor to write, the EOS token ids of answers, and warnings for the log.

    The tokenizer beside the checkpoint comes first, then the one that the run's config names, then the base's. If a
    save of the hook has a tokenizer with more tokens than that, and the embeddings have rows for them, training added
    them, and the save's is written.

    Args:
        module: The meta model.
        base: Folder or hub name given by the user.

    Raises:
        BaseModelError: It cannot be loaded, or has tokens whose embeddings nobody saved.
    """
    bases = [*([LocatedBase.locate(base)] if base else []), exporter.base_model]
    tokenizer, notes = _beside(found, base, bases[0], trust_remote_code)
    if tokenizer is not None:
        _require_embeddings(tokenizer, module, exporter, found.path)
    fields = {} if config is None else config.fields
    recipe = fields.get('tokenizer')
    plain, lost = _plain_options(recipe if isinstance(recipe, Mapping) else {})
    if tokenizer is None and config is not None and recipe is not None:
        tokenizer, problem = _of_config(recipe, plain, trust_remote_code)
        folder = recipe.get('pretrained_model_name_or_path') if isinstance(recipe, Mapping) else None
        if problem:
            notes.append(f'the tokenizer of {config.where} is not written: {problem}')
        elif base is not None and folder != base:
            notes.append(f'the tokenizer is that of {config.where} ({folder}), not that of {base}')
        if lost:
            notes.append(f'options of the tokenizer of {config.where} that are not read: {some(lost)}')
    for each in bases:
        if tokenizer is None and each.name:
            with quiet(), refused_as(BaseModelError, f'{each.name}: its tokenizer cannot be loaded'):
                tokenizer = load_tokenizer(each, trust_remote_code=trust_remote_code, **plain)
            if tokenizer is not None and recipe is not None:
                notes.append(f'the tokenizer of {each.name} is written')
    if tokenizer is None:
        where, remedy = (f' in {base}', '') if base else ('', '; set --base to a folder with one')
        return None, [], [*notes, f'no tokenizer was found{where}, so OUT has none{remedy}']
    saved = _with_added_tokens(tokenizer, module, found, trust_remote_code)
    if saved is not None:
        return saved, [], [*notes, f'the tokenizer is that of {saved.name_or_path}, which has tokens of training']
    if not hasattr(tokenizer, 'chat_template') or getattr(tokenizer, 'tokenizer', None) is not None:
        return tokenizer, [], notes  # a processor, or for images alone
    try:
        tokenizer, eos_token_ids, messages = exporter.with_chat_template_of_training(tokenizer, may_import=False)
        return tokenizer, eos_token_ids, [*notes, *messages]
    except OptionError as error:
        return tokenizer, [], [*notes, f'the chat template of training was not written: {error}']


def _plain_options(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options of ``from_pretrained`` in a config that are plain values, and the names of the others."""
    options = {name: value for name, value in recipe.items() if not _OF_LOADING.fullmatch(name)}
    plain = {name: value for name, value in options.items() if _is_plain(value)}
    return plain, [name for name in options if name not in plain]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_plain, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, (str, int, float, bool, type(None)))


def _of_config(recipe: Any, plain: Mapping[str, Any], trust_remote_code: bool) -> tuple[Any | None, str]:
    """The tokenizer that a config describes; or None, and why it is not read."""
    folder = recipe.get('pretrained_model_name_or_path') if isinstance(recipe, Mapping) else recipe
    if isinstance(folder, Unread):
        return None, f'it is {folder.text!r} (line {folder.line}), which is not run'
    if not isinstance(folder, str):
        kind = recipe.get('type') if isinstance(recipe, Mapping) else type(recipe).__name__
        return None, f'it is of the type {getattr(kind, "text", kind)}, not one of transformers'
    if find_base_folder(folder) is None:
        return None, f'{folder!r} is no folder here and not in the cache'
    try:
        with quiet():
            tokenizer = load_tokenizer(LocatedBase.locate(folder), trust_remote_code=trust_remote_code, **plain)
    except Exception as error:  # of any type, from a tokenizer library; the base may have a tokenizer that works
        return None, f'{folder} cannot be loaded ({error_text(error)})'
    return tokenizer, '' if tokenizer is not None else f'{folder} has no files of a tokenizer'


def _beside(
    checkpoint: FoundCheckpoint, base: str | None, base_model: LocatedBase, trust_remote_code: bool
) -> tuple[Any | None, list[str]]:
    """The tokenizer or processor beside the checkpoint, None if there is none; and notes for the log.

    Args:
        base: The value of ``--base``.
        base_model: The base model, in whose words the tokenizer is written.
    """
    folder = folder_of_trainer_files(checkpoint, _SAVED, *PROCESSOR_FILES)
    if folder is None:
        return None, []
    found, notes = None, []
    of_base = None if base is None else find_base_folder(base)
    if of_base is not None and not of_base.samefile(folder) and (of_base / _SAVED).is_file():
        notes.append(f'the tokenizer is that of {folder}, beside the checkpoint, not that of {base}')
    with quiet(), refused_as(BaseModelError, f'{folder}: its tokenizer cannot be loaded'):
        if any((folder / name).is_file() for name in PROCESSOR_FILES):
            from transformers import AutoProcessor

            options = {'local_files_only': True, 'trust_remote_code': trust_remote_code}
            try:
                found = AutoProcessor.from_pretrained(folder, **options)
            except Exception as error:  # of any type, from custom code; or a package is missing here
                problem = f"{folder}: its processor cannot be loaded here, so OUT gets the base's, if any"
                notes.append(f'{problem} ({error_text(error)})')
        if found is None:
            found = load_tokenizer(LocatedBase.locate(str(folder)), trust_remote_code=trust_remote_code)
    tokenizer = getattr(found, 'tokenizer', found)
    if tokenizer is not None and hasattr(tokenizer, 'name_or_path') and base_model.find_file(_SAVED):
        tokenizer.name_or_path = base_model.name  # as in training: files are written in the words of the base
    return found, notes


def _with_added_tokens(
    tokenizer: Any, module: nn.Module, found: FoundCheckpoint, trust_remote_code: bool
) -> Any | None:
    """The tokenizer of the newest save of the hook, if training added tokens to this one; None if not."""
    folder = config_folder(found)
    if folder is None or not is_save_of_hook(folder) or not hasattr(tokenizer, '__len__'):
        return None
    try:
        with quiet():
            saved = load_tokenizer(LocatedBase.locate(str(folder)), trust_remote_code=trust_remote_code)
    except Exception:  # of any type, from a tokenizer library; the one that was found works
        return None
    n_rows = _n_embeddings(module)
    return saved if saved is not None and n_rows is not None and len(tokenizer) < len(saved) <= n_rows else None


def _n_embeddings(module: nn.Module) -> int | None:
    """The number of rows of the model's embeddings; None if it has none."""
    weights = [weight for part in pretrained_in(module).values() for weight in token_embeddings(part)]
    return max((weight.shape[0] for weight in weights), default=None)


def _require_embeddings(tokenizer: Any, module: nn.Module, exporter: Exporter, checkpoint: Path) -> None:
    """Refuse a tokenizer with more tokens than the base, of which the checkpoint has no embeddings."""
    tokenizer = getattr(tokenizer, 'tokenizer', tokenizer)
    n_rows = _n_embeddings(module)
    if n_rows is None or not hasattr(tokenizer, '__len__') or len(tokenizer) <= n_rows:
        return
    if len(tokenizer) > exporter.n_base_tokens:
        raise BaseModelError(
            f'the tokenizer beside {checkpoint} has {len(tokenizer)} tokens, but the embeddings of '
            f'{exporter.base_model.name} have {n_rows} rows, and the checkpoint has no others: if training added rows, '
            f'nobody saved them (Trainer saves frozen embeddings nowhere at ZeRO-3). Give with --base the model with '
            f'the rows that it had then'
        )
