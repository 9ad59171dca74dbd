"""Compares the tensors of two Hugging Face folders on disk, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

INDEX_NAME = 'model.safetensors.index.json'
SHOWN = 8


def folder_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of all `*.safetensors` files in `folder`, with the safetensors library.

    Raises:
        AssertionError: If there is no such file, if a name is in two of them, or if the index is
            missing or describes other tensors, files or sizes than there are.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    files = sorted(folder.glob('*.safetensors'))
    there = sorted(path.name for path in folder.iterdir())
    assert files, f'{folder}: expected *.safetensors, found {there}'
    tensors: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            assert name not in tensors, f'{name}: in both {weight_map[name]} and {file.name}'
            tensors[name] = tensor
            weight_map[name] = file.name
    index_file = folder / INDEX_NAME
    if index_file.exists():
        index = json.loads(index_file.read_text())
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        wrong = [str(at) for at in set(index['weight_map'].items()) ^ set(weight_map.items())]
        assert not wrong, f'{index_file}: not what is in the files:{_listed(sorted(wrong))}'
        total = index['metadata']['total_size']
        assert total == nbytes, f'{index_file}: total_size {total}, but {nbytes} bytes of tensors'
    else:
        assert len(files) == 1, f'{folder}: {len(files)} files, but no {INDEX_NAME}'
    return tensors


def assert_same_folder_tensors(folder_a: str | Path, folder_b: str | Path) -> None:
    """Asserts that two folders hold the same names, shapes, dtypes and bytes.

    Bytes, not numbers: equal NaNs are the same, 0.0 and -0.0 are not. It does not matter which
    file a tensor is in.
    """
    tensors_a, tensors_b = folder_tensors(folder_a), folder_tensors(folder_b)
    findings: dict[str, list[str]] = {
        f'only in {folder_a}': sorted(tensors_a.keys() - tensors_b.keys()),
        f'only in {folder_b}': sorted(tensors_b.keys() - tensors_a.keys()),
        'of another shape or dtype': [],
        'with other bytes': [],
    }
    for name in sorted(tensors_a.keys() & tensors_b.keys()):
        a, b = tensors_a[name], tensors_b[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            findings['of another shape or dtype'].append(f'{name}: {_kind(a)} and {_kind(b)}')
        elif count := _count_different(a, b):
            found = f'{name}: {count} of the {a.numel()} elements of {_kind(a)}'
            findings['with other bytes'].append(found)
    told = [f'{len(names)} {what}:{_listed(names)}' for what, names in findings.items() if names]
    sizes = f'{folder_a} ({len(tensors_a)} tensors) and {folder_b} ({len(tensors_b)}) differ'
    assert not told, '\n'.join([sizes, *told])


def assert_loads_clean(folder: str | Path, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Loads `folder` in the dtype that it was saved in and returns the model.

    Raises:
        AssertionError: If from_pretrained reports anything missing, unexpected or mismatched.
    """
    model, report = model_class.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, torch_dtype='auto'
    )
    # Transformers 4 reports lists and 5 sets; whatever a version reports must be empty.
    found = {what: sorted(map(str, keys)) for what, keys in report.items() if keys}
    told = [f'{len(keys)} in {what}:{_listed(keys)}' for what, keys in found.items()]
    assert not told, '\n'.join([f'{folder}, loaded as {model_class.__name__}', *told])
    return model


def _count_different(a: torch.Tensor, b: torch.Tensor) -> int:
    import torch

    rows = (a.numel(), a.element_size())
    bytes_a, bytes_b = (tensor.reshape(-1).view(torch.uint8).reshape(rows) for tensor in (a, b))
    return int((bytes_a != bytes_b).any(dim=1).sum())


def _kind(tensor: torch.Tensor) -> str:
    return f'{str(tensor.dtype).removeprefix("torch.")}{list(tensor.shape)}'


def _listed(names: Sequence[str]) -> str:
    rest = [f'... and {len(names) - SHOWN} more'] if len(names) > SHOWN else []
    return ''.join(f'\n    {name}' for name in [*names[:SHOWN], *rest])
