"""Which files of a model folder loaders read: one that is added or changed may change what is loaded."""

from __future__ import annotations

import re

_READ = re.compile(r'.+\.(json|safetensors|model|jinja|txt|bpe|tiktoken|bin|pt|pth|h5|msgpack|gguf|py)')
#: What Trainer and its examples leave, results of evaluations, files for pip.
_NOT_READ = re.compile(r'trainer_state\.json|.*results\.json|requirements.*\.txt')


def is_read_by_loaders(name: str) -> bool:
    """Whether transformers, peft or a server may read the file.

    Args:
        name: Its path in the folder.
    """
    return _READ.fullmatch(name) is not None and _NOT_READ.fullmatch(name.rpartition('/')[2]) is None
