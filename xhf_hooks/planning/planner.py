"""Planning: entries become files, byte offsets, buckets and an index. No torch, no tensor.

Files, their names and the index are those of ``save_pretrained`` (huggingface_hub's
``split_state_dict_into_shards_factory`` decides); offsets inside a file are those of safetensors.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory

from xhf_hooks.errors import PlanError
from xhf_hooks.format.safetensors import build_header
from xhf_hooks.planning.types import (
    Bucket,
    Combine,
    ExportEntry,
    FileSet,
    Group,
    OutputFile,
    Placement,
    SavePlan,
    TensorSpec,
)


def make_plan(
    entries: Sequence[ExportEntry],
    specs: Sequence[TensorSpec],
    *,
    max_shard_nbytes: int,
    bucket_nbytes: int,
    n_parameters: int | Mapping[str, int | None] | None = None,
    n_writers: int = 1,
    sliced: Collection[str] = (),
) -> SavePlan:
    """Decide every file, offset and bucket of a save.

    Runs on: all ranks, with the same result.

    Args:
        entries: What goes out, in the order in which ``save_pretrained`` would write it.
        specs: What the source holds.
        n_parameters: For ``total_parameters`` of the index; None leaves it out (transformers < 5). By folder where
            the file sets hold different models.
        n_writers: Ranks that write what is gathered.
        sliced: Tensors of which every rank has, and is to write, a slice. What must be made of them is gathered
            all the same.

    Raises:
        PlanError: Two entries have one name, or an entry reads a tensor that the source lacks.
    """
    spec_of = {spec.name: spec for spec in specs}
    sets: dict[FileSet, dict[str, ExportEntry]] = {}
    for entry in entries:
        if entry.hf_name in sets.setdefault(entry.file_set, {}):
            raise PlanError(f'two tensors would be written under one name: {entry.hf_name}')
        unknown = [name for name in entry.reads if name not in spec_of]
        if unknown:
            raise PlanError(f'{entry.hf_name} needs {unknown}, which the model does not have')
        sets[entry.file_set][entry.hf_name] = entry
    if not sets:
        raise PlanError('there is nothing to save: the exporter named no tensor')

    files: list[OutputFile] = []
    groups: list[Group] = []
    indexes: dict[str, dict[str, Any]] = {}
    for file_set, entry_of in sets.items():
        total = n_parameters.get(file_set.folder) if isinstance(n_parameters, Mapping) else n_parameters
        set_files, placements, index = _lay_out(file_set, entry_of, max_shard_nbytes, total)
        files += set_files
        groups += _group(placements, entry_of, spec_of)
        if index is not None:
            indexes[file_set.path(f'{file_set.stem}.safetensors.index.json')] = index
    from_shards = [group for group in groups if group.is_contiguous and group.reads[0].name in sliced]
    whole = [group for group in groups if not (group.is_contiguous and group.reads[0].name in sliced)]
    buckets = _fill_buckets(_share_out(whole, files, n_writers), bucket_nbytes)
    return SavePlan(tuple(files), tuple(from_shards), buckets, indexes, _digest(files, from_shards, buckets, indexes))


def _lay_out(
    file_set: FileSet, entry_of: dict[str, ExportEntry], max_shard_nbytes: int, n_parameters: int | None
) -> tuple[list[OutputFile], list[Placement], dict[str, Any] | None]:
    if not file_set.may_split:
        max_shard_nbytes = sum(entry.nbytes for entry in entry_of.values())
    split = split_state_dict_into_shards_factory(
        entry_of,
        get_storage_size=lambda entry: entry.nbytes,
        filename_pattern=file_set.stem + '{suffix}.safetensors',
        max_shard_size=max_shard_nbytes,
    )
    files, placements = [], []
    for name_in_set, names in split.filename_to_tensors.items():
        file = file_set.path(name_in_set)
        header, laid_out = build_header([(n, entry_of[n].dtype, entry_of[n].shape) for n in names])
        for e in laid_out:
            entry = entry_of[e.name]
            first = 0 if entry.combine is None else entry.source_offset
            placements.append(Placement(e.name, e.shape, e.dtype, file, e.start, e.end - e.start, source_offset=first))
        files.append(OutputFile(file, header, laid_out[-1].end))
    index = None
    if split.is_sharded:
        total = {} if n_parameters is None else {'total_parameters': n_parameters}
        index = {'metadata': {**total, **split.metadata}, 'weight_map': split.tensor_to_filename}
    return files, placements, index


def _group(
    placements: list[Placement], entry_of: dict[str, ExportEntry], spec_of: dict[str, TensorSpec]
) -> list[Group]:
    """Placements in file order, those of one ``combine`` together where the first of them stands."""
    members: dict[object, list[Placement]] = {}
    for placement in placements:
        combine = entry_of[placement.hf_name].combine
        key = placement.hf_name if combine is None else id(combine)
        members.setdefault(key, []).append(placement)
    groups = []
    for together in members.values():
        first = entry_of[together[0].hf_name]
        reads = tuple(spec_of[name] for name in first.reads)
        _check_group(reads, together, entry_of, first.combine)
        groups.append(Group(reads, tuple(together), first.combine))
    return groups


def _check_group(
    reads: tuple[TensorSpec, ...],
    together: list[Placement],
    entry_of: dict[str, ExportEntry],
    combine: Combine | None,
) -> None:
    if combine is None and (len(reads) != 1 or math.prod(reads[0].shape) != math.prod(together[0].shape)):
        raise PlanError(
            f'{together[0].hf_name} {together[0].shape}: expected one read of as many elements, '
            f'found {[(spec.name, spec.shape) for spec in reads]}'
        )
    for placement in together:
        if entry_of[placement.hf_name].reads != entry_of[together[0].hf_name].reads:
            raise PlanError(f'{placement.hf_name}: made together with {together[0].hf_name}, from other reads')
        numel, end = math.prod(reads[0].shape), (placement.source_offset or 0) + math.prod(placement.shape)
        if placement.source_offset is not None and (len(reads) != 1 or end > numel):
            raise PlanError(f'{placement.hf_name}: expected a run of the elements of one read, found {end} of {numel}')


def _share_out(groups: list[Group], files: list[OutputFile], n_writers: int) -> list[Group]:
    """Give each group an owner, and order them so that all owners have something to write all the time.

    A file has one owner where there are enough of them: ranks on one file share its locks on a network
    file system. Else the bytes are spread evenly.
    """
    if n_writers == 1:
        return groups
    owner_of_file = {file.name: i % n_writers for i, file in enumerate(files)}
    loads = [(0, rank) for rank in range(n_writers)]
    of_owner: list[deque[Group]] = [deque() for _ in range(n_writers)]
    for group in groups:
        if len(files) >= n_writers:
            owner = owner_of_file[group.placements[0].file]
        else:
            load, owner = heapq.heappop(loads)
            heapq.heappush(loads, (load + group.read_nbytes, owner))
        owned = tuple(replace(placement, owner=owner) for placement in group.placements)
        of_owner[owner].append(replace(group, placements=owned))
    ordered = []
    done = [(0, rank) for rank in range(n_writers) if of_owner[rank]]
    while done:
        nbytes, owner = heapq.heappop(done)
        ordered.append(of_owner[owner].popleft())
        if of_owner[owner]:
            heapq.heappush(done, (nbytes + ordered[-1].read_nbytes, owner))
    return ordered


def _fill_buckets(groups: list[Group], bucket_nbytes: int) -> tuple[Bucket, ...]:
    """Consecutive groups up to ``bucket_nbytes`` of reads; a larger group is a bucket of its own."""
    buckets: list[Bucket] = []
    filling: list[Group] = []
    filled = 0
    for group in groups:
        if filling and filled + group.read_nbytes > bucket_nbytes:
            buckets.append(Bucket(tuple(filling)))
            filling, filled = [], 0
        filling.append(group)
        filled += group.read_nbytes
    if filling:
        buckets.append(Bucket(tuple(filling)))
    return tuple(buckets)


def _digest(
    files: Sequence[OutputFile],
    sliced: Sequence[Group],
    buckets: Sequence[Bucket],
    indexes: dict[str, dict[str, Any]],
) -> str:
    sha = hashlib.sha256(json.dumps(indexes, sort_keys=True).encode())
    for file in files:
        sha.update(repr((file.name, file.nbytes)).encode())
        sha.update(file.header)
    for groups in (sliced, *(bucket.groups for bucket in buckets)):
        for group in groups:
            sha.update(describe_group(group).encode())
        sha.update(b'|')
    return sha.hexdigest()


def describe_group(group: Group) -> str:
    """What is read, where it goes, and who writes it. Equal lines mean equal work."""
    return (
        f'{[(s.name, s.shape, s.dtype) for s in group.reads]} -> '
        f'{[(p.hf_name, p.shape, p.dtype, p.file, p.offset, p.owner, p.source_offset) for p in group.placements]} '
        f'combined={group.combine is not None}'
    )


def describe_plan(plan: SavePlan) -> list[str]:
    """The whole plan as lines, for naming the first difference between two ranks."""
    lines = [f'{file.name}: {file.nbytes} bytes' for file in plan.files]
    lines += ['in slices', *(describe_group(group) for group in plan.sliced)]
    for bucket in plan.buckets:
        lines += ['bucket', *(describe_group(group) for group in bucket.groups)]
    return lines
