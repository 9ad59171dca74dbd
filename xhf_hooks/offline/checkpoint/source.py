"""A checkpoint on disk as a source of tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.index import WEIGHTS_SUFFIX
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.format.text import counted, some
from xhf_hooks.offline.checkpoint.dcp import load_dcp
from xhf_hooks.offline.checkpoint.evidence import judge_steps, require_one_save, unproven
from xhf_hooks.offline.checkpoint.find import FoundCheckpoint, find_checkpoint
from xhf_hooks.offline.checkpoint.regions import Regions, assemble, frozen_regions, zero3_regions, zero12_regions
from xhf_hooks.offline.checkpoint.states import (
    ModelState,
    load_model_state,
    load_optim_state,
    not_tensors_in,
    parsing,
    tensors_in,
    tensors_in_files,
    trained_dtype,
)
from xhf_hooks.offline.checkpoint.torch_file import load_torch_file
from xhf_hooks.offline.checkpoint.unpickler import Inert
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of

#: Keys of the state dict: MMEngine, DeepSpeed (also save_16bit_model), many trainers, torch's tutorials.
_KEYS = ('state_dict', 'module', 'model', 'model_state_dict')
#: Keys of tensors that are no weights to choose between: the other half of MMEngine's EMAHook, states of optimizers.
_BESIDE_WEIGHTS = re.compile(r'ema_state_dict|.*optim.*|.*sched.*|.*scaler.*|.*rng.*|.*random.*')


@dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """The tensors of a checkpoint of any supported layout, as :meth:`open` has found them.

    Attributes:
        found: The files.
        tensors: The tensors by first name, in the order of the state dict.
        averages: Whether it holds both averaged and live weights, as written by MMEngine's EMAHook.
        unproven: What the files cannot show, see :func:`.evidence.unproven`.
        has_unnamed_masters: Whether it is of stage 0 of DeepSpeed, with fp32 masters that do not say whose they are.
        manifest_fields: For the manifest and the log: ``engine`` ('deepspeed' or 'torch'), ``zero_stage``,
            ``world_size``, ``deepspeed`` (version), ``layout``, ``weights`` ('averaged' or 'live'), ``checkpoint``
            (path as text).
        iteration: Completed training iterations; None if unknown.
        epoch: Completed epochs; None if unknown.
        config_text: ``meta.cfg``, the Python config that MMEngine dumped; None if there is none.
        trained_dtype: The dtype that DeepSpeed cast the model to; None if it did not.
        trained: Names of the parameters that DeepSpeed recorded as trained; None if nothing was recorded.
        not_tensors: Entries of the state dict that are no tensors: a word for the kind, by name.
        warnings: What the user has to know.
    """

    found: FoundCheckpoint
    tensors: Mapping[str, StoredTensor]
    averages: bool
    unproven: Sequence[str]
    has_unnamed_masters: bool
    manifest_fields: Mapping[str, Any]
    iteration: int | None
    epoch: int | None
    config_text: str | None
    trained_dtype: str | None
    trained: Collection[str] | None
    not_tensors: Mapping[str, str]
    warnings: Sequence[str]

    @classmethod
    def open(cls, path: Path, *, ema: bool = True) -> CheckpointSource:
        """Find a checkpoint, and parse its files.

        Args:
            path: A path that :func:`.find_checkpoint` accepts.
            ema: Read the averaged weights if the checkpoint holds both averaged and live ones.

        Raises:
            CheckpointError: The checkpoint cannot be read.
        """
        found = find_checkpoint(path)
        parsed = _parse(found, ema)
        model, tensors, warnings = parsed.model, parsed.tensors, [*parsed.warnings]
        if not tensors:
            found_text = f'it holds {some([str(key) for key in model.content])}' if model.content else 'it is empty'
            raise CheckpointError(f'{found.path}: holds no weights; {found_text}. Take another checkpoint')
        stored = {name for tensor in tensors for name in (tensor.name, *tensor.aliases)}
        if lacking := [name for name in model.module if name not in stored]:
            warnings.append(
                f'{counted(len(lacking), "tensor")} named in the checkpoint, but not stored: {some(lacking)}'
            )
        content = model.content
        meta = content.get('meta')
        meta = meta if isinstance(meta, dict) else {}
        return cls(
            found=found,
            tensors={tensor.name: tensor for tensor in tensors},
            averages=parsed.averages,
            unproven=parsed.unproven,
            has_unnamed_masters=parsed.has_unnamed_masters,
            manifest_fields={
                'engine': 'torch',
                'layout': found.layout,
                'weights': 'averaged' if parsed.averages and ema else 'live',
                'checkpoint': str(found.path),
                **parsed.manifest_fields,
            },
            iteration=_first_int(meta.get('iter'), _number_in(found), content.get('global_steps')),
            epoch=_first_int(meta.get('epoch')),
            config_text=meta['cfg'] if isinstance(meta.get('cfg'), str) else None,
            trained_dtype=trained_dtype(content.get('ds_config')),
            trained=model.trained,
            not_tensors=model.not_tensors,
            warnings=warnings,
        )

    def specs(self) -> list[TensorSpec]:
        """The specs of all tensors."""
        return [tensor.spec for tensor in self.tensors.values()]


@dataclass(frozen=True)
class _Parsed:
    """What the files of one layout hold; see :class:`CheckpointSource`."""

    model: ModelState
    tensors: Sequence[StoredTensor]
    averages: bool = False
    unproven: Sequence[str] = ()
    has_unnamed_masters: bool = False
    manifest_fields: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def _parse(found: FoundCheckpoint, ema: bool) -> _Parsed:
    if found.layout == 'dcp':
        unknown = (
            'not checked: that .metadata and all .distcp files are of one save, which they do not record. '
            'This matters only if files of several saves were copied together'
        )
        return _Parsed(ModelState(found.path, {}, {}), load_dcp(found), unproven=[unknown])
    return _parse_file(found, ema) if found.layout == 'file' else _parse_folder(found)


def _parse_file(found: FoundCheckpoint, ema: bool) -> _Parsed:
    file, files = found.path, found.model_files
    if file.suffix == WEIGHTS_SUFFIX:
        return _Parsed(ModelState(file, {}, {}), [tensor for each in files for tensor in tensors_of(each)])
    content = load_torch_file(file) if len(files) == 1 else tensors_in_files(files)
    key, tensors = _state_dict_in(file, content)
    warnings = []
    passed_over = [name for name in _nested(content) if name != key and not _BESIDE_WEIGHTS.fullmatch(name)]
    if passed_over:
        warnings.append(f'{file}: the weights in {key!r} are converted, those in {some(passed_over)} are not')
    live = _live(content, tensors) if key == 'state_dict' else None
    not_tensors = not_tensors_in(content if key is None else content[key])
    model = ModelState(file, content, tensors if ema or live is None else live, not_tensors=not_tensors)
    return _Parsed(model, assemble(model, {}, {}), averages=live is not None, warnings=warnings)


def _parse_folder(found: FoundCheckpoint) -> _Parsed:
    models = [load_model_state(file) for file in found.model_files]
    optims = [load_optim_state(file) for file in found.optim_files]
    require_one_save(models, optims)
    first = models[0]
    saved = None if optims else first.content.get('optimizer')
    config = first.content.get('ds_config')
    zero = config.get('zero_optimization') if isinstance(config, dict) else None
    # In the config: stage 0 with BF16_Optimizer has the files of stage 1
    stage = _first_int(zero.get('stage') if isinstance(zero, dict) else None, optims[0].stage if optims else 0)
    n_ranks = optims[0].world_size if optims else _first_int(first.content.get('dp_world_size'))
    with parsing(first.file, 'a checkpoint of DeepSpeed'):
        shapes = first.shapes or ()
        is_zero3 = bool(optims) and optims[0].stage == 3
        masters: Regions = {}  # without ZeRO, DeepSpeed saves fp32 masters without names, so they are not used
        if is_zero3:
            masters = zero3_regions(shapes, [(optim.file, optim.groups) for optim in optims])
        elif optims:
            masters = zero12_regions(shapes, optims)
        empty = {name for name, tensor in first.module.items() if is_zero3 and tensor.shape == (0,)}
        frozen = frozen_regions(models, is_zero3)
        tensors = assemble(first, masters, frozen, placeholders=empty - first.buffer_names)
    return _Parsed(
        first,
        tensors,
        unproven=unproven(optims),
        has_unnamed_masters=isinstance(saved, dict) and ('fp32_groups' in saved or 'fp32_groups_flat' in saved),
        manifest_fields={
            'engine': 'deepspeed',
            'zero_stage': stage,
            'world_size': n_ranks,
            'deepspeed': first.version,
        },
        warnings=judge_steps(models, optims, tensors),
    )


def _nested(content: Mapping[Any, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each state dict in a checkpoint, by its key."""
    found = {
        key: tensors_in(value) for key, value in content.items() if isinstance(key, str) and isinstance(value, dict)
    }
    return {key: tensors for key, tensors in found.items() if tensors}


def _state_dict_in(file: Path, content: Any) -> tuple[str | None, dict[str, torch.Tensor]]:
    """The key of the state dict and its tensors. The key is None if the content is the state dict itself.

    Raises:
        CheckpointError: There is none, or it is not clear which one is meant.
    """
    if not isinstance(content, dict):
        raise CheckpointError(
            f'{file}: holds a {type(content).__name__}, not a checkpoint; give a .pth with a state_dict'
        )
    nested = _nested(content)
    if not nested and not tensors_in(content):
        objects = {'': content, **{f', as {key!r},': content.get(key) for key in _KEYS}}
        for where, value in objects.items():
            if isinstance(value, Inert):
                raise CheckpointError(
                    f'{file}: holds{where} an object of the class {type(value).__name__}, not a state dict; load it '
                    f'where its code is, with torch.load(..., weights_only=False), and save its state_dict() with '
                    f'torch.save'
                )
    known = next((key for key in _KEYS if key in nested), None)
    if known is not None:
        return known, nested[known]
    own = tensors_in(content)
    keys = [key for key, tensors in nested.items() if len(tensors) > len(own) and not _BESIDE_WEIGHTS.fullmatch(key)]
    if len(keys) > 1:
        raise CheckpointError(
            f'{file}: holds several state dicts ({some(keys)}); save the one that is meant with torch.save'
        )
    return (keys[0], nested[keys[0]]) if keys else (None, own)


def _live(content: Mapping[str, Any], averaged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """MMEngine's EMAHook swaps both before it saves (``hooks/ema_hook.py``, ``_swap_ema_state_dict``)."""
    swapped = content.get('ema_state_dict')
    swapped = tensors_in(swapped) if isinstance(swapped, dict) else {}
    found = {name: swapped[f'module.{name}'] for name in averaged if f'module.{name}' in swapped}
    return {**averaged, **found} if found else None


def _number_in(found: FoundCheckpoint) -> int | None:
    """The iteration in the name of the folder or file, or of a trainer's folder; None for epochs."""
    for path in (found.path, found.path.parent):
        if match := re.fullmatch(r'(?:iter_|checkpoint-|ckpt-step-)(\d{1,15})(?:\.pth)?', path.name, re.ASCII):
            return int(match[1])
    return None


def _first_int(*values: Any) -> int | None:
    return next(filter(is_count, values), None)
