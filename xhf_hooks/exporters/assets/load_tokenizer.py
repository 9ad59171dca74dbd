"""The tokenizer and the processor of a folder: loaded from its files, or copied where they cannot be loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.exporters.assets.base_files import LocatedBase, modules_named_by
from xhf_hooks.format.loaded_files import (
    MORE_TOKENIZER_FILES,
    PROCESSOR_FILES,
    PROCESSOR_TEMPLATE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TRANSFORMERS_TOKENIZER_FILES,
    VOCABULARY_FILES,
)
from xhf_hooks.format.text import error_text

#: Base classes of the parts of a processor besides its tokenizer. In this order: a video processor is an
#: ImageProcessingMixin, too.
_KINDS_OF_PARTS = ('BaseVideoProcessor', 'ImageProcessingMixin', 'FeatureExtractionMixin', 'CopiedPart')


class CopiedFiles:
    """A tokenizer or processor whose files are copied: it has code that must not run, or cannot be loaded here.

    Args:
        base: The folder that has the files.
        reason: Why, for the log.
    """

    def __init__(self, base: LocatedBase, reason: str) -> None:
        self._base = base
        self.reason = reason

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files, and the code that they name."""
        files = self._base.read_files((*TOKENIZER_FILES, *MORE_TOKENIZER_FILES, *PROCESSOR_FILES, PROCESSOR_TEMPLATE))
        code, _ = self._base.read_code(files)
        for name, content in {**code, **files}.items():
            Path(folder, name).write_bytes(content)


class CopiedPart(CopiedFiles):
    """A processor whose files are copied, and that counts as one without a tokenizer."""


@dataclass(eq=False)
class PartAndTokenizer:
    """An image processor or the like, and the tokenizer that is saved with it.

    Attributes:
        part: Written first, so files of the tokenizer replace those that are copied.
    """

    part: Any
    tokenizer: Any


def load_tokenizer(base: LocatedBase, *, trust_remote_code: bool, **options: Any) -> Any | None:
    """The folder's tokenizer, by ``from_pretrained``; None if it has none. Runs on: rank 0."""
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
        settings = base.read_files((TOKENIZER_CONFIG,))
        if not trust_remote_code and modules_named_by(settings):
            return CopiedFiles(base, 'it has code of its own, which is not run')
        if any(base.find_file(name) for name in TRANSFORMERS_TOKENIZER_FILES):
            raise
        return CopiedFiles(base, f'it cannot be loaded here: {error_text(error)}')


def load_processor(base: LocatedBase, *, trust_remote_code: bool) -> Any | None:
    """The folder's processor, or its image processor or the like; None if it has none or it cannot be loaded here."""
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


def load_from_folder(base: LocatedBase, *, trust_remote_code: bool) -> Any | None:
    """The processor with its tokenizer, or the tokenizer, of a folder; None if it has none.

    Beside a tokenizer without a processor class there may be an image processor or the like; both are given then.
    """
    from transformers import PreTrainedTokenizerBase

    found = load_processor(base, trust_remote_code=trust_remote_code)
    # AutoProcessor gives the tokenizer if the folder names no processor class
    if found is not None and not kind_of_part(found) and not isinstance(found, PreTrainedTokenizerBase):
        return found
    part = found if kind_of_part(found) else None
    if part is None and any(base.find_file(name) for name in PROCESSOR_FILES):
        part = CopiedPart(base, 'its processor cannot be loaded here')
    tokenizer = load_or_copy_tokenizer(base, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        return part
    if part is None or isinstance(tokenizer, CopiedFiles):
        return tokenizer  # copied files include those of the processor
    return PartAndTokenizer(part, tokenizer)


def vocabulary_files(tokenizer: Any) -> tuple[str, ...]:
    """Names of files that may have its vocabulary, besides those of every tokenizer."""
    of_all = (*TRANSFORMERS_TOKENIZER_FILES, *MORE_TOKENIZER_FILES)
    return (*VOCABULARY_FILES, *(name for name in tokenizer.vocab_files_names.values() if name not in of_all))


def tokenizer_in(found: Any | None) -> Any:
    """The tokenizer of a processor, or beside another part; anything else as it is."""
    from transformers import PreTrainedTokenizerBase

    # Tokenizers with code of their own, such as ChatGLM's, have an attribute of this name as well
    return found if isinstance(found, PreTrainedTokenizerBase) else getattr(found, 'tokenizer', found)


def kind_of_part(part: Any) -> str | None:
    """The kind of an image processor, a video processor or a feature extractor; None for what has a tokenizer."""
    of_part = {kind.__name__ for kind in type(part).__mro__}
    return next((kind for kind in _KINDS_OF_PARTS if kind in of_part), None)
