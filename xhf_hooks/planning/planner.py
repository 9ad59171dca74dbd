"""Turns entries into files, byte offsets, buckets and an index, without torch or tensors.

File names, the split into files and the index are those of ``save_pretrained`` (huggingface_hub's
``split_state_dict_into_shards_factory``). Offsets within a file are those that safetensors chooses.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from xhf_hooks.compat.huggingface_hub import split_into_files
from xhf_hooks.errors import PlanError
from xhf_hooks.format.index import WEIGHTS_SUFFIX
from xhf_hooks.format.safetensors import build_header
from xhf_hooks.planning.plan import PlannedFile, SavePlan
from xhf_hooks.planning.rounds import by_owner, fill_rounds, filled, portions_of, read_by_owner
from xhf_hooks.planning.spread import Spread
from xhf_hooks.planning.types import CopiedTensor, ExportEntry, FileSet, Group, Placement, TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy

#: With more holders than this, a tensor with smaller slices than this is gathered instead of sent.
_FEW_RANKS, _LEAST_SLICE_NBYTES = 16, 4096


def make_plan(
    entries: Sequence[ExportEntry],
    specs: Sequence[TensorSpec],
    *,
    max_shard_nbytes: int,
    bucket_nbytes: int,
    strategy: WriteStrategy,
    n_parameters: int | Mapping[str, int | None] | None = None,
    world_size: int = 1,
    spread: Mapping[str, Spread] | None = None,
    send_shares_of_replicas: bool = False,
    round_nbytes: int = 1,
) -> SavePlan:
    """Decide every file, offset, round and bucket of a save.

    Runs on: all ranks, with the same result.

    Args:
        entries: The output tensors, in the order in which ``save_pretrained`` would write them. They were checked
            (:func:`.require_entries`).
        strategy: Who writes what. Outputs that need whole tensors are gathered in any case.
        n_parameters: ``total_parameters`` of the index; None leaves it out (transformers < 5). A mapping by folder if
            the save has several file sets (:class:`.FileSet`), such as those of a model's parts.
        spread: Which elements of a tensor each rank holds. None: this process holds all of each tensor.
        send_shares_of_replicas: For tensors that every rank holds whole, and whose slices would be sent to the owner
            ('stream' and 'parallel'). True: each rank sends a share. False: the owner reads its own replica, and
            nothing is sent. With 'positional', each rank writes its share in any case.
        round_nbytes: Most bytes that an owner receives in one round.

    Raises:
        PlanError: Two entries have the same name, or there are none.
    """
    spec_of = {spec.name: spec for spec in specs}
    files: list[PlannedFile] = []
    groups: list[Group] = []
    to_copy: list[CopiedTensor] = []
    indexes: dict[str, dict[str, Any]] = {}
    for file_set, entry_of in _by_file_set(entries).items():
        total = n_parameters.get(file_set.folder) if isinstance(n_parameters, Mapping) else n_parameters
        set_files, placements, index = _lay_out(file_set, entry_of, max_shard_nbytes, total)
        files += set_files
        groups += _group([one for one in placements if not entry_of[one.hf_name].copied_from], entry_of, spec_of)
        sources = ((one, entry_of[one.hf_name].copied_from) for one in placements)
        to_copy += [CopiedTensor(placement, source) for placement, source in sources if source is not None]
        if index is not None:
            indexes[file_set.path(f'{file_set.stem}.safetensors.index.json')] = index
    written: list[Group] = []  # of which every rank writes its own slices ('positional')
    sent: list[Group] = []  # whose slices are sent to the owner ('parallel', 'stream')
    whole: list[Group] = []  # that are gathered
    for group in groups:
        known = _spread_of(group, spread) if strategy.reads_slices else None
        if known is None:
            whole.append(group)
        elif strategy.in_place:
            written.append(replace(group, spread=known))
        elif _is_worth_sending(known, group.read_nbytes):
            sent += [replace(group, placements=(placement,), spread=known) for placement in group.placements]
        else:
            whole.append(group)
    n_writers = world_size if strategy.all_ranks_write else 1
    to_own = [*sent, *whole, *(Group(reads=(), placements=(one.placement,), combine=None) for one in to_copy)]
    owner_of = _choose_owners(to_own, files, n_writers, share_files=strategy.in_place)
    copied = [replace(one, placement=replace(one.placement, owner=owner_of[one.placement])) for one in to_copy]
    # One of each placement; fill_rounds() below cuts the large ones into parts
    portions = [portion for group in _owned(sent, owner_of) for portion in portions_of(group)]
    if not send_shares_of_replicas:
        portions = [read_by_owner(one, world_size) if one.spread.on_every_rank else one for one in portions]
    # Owners take turns, so that each bucket has groups of as many owners as possible, which write at the same time
    in_turns = chain.from_iterable(zip_longest(*by_owner(_owned(whole, owner_of), lambda group: group.placements[0])))
    buckets = filled(filter(None, in_turns), lambda group: group.read_nbytes, bucket_nbytes)
    plan = SavePlan(
        files=tuple(files),
        in_place=tuple(written),
        rounds=fill_rounds(portions, round_nbytes),
        buckets=tuple(buckets),
        copied=tuple(copied),
        indexes=indexes,
        digest='',
    )
    return replace(plan, digest=hashlib.sha256('\n'.join(describe_plan(plan)).encode()).hexdigest())


def _by_file_set(entries: Sequence[ExportEntry]) -> dict[FileSet, dict[str, ExportEntry]]:
    sets: dict[FileSet, dict[str, ExportEntry]] = {}
    for entry in entries:
        if entry.hf_name in sets.setdefault(entry.file_set, {}):
            raise PlanError(f'two tensors would be written under the same name: {entry.hf_name}')
        sets[entry.file_set][entry.hf_name] = entry
    if not sets:
        raise PlanError('nothing to save: the exporter lists no tensors')
    return sets


def _spread_of(group: Group, spread: Mapping[str, Spread] | None) -> Spread | None:
    """Which elements of the group's only source tensor each rank holds; None if it must be gathered."""
    if not group.is_contiguous:
        return None
    if spread is None:
        return Spread(math.prod(group.reads[0].shape), axes=())  # not split: the only rank holds all elements
    return spread.get(group.reads[0].name)


def _is_worth_sending(spread: Spread, nbytes: int) -> bool:
    """False for tiny slices from very many ranks: the owner's work grows with the number of slices."""
    n_holders = len(spread.holders)
    return n_holders <= _FEW_RANKS or nbytes >= n_holders * _LEAST_SLICE_NBYTES


def _lay_out(
    file_set: FileSet, entry_of: dict[str, ExportEntry], max_shard_nbytes: int, n_parameters: int | None
) -> tuple[list[PlannedFile], list[Placement], dict[str, Any] | None]:
    if not file_set.may_split:
        max_shard_nbytes = sum(entry.nbytes for entry in entry_of.values())
    nbytes_of = {name: entry.nbytes for name, entry in entry_of.items()}
    tensors_of = split_into_files(nbytes_of, file_set.stem + '{suffix}' + WEIGHTS_SUFFIX, max_shard_nbytes)
    files, placements = [], []
    for name_in_set, names in tensors_of.items():
        file = file_set.path(name_in_set)
        header, laid_out = build_header([(n, entry_of[n].dtype, entry_of[n].shape) for n in names])
        for e in laid_out:
            entry = entry_of[e.name]
            # None: `combine` must be called. A number: the output is the elements of its only source tensor from this
            # one on, so ranks read slices of it
            first = 0 if entry.combine is None else entry.source_offset
            placements.append(Placement(e.name, e.shape, e.dtype, file, e.start, e.end - e.start, source_offset=first))
        files.append(PlannedFile(file, header, laid_out[-1].end))
    index = None
    if len(tensors_of) > 1:
        total = {} if n_parameters is None else {'total_parameters': n_parameters}
        weight_map = {name: file for file, names in tensors_of.items() for name in names}
        index = {'metadata': {**total, 'total_size': sum(nbytes_of.values())}, 'weight_map': weight_map}
    return files, placements, index


def _group(
    placements: list[Placement], entry_of: dict[str, ExportEntry], spec_of: dict[str, TensorSpec]
) -> list[Group]:
    """Groups in file order; placements made by one ``combine`` form one group, at the position of the first."""
    members: dict[object, list[Placement]] = {}
    for placement in placements:
        combine = entry_of[placement.hf_name].combine
        members.setdefault(placement.hf_name if combine is None else id(combine), []).append(placement)
    groups = []
    for together in members.values():
        first = entry_of[together[0].hf_name]
        groups.append(Group(tuple(spec_of[name] for name in first.reads), tuple(together), first.combine))
    return groups


def _choose_owners(
    groups: list[Group], files: list[PlannedFile], n_writers: int, *, share_files: bool
) -> dict[Placement, int]:
    """The rank that writes each output tensor. All tensors of a file have the same owner.

    If ``share_files`` is set and there are fewer files than ranks, owners are chosen by group instead.
    """
    if share_files and len(files) < n_writers:
        nbytes = [sum(placement.nbytes for placement in group.placements) for group in groups]
        pairs = zip(groups, balanced(nbytes, range(n_writers)), strict=True)
        return {placement: owner for group, owner in pairs for placement in group.placements}
    to_write = {file.name: 0 for file in files}
    for placement in (placement for group in groups for placement in group.placements):
        to_write[placement.file] += placement.nbytes
    n_owners = min(n_writers, len(files))
    # Spread owners over the hosts: ranks on one host share its network and memory
    ranks = [number * n_writers // n_owners for number in range(n_owners)]
    largest_first = sorted(to_write, key=to_write.__getitem__, reverse=True)
    owners = balanced([to_write[name] for name in largest_first], ranks)
    owner_of_file = dict(zip(largest_first, owners, strict=True))
    return {placement: owner_of_file[placement.file] for group in groups for placement in group.placements}


def balanced(nbytes: Iterable[int], ranks: Sequence[int]) -> list[int]:
    """The rank of each item, which is the one that has the fewest bytes so far."""
    loads = [(0, rank) for rank in ranks]
    owners = []
    for more in nbytes:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + more, owner))
        owners.append(owner)
    return owners


def _owned(groups: list[Group], owner_of: Mapping[Placement, int]) -> list[Group]:
    owned = []
    for group in groups:
        placements = [replace(placement, owner=owner_of[placement]) for placement in group.placements]
        owned.append(replace(group, placements=tuple(placements)))
    return owned


def describe_plan(plan: SavePlan) -> list[str]:
    """The records of the plan as lines, for its digest, and for reporting the first difference between two ranks."""
    records: list[Any] = [*plan.files, *plan.in_place]
    for one_round in plan.rounds:
        records += ['round', *one_round.portions]
    for bucket in plan.buckets:
        records += ['bucket', *bucket]
    records += plan.copied
    records += [(name, index['metadata']) for name, index in plan.indexes.items()]
    return [str(record) for record in records]
