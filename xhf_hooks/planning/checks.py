"""Checks what a source and an exporter have returned, before a plan is made of it: an extension may have written it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from xhf_hooks.errors import PlanError
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.format.text import counted
from xhf_hooks.planning.spread import Spread
from xhf_hooks.planning.types import ExportEntry, TensorSpec


def require_specs(specs: Sequence[TensorSpec], where: str) -> None:
    """Check a source's tensors.

    Args:
        where: The method that has returned them, for the message.

    Raises:
        PlanError: One of them is not as :class:`.TensorSpec` says, or two have one name.
    """
    seen: set[str] = set()
    for spec in _each(specs, TensorSpec, where):
        _require_name_shape_and_dtype(spec.name, spec.shape, spec.dtype, f'{where}: {spec.name}')
        for name in (spec.name, *spec.aliases):
            if name in seen:
                raise PlanError(
                    f'{where}: {name}: expected each name once, found it twice. A tied tensor is one TensorSpec, which '
                    f'has its other names in aliases'
                )
            seen.add(name)


def require_entries(entries: Sequence[ExportEntry], specs: Sequence[TensorSpec], where: str) -> None:
    """Check an exporter's entries.

    Args:
        specs: The source's tensors.
        where: The method that has returned the entries, for the message.

    Raises:
        PlanError: One of them is not as :class:`.ExportEntry` says.
    """
    spec_of = {spec.name: spec for spec in specs}
    first_name = {alias: spec.name for spec in specs for alias in spec.aliases}
    made_together: dict[object, ExportEntry] = {}  # the first entry of each `combine` in a file set
    for entry in _each(entries, ExportEntry, where):
        at = f'{where}: {entry.hf_name}'
        _require_name_shape_and_dtype(entry.hf_name, entry.shape, entry.dtype, at)
        if isinstance(entry.reads, str):
            raise PlanError(f'{at}: expected reads to be a tuple of names, found the text {entry.reads!r}')
        for name in entry.reads:
            if name not in spec_of:
                tied = f', which is another name of {first_name[name]}: read that' if name in first_name else ''
                raise PlanError(f'{at}: expected in reads the name of a tensor of the source, found {name!r}{tied}')
        if entry.copied_from is not None:
            continue
        if entry.combine is None and len(entry.reads) != 1:
            raise PlanError(f'{at}: without combine, expected one tensor in reads, found {entry.reads!r}')
        if entry.combine is None and spec_of[entry.reads[0]].shape != entry.shape:
            raise PlanError(
                f'{at}: without combine, expected the shape {spec_of[entry.reads[0]].shape} of {entry.reads[0]}, found '
                f'{entry.shape}'
            )
        first = made_together.setdefault((entry.file_set, id(entry.combine)), entry)
        if entry.combine is not None and first.reads != entry.reads:
            raise PlanError(f'{at}: made together with {first.hf_name}: expected {first.reads}, found {entry.reads}')
        if entry.source_offset is not None:
            end = entry.source_offset + math.prod(entry.shape)
            if len(entry.reads) != 1 or end > spec_of[entry.reads[0]].numel:
                of_reads = [(name, spec_of[name].shape) for name in entry.reads]
                raise PlanError(f'{at}: expected one tensor in reads with elements up to {end}, found {of_reads}')


def require_spreads(spreads: Mapping[str, Spread], specs: Sequence[TensorSpec], world_size: int, where: str) -> None:
    """Check which elements each rank holds.

    Args:
        specs: The source's tensors.
        where: The method that has returned the spreads, for the message.

    Raises:
        PlanError: A spread is that of no tensor, of another number of elements, or ranks do not hold them all.
    """
    numel_of = {spec.name: spec.numel for spec in specs}
    for name, spread in spreads.items():
        if name not in numel_of or not isinstance(spread, Spread):
            raise PlanError(f'{where}: expected a Spread for names of tensors alone, found {spread!r} for {name!r}')
        if spread.numel != numel_of[name] or not spread.is_held_by(world_size):
            raise PlanError(
                f'{where}: {name}: expected {numel_of[name]} elements, held by {counted(world_size, "rank")}, found '
                f'{spread}'
            )


def _each(found: Any, kind: type, where: str) -> Sequence[Any]:
    if not isinstance(found, (list, tuple)):
        raise PlanError(f'{where}: expected a list of {kind.__name__}, found {type(found).__name__}')
    for one in found:
        if not isinstance(one, kind):
            raise PlanError(
                f'{where}: expected a list of {kind.__name__}, found {type(one).__name__} in it: {one!r:.100}'
            )
    return found


def _require_name_shape_and_dtype(name: Any, shape: Any, dtype: Any, at: str) -> None:
    if not isinstance(name, str) or not name:
        raise PlanError(f'{at}: expected a name, found {name!r}')
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise PlanError(f'{at}: expected the shape as a tuple of integers, found {shape!r}')
    if dtype not in DTYPE_NBYTES:
        raise PlanError(
            f"{at}: expected the dtype as a code of safetensors, such as 'BF16' (dtype_code(tensor.dtype)), found "
            f'{dtype!r}'
        )
