"""Which tokenizer or processor belongs to a run: its own, else that of the base. For hook and converter alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters.assets.base_files import LocatedBase, find_base_folder
from xhf_hooks.exporters.assets.load_tokenizer import (
    CopiedFiles,
    CopiedPart,
    PartAndTokenizer,
    kind_of_part,
    load_from_folder,
    load_or_copy_tokenizer,
    load_processor,
    load_tokenizer,
    tokenizer_in,
)
from xhf_hooks.format.loaded_files import TOKENIZER_CONFIG
from xhf_hooks.format.text import error_text, refused_as, some
from xhf_hooks.registry import CHAT_TEMPLATES, build_from_config
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from torch import nn

    from xhf_hooks.exporters.base import Exporter

#: Options of ``from_pretrained`` that say where a tokenizer is, and whether its code may run.
_OF_LOADING = re.compile(
    r'type|pretrained_model_name_or_path|trust_remote_code|cache_dir|force_download|local_files_only|proxies|token'
    r'|resume_download|(code_)?revision|subfolder|use_auth_token|config|.*_files?'
)


def find_tokenizer(
    option: Any | None, of_the_run: Any | None, exporter: Exporter, whole: nn.Module | None = None
) -> tuple[Any | None, list[str]]:
    """The tokenizer of the option, else of the run, else of the base model; and warnings.

    If the run has none, or only a recipe for one (a config, a folder), ``whole.tokenizer`` or ``whole.processor``
    counts as the run's: tokens may have been added to it. An image processor or feature extractor alone is completed
    with the other parts of the base's processor.

    Args:
        whole: The trained model, which may have a tokenizer of its own.

    Raises:
        OptionError: The option, or the run, names a folder without tokenizer files.
    """
    is_none_or_recipe = of_the_run is None or isinstance(of_the_run, (dict, str, Path))
    of_model = None if whole is None or not is_none_or_recipe else tokenizer_of_model(whole)
    of_the_run = of_the_run if of_model is None else of_model
    found = of_the_run if option is None else option
    # If it is unknown which of several cached revisions of the base was loaded, base_tokenizer() gives none
    warnings = exporter.warn_of_revisions()
    where = base = f'the base model {exporter.base_model.name!r}' if exporter.base_model.name else 'a base model'
    if isinstance(found, (str, Path)):
        folder = LocatedBase.locate(str(found))
        found, where = load_from_folder(folder, trust_remote_code=False), repr(folder.name)
        if found is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', folder.name)
    elif isinstance(found, dict):
        found = _build(found)
    problem = f'neither the run nor {base} has one'
    is_refused = not (found is None or hasattr(found, 'save_pretrained') or isinstance(found, PartAndTokenizer))
    if is_refused:
        kind = f'{type(found).__module__}.{type(found).__qualname__}'
        warnings.append(f"the run's tokenizer is a {kind}, not one of transformers: it is not saved")
    if found is None or is_refused:
        found = exporter.base_tokenizer()
        if found is not None and is_refused:
            warnings.append(f'the tokenizer of {base} will be saved')
    elif kind_of_part(found):
        problem, where = f'that of the run is a {type(found).__name__}, and {base} has none', base
        found = _with_parts_of_base(found, exporter)
    if exporter.has_vocabulary and (found is None or kind_of_part(found)):
        warnings.append(f'no tokenizer will be saved: {problem}; set the option tokenizer')
    return found, warnings + _notes_on_copies(found, where)


def tokenizer_of_model(model: nn.Module) -> Any | None:
    """``model.tokenizer`` or ``model.processor``, if it is one of transformers; else that of a module in the model."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    parts = [model, *model.children()]  # sentence-transformers has it in its first module
    found = (vars(part).get(name) for part in parts for name in ('processor', 'tokenizer'))
    return next((one for one in found if isinstance(one, (PreTrainedTokenizerBase, ProcessorMixin))), None)


def tokenizer_for_run(
    tokenizer: Any | None, config: Mapping[str, Any], *, may_import: bool = True
) -> tuple[Any | None, Sequence[int], Sequence[str]]:
    """The tokenizer to write for a run with this config, the EOS token ids of answers, and messages for the log.

    It gets the chat template with which the run trained, if an extension finds one in the config. Runs on: rank 0.

    Args:
        may_import: Whether to import what the config names.

    Raises:
        OptionError: The config names a template that cannot be used.
    """
    found = (convert(tokenizer, config, may_import=may_import) for convert in CHAT_TEMPLATES.last_first())
    return next(filter(None, found), (tokenizer, (), ()))


def find_tokenizer_of_checkpoint(
    exporter: Exporter,
    *,
    beside: Path | None,
    recipe: Any | None,
    config: str,
    base: str | None,
    newest_save: Path | None,
    n_rows: int | None,
    trust_remote_code: bool,
) -> tuple[Any | None, list[str]]:
    """The tokenizer or processor of a finished run, and notes for the log.

    The one beside the checkpoint comes first, then the one that the run's config names, then the base's. If a save of
    the hook has a tokenizer with more tokens than that, and the embeddings have rows for them, training added them, and
    the save's is written.

    Args:
        beside: A folder of the run that has a tokenizer or a processor.
        recipe: What the run's config has as its tokenizer. Nothing that it names is imported.
        config: The run's config, for messages.
        base: Folder or hub name given by the user, which comes before the base of the model.
        newest_save: The newest save of the hook in this run.
        n_rows: Rows of the model's embeddings.
        trust_remote_code: Whether the code of a tokenizer may run.

    Raises:
        BaseModelError: It cannot be loaded.
    """
    bases = [*([LocatedBase.locate(base)] if base else []), exporter.base_model]
    found: Any = None
    notes: list[str] = []
    if beside is not None:
        found, notes = _load_beside(beside, base, bases[0], trust_remote_code)
        if kind_of_part(found):
            found = _with_parts_of_base(found, exporter)
    options, lost = _plain_options(recipe if isinstance(recipe, Mapping) else {})
    if found is None and recipe is not None:
        found, folder, problem = _load_of_config(recipe, options, trust_remote_code)
        if problem:
            notes.append(f'the tokenizer of {config} is not written: {problem}')
        elif base is not None and folder != base:
            notes.append(f'the tokenizer is that of {config} ({folder}), not that of {base}')
        if lost:
            notes.append(f'options of the tokenizer of {config} that are not read: {some(lost)}')
    for each in bases:
        if found is None and each.name:
            with quiet(), refused_as(BaseModelError, f'{each.name}: its tokenizer cannot be loaded'):
                found = load_or_copy_tokenizer(each, trust_remote_code=trust_remote_code, **options)
            if found is not None and recipe is not None:
                notes.append(f'the tokenizer of {each.name} is written')
            notes += _notes_on_copies(found, each.name)
    if found is None or (kind_of_part(found) and exporter.has_vocabulary):
        where, remedy = (f' in {base}', '') if base else ('', '; set --base to a folder with one')
        notes.append(f'no tokenizer was found{where}, so OUT has none{remedy}')
    saved = _with_added_tokens(found, newest_save, n_rows, trust_remote_code)
    if saved is not None:
        return saved, [*notes, f'the tokenizer is that of {newest_save}, which has tokens of training']
    return found, notes


def _with_parts_of_base(part: Any, exporter: Exporter) -> Any:
    """The base's processor with this part in place of its own; without a processor, the part and the base's tokenizer.

    The part alone if the base has no tokenizer.
    """
    processor = load_processor(exporter.base_model, trust_remote_code=exporter.trusts_code)
    if getattr(processor, 'tokenizer', None) is not None:
        for name, own in vars(processor).items():
            if kind_of_part(own) == kind_of_part(part):
                processor = copy.copy(processor)
                setattr(processor, name, part)
                return processor
    tokenizer = exporter.base_tokenizer()
    return part if tokenizer is None else PartAndTokenizer(part, tokenizer)


def _notes_on_copies(found: Any | None, where: str) -> list[str]:
    """A note if the tokenizer is copied and not loaded."""
    tokenizer = tokenizer_in(found)
    if not isinstance(tokenizer, CopiedFiles) or kind_of_part(tokenizer):
        return []
    return [f'the tokenizer of {where} is copied as it is: {tokenizer.reason}']


def _load_beside(
    folder: Path, base: str | None, base_model: LocatedBase, trust_remote_code: bool
) -> tuple[Any | None, list[str]]:
    """The tokenizer or processor in a folder of the run, and notes.

    Args:
        base: The folder or hub name given by the user.
        base_model: The base model, in whose words the tokenizer is written.
    """
    notes = []
    of_base = None if base is None else find_base_folder(base)
    if of_base is not None and not of_base.samefile(folder) and (of_base / TOKENIZER_CONFIG).is_file():
        notes.append(f'the tokenizer is that of {folder}, beside the checkpoint, not that of {base}')
    with quiet(), refused_as(BaseModelError, f'{folder}: its tokenizer cannot be loaded'):
        found = load_from_folder(LocatedBase.locate(str(folder)), trust_remote_code=trust_remote_code)
    if isinstance(getattr(found, 'part', found), CopiedPart):
        notes.append(f'{folder}: its processor cannot be loaded here, so its files are copied')
    tokenizer = tokenizer_in(found)
    if hasattr(tokenizer, 'name_or_path') and base_model.find_file(TOKENIZER_CONFIG):
        tokenizer.name_or_path = base_model.name  # as in training: files are written in the words of the base
    return found, [*notes, *_notes_on_copies(found, str(folder))]


def _plain_options(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options of ``from_pretrained`` in a config that are plain values, and the names of the others."""
    options = {name: value for name, value in recipe.items() if not _OF_LOADING.fullmatch(name)}
    plain = {name: value for name, value in options.items() if _is_plain(value)}
    return plain, [name for name in options if name not in plain]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_plain, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, (str, int, float, bool, type(None)))


def _load_of_config(
    recipe: Any, options: Mapping[str, Any], trust_remote_code: bool
) -> tuple[Any | None, str | None, str]:
    """The tokenizer that a config describes, or None; its folder; and why it is not read."""
    folder: Any = recipe.get('pretrained_model_name_or_path') if isinstance(recipe, Mapping) else recipe
    if hasattr(folder, 'line'):  # an expression, which RunConfig does not evaluate
        return None, None, f'it is {folder.text!r} (line {folder.line}), which is not run'
    if not isinstance(folder, str):
        kind = recipe.get('type') if isinstance(recipe, Mapping) else type(recipe).__name__
        return None, None, f'it is of the type {getattr(kind, "text", kind)}, not one of transformers'
    if find_base_folder(folder) is None:
        return None, folder, f'{folder!r} is no folder here and not in the cache'
    try:
        with quiet():
            found = load_tokenizer(LocatedBase.locate(folder), trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # of any type, from a tokenizer library; the base may have a tokenizer that works
        return None, folder, f'{folder} cannot be loaded ({error_text(error)})'
    return found, folder, '' if found is not None else f'{folder} has no files of a tokenizer'


def _with_added_tokens(
    tokenizer: Any, newest_save: Path | None, n_rows: int | None, trust_remote_code: bool
) -> Any | None:
    """The tokenizer of the newest save of the hook, if training added tokens to this one; None if not."""
    if newest_save is None or n_rows is None or not hasattr(tokenizer, '__len__'):
        return None
    try:
        with quiet():
            saved = load_tokenizer(LocatedBase.locate(str(newest_save)), trust_remote_code=trust_remote_code)
    except Exception:  # of any type, from a tokenizer library; the one that was found works
        return None
    return saved if saved is not None and len(tokenizer) < len(saved) <= n_rows else None


def _build(recipe: Mapping[str, Any]) -> Any:
    """Build the tokenizer that a run's config describes. Runs on: rank 0.

    Raises:
        BaseModelError: No such folder, and not in the hub cache: one line in place of the Hub library's long error.
    """
    name = recipe.get('pretrained_model_name_or_path')
    try:
        return build_from_config(recipe)
    except (OSError, ValueError) as error:
        if not isinstance(name, str) or find_base_folder(name) is not None:
            raise
        raise BaseModelError(
            f'tokenizer of the config ({name!r}): no such folder and not in the cache; set it to the base '
            f"model's folder{_said_by_the_hub(error)}"
        ) from None


def _said_by_the_hub(error: BaseException | None) -> str:
    """Why the Hub did not give it: it is gated, or cannot be reached. '' for what cannot be a name on the Hub."""
    from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError

    while error is not None:
        if isinstance(error, (HfHubHTTPError, LocalEntryNotFoundError)):
            return f' ({error_text(error)})'
        error = error.__cause__ or error.__context__
    return ''
