"""Checks a committed folder against its manifest, with zlib and the safetensors library, not with our code."""

import json
import zlib
from pathlib import Path

MANIFEST = 'xhf_manifest.json'
_VALUES = 251  # bfloat16 represents all integers up to 256


def assert_whole(folder: Path) -> int:
    """Check that every file and tensor is present, unchanged and described; returns the iteration of the save."""
    from safetensors import safe_open

    manifest = json.loads((folder / MANIFEST).read_text())
    described = manifest['files']
    there = {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()} - {MANIFEST}
    assert there == set(described), f'{folder}: files {sorted(there)}, described {sorted(described)}'
    for name, about in described.items():
        data = (folder / name).read_bytes()
        found = (len(data), f'{zlib.crc32(data):08x}')
        assert found == (about['nbytes'], about['crc32']), f'{folder / name}: {found}, described {about}'
        if 'tensors' not in about:
            continue
        header_nbytes = 8 + int.from_bytes(data[:8], 'little')
        header = json.loads(data[8:header_nbytes])
        header.pop('__metadata__')
        assert set(header) == set(about['tensors']), f'{folder / name}: other tensors than described'
        for tensor, place in header.items():
            start, end = place['data_offsets']
            crc = f'{zlib.crc32(data[header_nbytes + start : header_nbytes + end]):08x}'
            said = about['tensors'][tensor]
            assert (crc, place['shape'], place['dtype']) == (said['crc32'], said['shape'], said['dtype'])
        with safe_open(folder / name, 'np') as library:  # does its own checks of the header
            assert set(library.keys()) == set(header)
    return manifest['iteration']


def weight_of(number: int) -> int:
    """The value of every weight in save ``number``."""
    return number % _VALUES


def filled_with(folder: Path) -> float:
    """The value that all elements of all tensors have; if there were several, the folder would mix saves."""
    import torch
    from safetensors.torch import load_file

    numbers = set()
    for path in folder.glob('*.safetensors'):
        for tensor in load_file(path).values():
            numbers |= set(torch.unique(tensor.float()).tolist())
    assert len(numbers) == 1, f'{folder} holds parts of several saves: {sorted(numbers)[:5]}'
    return numbers.pop()


def check_all(parent: Path, name: str = 'hf_model') -> dict[str, int]:
    """Check that each visible folder is intact and from a single save; returns iterations by name."""
    found = {}
    for path in sorted(parent.iterdir()):
        if path.name.startswith('.'):
            continue
        assert path.name.startswith(name), f'{path} has no name that a save could have'
        found[path.name] = assert_whole(path)
        weight = filled_with(path)
        assert weight == weight_of(found[path.name]), f'{path}: weights {weight}, manifest of save {found[path.name]}'
    return found


def hidden(parent: Path) -> list[str]:
    """Hidden files and folders beside the saves, except the lock."""
    return sorted(path.name for path in parent.iterdir() if path.name.startswith('.') and path.suffix != '.lock')
