"""The tokenizer and the processor of a base model: loaded from its files, or copied where they cannot be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.base_model.files import (
    MORE_TOKENIZER_FILES,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    TRANSFORMERS_TOKENIZER_FILES,
    LocatedBase,
    find_base_folder,
    modules_named_by,
)
from xhf_hooks.errors import BaseModelError
from xhf_hooks.format.text import error_text
from xhf_hooks.registry import build_from_config

#: Base classes of the parts of a processor besides its tokenizer. In this order: a video processor is an
#: ImageProcessingMixin, too.
_KINDS_OF_PARTS = ('BaseVideoProcessor', 'ImageProcessingMixin', 'FeatureExtractionMixin')


class CopiedFiles:
    """A tokenizer or processor whose files are copied: it has code that must not run, or cannot be loaded here.

    Args:
        base: The base model that has the files.
        reason: Why, for the log.
    """

    def __init__(self, base: LocatedBase, reason: str) -> None:
        self._base = base
        self.reason = reason

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files, and the code that they name."""
        files = self._base.read_files((*TOKENIZER_FILES, *MORE_TOKENIZER_FILES, *PROCESSOR_FILES))
        code, _ = self._base.read_code(files)
        for name, content in {**code, **files}.items():
            Path(folder, name).write_bytes(content)


@dataclass(eq=False)
class PartAndTokenizer:
    """An image processor or the like of the run, and the tokenizer that is saved with it.

    Attributes:
        part: Written first.
    """

    part: Any
    tokenizer: Any


def load_tokenizer(base: LocatedBase, *, trust_remote_code: bool, **options: Any) -> Any | None:
    """The base model's tokenizer, by ``from_pretrained``; None if it has none. Runs on: rank 0."""
    if not any(base.find_file(name) for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    options = {**options, 'trust_remote_code': trust_remote_code, 'local_files_only': True}
    return AutoTokenizer.from_pretrained(base.loadable_name(), **options)


def load_or_copy_tokenizer(base: LocatedBase, *, trust_remote_code: bool, **options: Any) -> Any | None:
    """As :func:`load_tokenizer`; a tokenizer with code that is not trusted is a :class:`CopiedFiles`."""
    try:
        return load_tokenizer(base, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # of any type, from a tokenizer library that reads damaged or unknown files
        settings = base.read_files(('tokenizer_config.json',))
        if not trust_remote_code and modules_named_by(settings):
            return CopiedFiles(base, 'it has code of its own, which is not run')
        if any(base.find_file(name) for name in TRANSFORMERS_TOKENIZER_FILES):
            raise
        return CopiedFiles(base, f'it cannot be loaded here: {error_text(error)}')


def load_processor(base: LocatedBase, *, trust_remote_code: bool) -> Any | None:
    """The base's processor, or its image processor or the like; None if it has none or it cannot be loaded here."""
    if not any(base.find_file(name) for name in PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    options = {'trust_remote_code': trust_remote_code, 'local_files_only': True}
    try:
        processor = AutoProcessor.from_pretrained(base.loadable_name(), **options)
    except Exception:  # of any type: custom code that is not trusted, or a package that is missing here
        return None
    # The tokenizer in it keeps this option in transformers 4.36, and would save it
    getattr(getattr(processor, 'tokenizer', None), 'init_kwargs', {}).pop('trust_remote_code', None)
    return processor


def load_from_folder(base: LocatedBase) -> Any | None:
    """The processor with its tokenizer, or the tokenizer, of a folder that the user named; None if it has none.

    Beside a tokenizer without a processor class there may be an image processor or the like; both are given then.
    """
    from transformers import PreTrainedTokenizerBase

    found = load_processor(base, trust_remote_code=False)
    if isinstance(found, PreTrainedTokenizerBase):  # what AutoProcessor gives if the folder names no processor class
        found = None
    if found is not None and has_tokenizer(found):
        return found
    tokenizer = load_or_copy_tokenizer(base, trust_remote_code=False)
    if tokenizer is None:
        return found
    if isinstance(tokenizer, CopiedFiles) or not any(base.find_file(name) for name in PROCESSOR_FILES):
        return tokenizer  # copied files include those of the processor
    # The part is written first, so files of the loaded tokenizer replace those that are copied
    return PartAndTokenizer(found or CopiedFiles(base, 'its processor cannot be loaded here'), tokenizer)


def warn_if_not_loadable(tokenizer: Any | None, where: str) -> list[str]:
    """A warning if the tokenizer is copied and not loaded."""
    if not isinstance(tokenizer, CopiedFiles):
        return []
    return [f'the tokenizer of {where} is copied as it is: {tokenizer.reason}']


def has_tokenizer(found: Any) -> bool:
    """Whether the object is a tokenizer, or a processor with one, and not one for images or sound alone."""
    return not kind_of_part(found)


def kind_of_part(part: Any) -> str | None:
    """The kind of an image processor, a video processor or a feature extractor; None for anything else."""
    of_part = {kind.__name__ for kind in type(part).__mro__}
    return next((kind for kind in _KINDS_OF_PARTS if kind in of_part), None)


def build_tokenizer(recipe: Mapping[str, Any]) -> Any:
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
