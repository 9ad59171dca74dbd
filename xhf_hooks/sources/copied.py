"""Copies tensors of the base model's files, byte for byte, without torch: their dtype may be one that it lacks."""

from __future__ import annotations

from collections.abc import Iterator

from xhf_hooks.errors import CheckpointError
from xhf_hooks.planning.types import Chunk, CopiedTensor

#: Bytes that are read at once: whole elements of any dtype.
_PART_NBYTES = 4 * 2**20


def chunks_of(copied: CopiedTensor) -> Iterator[Chunk]:
    """Yield one tensor, in parts. Does not communicate.

    Raises:
        CheckpointError: The file of the base is shorter than it was.
        OSError: It cannot be read.
    """
    for start in range(0, copied.placement.nbytes, _PART_NBYTES):
        nbytes = min(_PART_NBYTES, copied.placement.nbytes - start)
        yield Chunk(copied.placement, memoryview(read_stored(copied, start, nbytes)), start)


def read_stored(copied: CopiedTensor, start: int, nbytes: int) -> bytearray:
    """Bytes of a tensor in the base's file, from offset ``start`` in the tensor on."""
    data = bytearray(nbytes)
    with open(copied.source.path, 'rb') as file:
        file.seek(copied.source.start + start)
        found = file.readinto(data)
    if found != nbytes:
        raise CheckpointError(
            f'{copied.source.path}: {copied.placement.hf_name} is to be copied from this file of the base model, which '
            f'is shorter than it was: expected {nbytes} bytes at {copied.source.start + start}, found {found}. Put it '
            f'back, or set carry_base to None'
        )
    return data
