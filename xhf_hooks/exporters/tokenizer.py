"""Finds the tokenizer or processor to save: each part is that of the option or of the run, else that of the base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.base_model.files import LocatedBase
from xhf_hooks.base_model.tokenizer import (
    PartAndTokenizer,
    build_tokenizer,
    has_tokenizer,
    kind_of_part,
    load_from_folder,
    load_processor,
    warn_if_not_loadable,
)
from xhf_hooks.errors import OptionError

if TYPE_CHECKING:
    from xhf_hooks.exporters.base import Exporter


def find_tokenizer(option: Any | None, of_the_run: Any | None, exporter: Exporter) -> tuple[Any | None, list[str]]:
    """The tokenizer of the option, else of the run, else of the base model; and warnings.

    If the run has none, or only a recipe for one (a config, a folder), ``model.tokenizer`` or ``model.processor``
    counts as the run's: tokens may have been added to it. An image processor or feature extractor alone is completed
    with the other parts of the base's processor.

    Raises:
        OptionError: The option, or the run, names a folder without tokenizer files.
    """
    is_none_or_recipe = of_the_run is None or isinstance(of_the_run, (dict, str, Path))
    if is_none_or_recipe and exporter.tokenizer_of_model is not None:
        of_the_run = exporter.tokenizer_of_model
    tokenizer = of_the_run if option is None else option
    # If it is unknown which of several cached revisions of the base was loaded, base_tokenizer() gives none
    warnings = exporter.warn_of_revisions()
    if isinstance(tokenizer, (str, Path)):
        folder = LocatedBase.locate(str(tokenizer))
        tokenizer = load_from_folder(folder)
        if tokenizer is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', folder.name)
        warnings += warn_if_not_loadable(tokenizer, repr(folder.name))
        if isinstance(tokenizer, PartAndTokenizer):  # an image processor or the like, and a tokenizer: complete
            return tokenizer, warnings
    if isinstance(tokenizer, dict):
        tokenizer = build_tokenizer(tokenizer)
    base = f'the base model {exporter.base_model.name!r}' if exporter.base_model.name else 'a base model'
    if hasattr(tokenizer, 'save_pretrained'):
        if has_tokenizer(tokenizer):
            return tokenizer, warnings
        return _with_parts_of_base(tokenizer, base, exporter, warnings)
    is_refused = tokenizer is not None
    if is_refused:
        found_kind = f'{type(tokenizer).__module__}.{type(tokenizer).__qualname__}'
        warnings.append(f"the run's tokenizer is a {found_kind}, not one of transformers: it is not saved")
    tokenizer = exporter.base_tokenizer()
    if tokenizer is None and exporter.has_vocabulary:
        warnings.append(f'no tokenizer will be saved: neither the run nor {base} has one; set the option tokenizer')
    elif tokenizer is not None and is_refused:
        warnings.append(f'the tokenizer of {base} will be saved')
    return tokenizer, warnings + warn_if_not_loadable(tokenizer, base)


def _with_parts_of_base(part: Any, base: str, exporter: Exporter, warnings: list[str]) -> tuple[Any, list[str]]:
    """The base's processor with a part of the run in place of its own; without a processor, the base's tokenizer."""
    processor = load_processor(exporter.base_model, trust_remote_code=exporter.trusts_code)
    if getattr(processor, 'tokenizer', None) is not None:
        for name, own in vars(processor).items():
            if kind_of_part(own) == kind_of_part(part):
                processor = copy.copy(processor)
                setattr(processor, name, part)
                return processor, warnings
    tokenizer = exporter.base_tokenizer()
    if tokenizer is not None:
        return PartAndTokenizer(part, tokenizer), warnings + warn_if_not_loadable(tokenizer, base)
    if exporter.has_vocabulary:
        warnings.append(
            f'no tokenizer will be saved: that of the run is a {type(part).__name__}, and {base} has none; set the '
            f'option tokenizer'
        )
    return part, warnings
