"""Turns entries into files, byte offsets, buckets and an index, without torch or tensors.

File names, the split into files and the index are those of ``save_pretrained`` (huggingface_hub's
``split_state_dict_into_shards_factory``). Offsets within a file are those that safetensors chooses.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
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
    Portion,
    Round,
    SavePlan,
    Spread,
    TensorSpec,
)


def fill_rounds(portions: Sequence[Portion], round_nbytes: int) -> tuple[Round, ...]:
    """Fill rounds in which no owner receives more than ``round_nbytes``, and every unfinished owner receives something.

    A larger portion is split within each rank's slice, so that every rank sends part of it in every round.
    """
    of_owner: dict[int, list[tuple[Portion, ...]]] = {}
    for owner in sorted({portion.placement.owner for portion in portions}):
        own = (portion for portion in portions if portion.placement.owner == owner)
        of_owner[owner] = list(_fill(own, round_nbytes))
    at_once = zip_longest(*of_owner.values(), fillvalue=())
    return tuple(Round(tuple(portion for some in each for portion in some)) for each in at_once)


def _fill(portions: Iterator[Portion], round_nbytes: int) -> Iterator[tuple[Portion, ...]]:
    filling: list[Portion] = []
    filled = 0
    for portion in portions:
        nbytes = portion.placement.nbytes
        if filling and filled + nbytes > round_nbytes:
            yield tuple(filling)
            filling, filled = [], 0
        count = -(-nbytes // round_nbytes)
        if count > 1:
            yield from ((replace(portion, number=number, count=count),) for number in range(count))
        else:
            filling.append(portion)
            filled += nbytes
    if filling:
        yield tuple(filling)


#: With more holders than this, a tensor with smaller slices than this is gathered instead of sent.
_FEW_RANKS, _LEAST_SLICE_NBYTES = 16, 4096


def make_plan(
    entries: Sequence[ExportEntry],
    specs: Sequence[TensorSpec],
    *,
    max_shard_nbytes: int,
    bucket_nbytes: int,
    n_parameters: int | Mapping[str, int | None] | None = None,
    n_writers: int = 1,
    share_files: bool = False,
    sliced: Collection[str] = (),
    spread: Mapping[str, Spread] | None = None,
    share_copies: bool = False,
    round_nbytes: int = 1,
) -> SavePlan:
    """Decide every file, offset, round and bucket of a save.

    Runs on: all ranks, with the same result.

    Args:
        entries: The output tensors, in the order in which ``save_pretrained`` would write them.
        specs: The tensors of the source.
        n_parameters: ``total_parameters`` of the index; None leaves it out (transformers < 5). A mapping by folder if
            the file sets hold different models.
        n_writers: Number of ranks that write sent and gathered tensors.
        share_files: Let several ranks write into one file. Otherwise each file has one owner.
        sliced: Tensors of which every rank writes its own slice. Outputs that need whole tensors are still gathered.
        spread: Which elements of a tensor each rank holds. Tensors in ``spread`` but not in ``sliced`` are sent to
            the owner of the output, slice by slice. Outputs that need whole tensors are still gathered.
        share_copies: If every rank holds the whole tensor, each sends its share. Otherwise the owner reads its own
            copy and nothing is sent.
        round_nbytes: Most bytes that an owner receives in one round.

    Raises:
        PlanError: Two entries have the same name, or an entry reads a tensor that the source lacks.
    """
    spec_of = {spec.name: spec for spec in specs}
    sets: dict[FileSet, dict[str, ExportEntry]] = {}
    for entry in entries:
        if entry.hf_name in sets.setdefault(entry.file_set, {}):
            raise PlanError(f'two tensors would be written under the same name: {entry.hf_name}')
        unknown = [name for name in entry.reads if name not in spec_of]
        if unknown:
            raise PlanError(f'{entry.hf_name} is made from {unknown}, which the model does not have')
        sets[entry.file_set][entry.hf_name] = entry
    if not sets:
        raise PlanError('nothing to save: the exporter lists no tensors')

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
    groups = [_with_spread(group, spread or {}) for group in groups]
    written, sent, whole = _by_road(groups, sliced)
    owner_of = _choose_owners([*sent, *whole], files, n_writers, share_files=share_files)
    rounds = fill_rounds(_portions(sent, owner_of, share_copies=share_copies), round_nbytes)
    buckets = _fill_buckets(_in_turns(_owned(whole, owner_of)), bucket_nbytes)
    digest = _digest(files, written, rounds, buckets, indexes)
    return SavePlan(tuple(files), tuple(written), rounds, buckets, indexes, digest)


def _by_road(groups: list[Group], sliced: Collection[str]) -> tuple[list[Group], list[Group], list[Group]]:
    """Split groups into sliced ones, sent ones (one for each output) and gathered ones."""
    written: list[Group] = []
    sent: list[Group] = []
    whole: list[Group] = []
    for group in groups:
        if group.is_contiguous and group.reads[0].name in sliced:
            written.append(group)
        elif _may_travel(group):
            sent += [replace(group, placements=(placement,)) for placement in group.placements]
        else:
            whole.append(group)
    return written, sent, whole


def _with_spread(group: Group, spread: Mapping[str, Spread]) -> Group:
    return replace(group, spread=spread.get(group.reads[0].name) if group.is_contiguous else None)


def _may_travel(group: Group) -> bool:
    return group.spread is not None and _is_worth_sending(group.spread, group.read_nbytes)


def _is_worth_sending(spread: Spread, nbytes: int) -> bool:
    """False for tiny slices from very many ranks: the owner's work grows with the number of slices."""
    n_holders = len(spread.holders)
    return n_holders <= _FEW_RANKS or nbytes >= n_holders * _LEAST_SLICE_NBYTES


def _lay_out(
    file_set: FileSet, entry_of: dict[str, ExportEntry], max_shard_nbytes: int, n_parameters: int | None
) -> tuple[list[OutputFile], list[Placement], dict[str, Any] | None]:
    if not file_set.may_split:
        max_shard_nbytes = sum(entry.nbytes for entry in entry_of.values())
    split = split_state_dict_into_shards_factory(
        entry_of,
        get_storage_size=lambda entry: entry.storage_nbytes,
        get_storage_id=lambda entry: entry.storage,
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
    """Groups in file order; placements made by one ``combine`` form one group, at the position of the first."""
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
            f'{together[0].hf_name} {together[0].shape}: expected one source tensor with as many elements, '
            f'found {[(spec.name, spec.shape) for spec in reads]}'
        )
    for placement in together:
        if entry_of[placement.hf_name].reads != entry_of[together[0].hf_name].reads:
            raise PlanError(f'{placement.hf_name}: made together with {together[0].hf_name}, but from other tensors')
        numel, end = math.prod(reads[0].shape), placement.run.stop
        if placement.source_offset is not None and (len(reads) != 1 or end > numel):
            raise PlanError(f'{placement.hf_name}: ends at element {end} of a source tensor with {numel} elements')


def _choose_owners(
    groups: list[Group], files: list[OutputFile], n_writers: int, *, share_files: bool
) -> dict[Placement, int]:
    """The rank that writes each output tensor. All tensors of a file have the same owner.

    If ``share_files`` is set and there are fewer files than ranks, owners are chosen by group instead.
    """
    if share_files and len(files) < n_writers:
        nbytes = [sum(place.nbytes for place in group.placements) for group in groups]
        pairs = zip(groups, _balanced(nbytes, range(n_writers)), strict=True)
        return {place: owner for group, owner in pairs for place in group.placements}
    to_write = {file.name: 0 for file in files}
    for place in (place for group in groups for place in group.placements):
        to_write[place.file] += place.nbytes
    n_owners = min(n_writers, len(files))
    # Spread owners over the hosts: ranks on one host share its network and memory
    ranks = [number * n_writers // n_owners for number in range(n_owners)]
    largest_first = sorted(to_write, key=to_write.__getitem__, reverse=True)
    owners = _balanced([to_write[name] for name in largest_first], ranks)
    owner_of_file = dict(zip(largest_first, owners, strict=True))
    return {place: owner_of_file[place.file] for group in groups for place in group.placements}


def _balanced(nbytes: Iterable[int], ranks: Sequence[int]) -> list[int]:
    """Assign each item to the rank that has the fewest bytes so far."""
    loads = [(0, rank) for rank in ranks]
    owners = []
    for more in nbytes:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + more, owner))
        owners.append(owner)
    return owners


def _owned(groups: list[Group], owner_of: Mapping[Placement, int]) -> list[Group]:
    return [
        replace(group, placements=tuple(replace(place, owner=owner_of[place]) for place in group.placements))
        for group in groups
    ]


def _portions(groups: list[Group], owner_of: Mapping[Placement, int], *, share_copies: bool) -> list[Portion]:
    portions = [portion for group in _owned(groups, owner_of) for portion in group.portions]
    if share_copies:
        return portions
    return [
        replace(portion, spread=portion.spread.read_by(portion.placement.owner))
        if portion.spread.on_every_rank
        else portion
        for portion in portions
    ]


def _in_turns(groups: list[Group]) -> list[Group]:
    """Groups interleaved by owner, so that all owners are kept busy."""
    of_owner: dict[int, deque[Group]] = {}
    for group in groups:
        of_owner.setdefault(group.placements[0].owner, deque()).append(group)
    ordered = []
    done = [(0, owner) for owner in sorted(of_owner)]
    while done:
        nbytes, owner = heapq.heappop(done)
        ordered.append(of_owner[owner].popleft())
        if of_owner[owner]:
            heapq.heappush(done, (nbytes + ordered[-1].read_nbytes, owner))
    return ordered


def _fill_buckets(groups: list[Group], bucket_nbytes: int) -> tuple[Bucket, ...]:
    """Buckets of consecutive groups that read up to ``bucket_nbytes``; a larger group gets its own bucket."""
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
    rounds: Sequence[Round],
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
    for at_once in rounds:
        for portion in at_once.portions:
            sha.update(_describe_portion(portion).encode())
        sha.update(b'|')
    return sha.hexdigest()


def _describe_portion(portion: Portion) -> str:
    p, spread = portion.placement, portion.spread
    return (
        f'{portion.read.name} -> {(p.hf_name, p.shape, p.dtype, p.file, p.offset, p.owner, p.source_offset)} '
        f'part {portion.number} of {portion.count}, {spread}'
    )


def describe_group(group: Group) -> str:
    """A line that says what is read, where it goes, and who writes it. Equal lines mean equal work."""
    return (
        f'{[(s.name, s.shape, s.dtype) for s in group.reads]} -> '
        f'{[(p.hf_name, p.shape, p.dtype, p.file, p.offset, p.owner, p.source_offset) for p in group.placements]} '
        f'combined={group.combine is not None}{"" if group.spread is None else f", {group.spread}"}'
    )


def describe_plan(plan: SavePlan) -> list[str]:
    """The whole plan as lines, for reporting the first difference between two ranks."""
    lines = [f'{file.name}: {file.nbytes} bytes' for file in plan.files]
    lines += ['in slices', *(describe_group(group) for group in plan.sliced)]
    for at_once in plan.rounds:
        lines += ['round', *(_describe_portion(portion) for portion in at_once.portions)]
    for bucket in plan.buckets:
        lines += ['bucket', *(describe_group(group) for group in bucket.groups)]
    return lines
