"""What XTuner V1 needs to build, shard and save its models on a CPU, and not to train them: import this before V1.

Packages that only its other models, its kernels and its reinforcement learning use are stood in for by modules whose
attributes are mocks.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers

#: transformers looks for these packages itself, at first use; after the stand-ins it would find them.
_FIRST = [getattr(transformers, f'Auto{name}') for name in ('Config', 'ImageProcessor', 'Processor', 'Tokenizer')]
_STOOD_IN_FOR = ('cv2', 'fla', 'flash_attn', 'ray', 'sglang', 'tilelang', 'timm', 'torchvision')


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _mock  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition('.')[0] not in _STOOD_IN_FOR:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def _mock(name: str) -> MagicMock:
    if name.startswith('__'):
        raise AttributeError(name)
    return MagicMock(name=name)


sys.meta_path.append(_Finder())
for _name in ('memory_allocated', 'memory_reserved', 'max_memory_allocated', 'max_memory_reserved'):
    setattr(torch.cpu, _name, lambda *args, **options: 0)
for _name in ('empty_cache', 'reset_peak_memory_stats'):
    setattr(torch.cpu, _name, lambda *args, **options: None)
torch.cuda.Stream = MagicMock  # type: ignore[misc]


def tensor_on_cpu(*args: Any, make: Any = torch.tensor, **options: Any) -> torch.Tensor:
    """In place of ``torch.tensor`` while a model is built: its dispatcher of experts says ``device='cuda'``."""
    return make(*args, **{key: 'cpu' if value == 'cuda' else value for key, value in options.items()})
