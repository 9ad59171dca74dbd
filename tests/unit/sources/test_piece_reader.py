"""Pieces of files, strided ones among them, are what torch says they are, wherever reading begins and ends."""

from __future__ import annotations

import random

import pytest
import torch

from xhf_hooks.errors import ChangedError, CheckpointError
from xhf_hooks.sources import stored_source as reader
from xhf_hooks.sources.stored_source import Piece, PieceReader

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def strided(kind: str) -> torch.Tensor:
    """A random view of one to four axes."""
    shape = [random.randint(1, 6) for _ in range(random.randint(1, 4))]
    if kind == 'permuted':
        return torch.randn(shape).permute(random.sample(range(len(shape)), len(shape)))
    if kind == 'stepped':
        return torch.randn([3 * size for size in shape])[tuple(slice(random.randrange(3), None, 3) for _ in shape)]
    return torch.randn([random.choice([1, size]) for size in shape]).expand(shape)


@pytest.mark.parametrize('kind', ['permuted', 'stepped', 'expanded'])
@pytest.mark.parametrize('chunk', [7, 64, 1 << 18])
def test_strided(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(reader, '_CHUNK', chunk)
    random.seed(0)
    for number in range(40):
        tensor = strided(kind)
        stored = torch.empty(0).set_(tensor.untyped_storage())
        file = tmp_path / f'{number}'
        file.write_bytes(bytes(16) + stored.numpy().tobytes())
        offset = 16 + 4 * tensor.storage_offset()
        piece = Piece(file, offset, 'F32', tensor.numel(), tuple(tensor.shape), tensor.stride())
        for dtype in (torch.float32, torch.bfloat16):
            start = random.randrange(tensor.numel())
            out = torch.empty(random.randint(1, tensor.numel() - start), dtype=dtype)
            PieceReader().read_into((piece,), start, out)
            assert torch.equal(out, tensor.reshape(-1)[start : start + len(out)].to(dtype))


def test_files_that_are_shorter_or_gone(tmp_path):
    file = tmp_path / 'a'
    file.write_bytes(bytes(100))
    with pytest.raises(ChangedError, match='a: became shorter'):
        PieceReader().read_into((Piece(file, 80, 'F32', 6),), 0, torch.empty(6))
    with pytest.raises(ChangedError, match='a: became shorter'):
        PieceReader().read_into((Piece(file, 80, 'F32', 6, (2, 3), (1, 2)),), 0, torch.empty(6))
    with pytest.raises(CheckpointError, match='gone: can no longer be read'):
        PieceReader().read_into((Piece(tmp_path / 'gone', 0, 'F32', 6),), 0, torch.empty(6))
