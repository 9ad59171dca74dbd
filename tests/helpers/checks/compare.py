"""Compares tensors, and those of two Hugging Face folders on disk, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

INDEX_NAME = 'model.safetensors.index.json'
SHOWN = 8


def splits_as_the_hub() -> bool:
    """Whether save_pretrained makes the same files: transformers before 4.42 splits a model by a rule of its own."""
    from transformers import modeling_utils

    return hasattr(modeling_utils, 'split_torch_state_dict_into_shards')


def folder_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of all `*.safetensors` files in `folder`, of which the index must say what there is."""
    from safetensors.torch import load_file

    folder = Path(folder)
    files = sorted(folder.glob('*.safetensors'))
    assert files, f'{folder}: expected *.safetensors, found {sorted(path.name for path in folder.iterdir())}'
    tensors: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            assert name not in tensors, f'{name}: in both {weight_map[name]} and {file.name}'
            tensors[name] = tensor
            weight_map[name] = file.name
    if (folder / INDEX_NAME).exists():
        index = json.loads((folder / INDEX_NAME).read_text())
        assert index['weight_map'] == weight_map
        assert index['metadata']['total_size'] == sum(tensor.nbytes for tensor in tensors.values())
    else:
        assert len(files) == 1, f'{folder}: {len(files)} files, but no {INDEX_NAME}'
    return tensors


def bytes_in(folder: Path, pattern: str = '*') -> dict[str, bytes]:
    """The content of each file in a folder and below it, by its path from there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob(pattern) if path.is_file()}


def assert_same_folder_tensors(folder_a: str | Path, folder_b: str | Path) -> None:
    """As :func:`assert_same_tensors`. It does not matter which file a tensor is in."""
    assert_same_tensors(folder_tensors(folder_a), folder_tensors(folder_b), f'{folder_a} and {folder_b}')


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str = '') -> None:
    """Names, shapes, dtypes and bytes. Not numbers: equal NaNs are the same, 0.0 and -0.0 are not."""
    assert found.keys() == expected.keys(), f'{where}: on one side only {sorted(found.keys() ^ expected.keys())}'
    differing = [name for name, tensor in expected.items() if not _same(found[name], tensor)]
    told = [f'{name} ({_kind(found[name])}, {_kind(expected[name])})' for name in differing[:SHOWN]]
    assert not differing, f'{where}: {len(differing)} tensors differ: {told}'


def assert_loads_clean(
    folder: str | Path, model_class: type[PreTrainedModel], trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model that from_pretrained loads, in the dtype that it was saved in, with nothing to report."""
    model, report = model_class.from_pretrained(
        folder,
        output_loading_info=True,
        local_files_only=True,
        torch_dtype='auto',
        trust_remote_code=trust_remote_code,
    )
    # Transformers 4 reports lists and 5 sets; whatever a version reports must be empty.
    assert not any(report.values()), f'{folder}, loaded as {model_class.__name__}: {report}'
    return model


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    bytes_a, bytes_b = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(bytes_a, bytes_b)


def _kind(tensor: torch.Tensor) -> str:
    return f'{str(tensor.dtype).removeprefix("torch.")}{list(tensor.shape)}'


def loaded(folder: Path, kind: Any) -> Any:
    """The model that ``kind`` loads, without a missing or an unexpected key."""
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not told['missing_keys'] and not told['unexpected_keys']
    return model


def same_logits(one: Any, two: Any) -> bool:
    import torch

    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        return torch.equal(one.float().eval()(input_ids=ids).logits, two.float().eval()(input_ids=ids).logits)
