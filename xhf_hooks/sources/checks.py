"""Checks the elements that a source returns, where they arrive: the source may be an extension's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import LocalElements, Source


def read_local_elements(source: Source, spec: TensorSpec) -> LocalElements:
    """What a rank holds of a tensor. Does not communicate.

    Raises:
        TensorError: The source returns something else than :class:`.LocalElements` says.
    """
    where, found = f'{spec.name}: {type(source).__name__}.local_elements()', source.local_elements(spec)
    if not isinstance(found, LocalElements) or not isinstance(found.elements, torch.Tensor):
        inside = f' with {type(found.elements).__name__}' if isinstance(found, LocalElements) else ''
        raise TensorError(f'{where}: expected LocalElements with a tensor, found {type(found).__name__}{inside}')
    dtype = TORCH_DTYPES[spec.dtype]
    if found.elements.dim() != 1 or found.elements.dtype != dtype:
        raise TensorError(
            f'{where}: expected elements in one dimension (reshape(-1)) and in {dtype}, found the shape '
            f'{tuple(found.elements.shape)} in {found.elements.dtype}'
        )
    return found


def require_elements(spec: TensorSpec, found: LocalElements, needed: range, rank: int, wanted_for: str = '') -> None:
    """Check that a rank holds the elements that its spread says.

    Args:
        needed: The elements of the tensor that are read.
        wanted_for: The output that is made of them, for the message.

    Raises:
        TensorError: It does not.
    """
    start, stop = found.start, found.start + found.elements.numel()
    if needed and not (start <= needed.start and needed.stop <= stop):
        what = f'{wanted_for} needs elements' if wanted_for else 'expected elements'
        remedy = ". Set writer='gather', which needs no slices" if wanted_for else ''
        raise TensorError(
            f'{spec.name}: {what} {needed.start} to {needed.stop} from rank {rank}, which has {start} to {stop}{remedy}'
        )


def require_gathered(
    source: Source, specs: Sequence[TensorSpec], wanted: Collection[str], found: Mapping[str, torch.Tensor]
) -> None:
    """Check what :meth:`.Source.gathered` has returned.

    Raises:
        TensorError: A tensor is missing, or has another shape or dtype than its spec.
    """
    where = f'{type(source).__name__}.gathered()'
    for spec in specs:
        if spec.name not in wanted:
            continue
        tensor = found.get(spec.name)
        if not isinstance(tensor, torch.Tensor):
            raise TensorError(f'{spec.name}: {where}: expected the whole tensor, found {type(tensor).__name__}')
        if tuple(tensor.shape) != spec.shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
            raise TensorError(
                f'{spec.name}: {where}: expected {spec.dtype} {spec.shape}, found {tensor.dtype} {tuple(tensor.shape)}'
            )
