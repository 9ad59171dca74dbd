"""Finds the tokenizer or processor to save: each part is that of the option or of the run, else that of the base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.base_files import (
    PROCESSOR_FILES,
    CopiedTokenizer,
    LocatedBase,
    PartAndTokenizer,
    find_base_folder,
    load_or_copy_tokenizer,
    load_processor,
)
from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.format.text import error_text
from xhf_hooks.registry import build_from_config

if TYPE_CHECKING:
    from xhf_hooks.exporters.base import Exporter

#: Base classes of the parts of a processor besides its tokenizer; those of video are also those of images.
_KINDS_OF_PARTS = ('BaseVideoProcessor', 'ImageProcessingMixin', 'FeatureExtractionMixin')


def find_tokenizer(option: Any | None, of_the_run: Any | None, exporter: Exporter) -> tuple[Any | None, list[str]]:
    """The tokenizer of the option, else of the run, else of the base model; and warnings.

    Where the run has only a recipe for one, the tokenizer of the model goes first: it may have got more tokens. To an
    image processor or feature extractor come the other parts of the base's processor.

    Raises:
        OptionError: The option names a folder without tokenizer files.
    """
    is_recipe = of_the_run is None or isinstance(of_the_run, (dict, str, Path))
    if is_recipe and exporter.tokenizer_of_model is not None:
        of_the_run = exporter.tokenizer_of_model
    tokenizer = of_the_run if option is None else option
    warnings = exporter.warn_of_revisions()
    if isinstance(tokenizer, (str, Path)):
        folder = LocatedBase.locate(str(tokenizer))
        tokenizer = _in_folder(folder)
        if tokenizer is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', folder.name)
        warnings += _told(tokenizer, repr(folder.name))
    if isinstance(tokenizer, dict):
        tokenizer = _built_tokenizer(tokenizer)
    base = f'the base model {exporter.base_model.name!r}' if exporter.base_model.name else 'a base model'
    if hasattr(tokenizer, 'save_pretrained'):
        if has_tokenizer(tokenizer):
            return tokenizer, warnings
        return _with_parts_of_base(tokenizer, base, exporter, warnings)
    if tokenizer is not None:
        found_kind = f'{type(tokenizer).__module__}.{type(tokenizer).__qualname__}'
        warnings.append(f"the run's tokenizer is a {found_kind}, not one of transformers: it is not saved")
    tokenizer = exporter.base_tokenizer()
    if tokenizer is None and exporter.has_vocabulary:
        warnings.append(f'no tokenizer will be saved: neither the run nor {base} has one; set the option tokenizer')
    elif tokenizer is not None and warnings:
        warnings.append(f'the tokenizer of {base} will be saved')
    return tokenizer, warnings + _told(tokenizer, base)


def has_tokenizer(found: Any) -> bool:
    """Whether the object is a tokenizer, or a processor with one, and not one for images or sound alone."""
    return not _kind_of_part(found)


def _kind_of_part(part: Any) -> str | None:
    """The kind of an image processor, a video processor or a feature extractor; None for anything else."""
    of_part = {kind.__name__ for kind in type(part).__mro__}
    return next((kind for kind in _KINDS_OF_PARTS if kind in of_part), None)


def _with_parts_of_base(part: Any, base: str, exporter: Exporter, warnings: list[str]) -> tuple[Any, list[str]]:
    """The base's processor with a part of the run in place of its own; without a processor, the base's tokenizer."""
    processor = load_processor(exporter.base_model, trust_remote_code=exporter.trusts_code)
    if getattr(processor, 'tokenizer', None) is not None:
        for name, own in vars(processor).items():
            if _kind_of_part(own) == _kind_of_part(part):
                processor = copy.copy(processor)
                setattr(processor, name, part)
                return processor, warnings
    tokenizer = exporter.base_tokenizer()
    if tokenizer is not None:
        return PartAndTokenizer(part, tokenizer), warnings + _told(tokenizer, base)
    if exporter.has_vocabulary:
        warnings.append(
            f'no tokenizer will be saved: that of the run is a {type(part).__name__}, and {base} has none; set the '
            f'option tokenizer'
        )
    return part, warnings


def _in_folder(folder: LocatedBase) -> Any | None:
    """The processor or tokenizer in a folder that the user named; None if it has none."""
    found = load_processor(folder, trust_remote_code=False)
    if found is not None and has_tokenizer(found):
        return found
    tokenizer = load_or_copy_tokenizer(folder, trust_remote_code=False)
    if tokenizer is None or isinstance(tokenizer, CopiedTokenizer):
        return found if tokenizer is None else tokenizer
    if any(folder.find_file(name) for name in PROCESSOR_FILES):
        return PartAndTokenizer(found or CopiedTokenizer(folder, 'its processor cannot be loaded here'), tokenizer)
    return tokenizer


def _told(tokenizer: Any | None, where: str) -> list[str]:
    """A warning about what is copied."""
    if not isinstance(tokenizer, CopiedTokenizer):
        return []
    return [f'the tokenizer of {where} is copied as it is: {tokenizer.reason}']


def _built_tokenizer(recipe: Mapping[str, Any]) -> Any:
    """Build what the config describes. The Hub library's long error about a missing folder becomes one line."""
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
