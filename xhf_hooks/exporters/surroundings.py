"""What surrounds the exported model and has no tensors, such as the pooling of sentence-transformers."""

from __future__ import annotations

import copy
import inspect
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.format.text import error_text
from xhf_hooks.system.library_settings import quiet

#: How the names of files with weights end.
WEIGHTS = ('.safetensors', '.bin', '.pt', '.pth', '.index.json')


def write_what_surrounds(folder: Path, whole: nn.Module | None, path: str) -> list[str]:
    """Write what ``whole.save_pretrained`` writes around the exported model, and return warnings. Runs on: rank 0.

    It is called on a copy whose exported model saves nothing. Files that are there already stay.

    Args:
        whole: The trained model, such as a SentenceTransformer; None if there is only the exported model.
        path: That of the exported model in it.
    """
    save = getattr(whole, 'save_pretrained', None)
    if whole is None or path == '' or not callable(save) or _is_of_peft(whole):
        return []
    kind = type(whole).__name__
    try:
        trial = _with_silent(whole, path.split('.'))
        options: dict[str, Any] = {'create_model_card': False}  # sentence-transformers' would describe the whole run
        known = inspect.signature(trial.save_pretrained).parameters
        with quiet(), tempfile.TemporaryDirectory(prefix='.xhf_hooks_', dir=folder) as temporary:
            trial.save_pretrained(temporary, **{name: value for name, value in options.items() if name in known})
            files = read_files(Path(temporary))
    except Exception as error:  # it is code of others
        return [f'what {kind} has around the exported model is not saved: its save_pretrained: {error_text(error)}']
    for name, content in files.items():
        if not name.endswith(WEIGHTS) and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    weights = sorted(name for name in files if name.endswith(WEIGHTS) and not (folder / name).exists())
    if not weights:
        return []
    return [f'{weights} of {kind} are not saved: they hold weights outside of the exported model']


def read_files(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by path."""
    paths = sorted(path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _is_of_peft(whole: nn.Module) -> bool:
    return any(kind.__module__.startswith('peft.') for kind in type(whole).__mro__)


def _with_silent(module: nn.Module, path: list[str]) -> nn.Module:
    """A copy that shares all but the modules on the path, of which the last one saves nothing."""
    copied = copy.copy(module)
    if path:
        copied._modules = {**module._modules, path[0]: _with_silent(module._modules[path[0]], path[1:])}
    else:
        copied.save_pretrained = lambda *arguments, **options: None
    return copied
