"""A checkpoint on disk as a source of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
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


class CheckpointSource:
    """The tensors of a checkpoint of any supported layout.

    Args:
        path: A path that :func:`find_checkpoint` accepts.
        ema: Read the averaged weights if the checkpoint holds both averaged and live ones.

    Attributes:
        tensors: The tensors by first name, in the order of the state dict.
        averages: Whether it holds both averaged and live weights, as written by MMEngine's EMAHook.
        unproven: Statements that the files cannot confirm, see :func:`.evidence.unproven`.
        manifest_fields: For the manifest and the log: ``engine`` ('deepspeed' or 'torch'), ``zero_stage``,
            ``world_size``, ``deepspeed`` (version), ``layout``, ``weights`` ('averaged' or 'live'), ``checkpoint``
            (path as text).
        iteration: Completed training iterations; None if unknown.
        epoch: Completed epochs; None if unknown.
        config_text: ``meta.cfg``, the Python config that MMEngine dumped; None if there is none.
        trained_dtype: The dtype that DeepSpeed cast the model to; None if it did not.
        trained: Names of the parameters that DeepSpeed recorded as trained; None if nothing was recorded.
        not_tensors: Entries of the state dict that are no tensors: a word for the kind, by name.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """

    def __init__(self, path: Path, *, ema: bool = True) -> None:
        self.found = found = find_checkpoint(path)
        self.averages = False
        self.unproven: tuple[str, ...] = ()
        self.has_unnamed_masters = False  # of stage 0 of DeepSpeed, which does not say whose they are
        self.warnings: list[str] = []
        self.manifest_fields: dict[str, Any] = {'engine': 'torch', 'layout': found.layout, 'weights': 'live'}
        self.manifest_fields['checkpoint'] = str(found.path)
        if found.layout == 'dcp':
            self.unproven = ('could not verify that .metadata and all .distcp files are of one save',)
            model, tensors = ModelState(found.path, {}, {}), load_dcp(found)
        else:
            model, tensors = self._open_file(ema) if found.layout == 'file' else self._open_folder()
        self.tensors = {tensor.name: tensor for tensor in tensors}
        if not self.tensors:
            found_text = f'it holds {some([str(key) for key in model.content])}' if model.content else 'it is empty'
            raise CheckpointError(f'{found.path}: holds no weights; {found_text}. Take another checkpoint')
        stored = {name for tensor in tensors for name in (tensor.name, *tensor.aliases)}
        lacking = [name for name in model.module if name not in stored]
        if lacking:
            self.warnings.append(
                f'{counted(len(lacking), "tensor")} named in the checkpoint, but not stored: {some(lacking)}'
            )
        self.trained, self.not_tensors = model.trained, model.not_tensors
        content = model.content
        meta = content.get('meta')
        meta = meta if isinstance(meta, dict) else {}
        self.iteration = _first_int(meta.get('iter'), _number_in(found), content.get('global_steps'))
        self.epoch = _first_int(meta.get('epoch'))
        self.config_text = meta['cfg'] if isinstance(meta.get('cfg'), str) else None
        self.trained_dtype = trained_dtype(content.get('ds_config'))

    def specs(self) -> list[TensorSpec]:
        """The specs of all tensors."""
        return [tensor.spec for tensor in self.tensors.values()]

    def _open_file(self, ema: bool) -> tuple[ModelState, list[StoredTensor]]:
        file = self.found.path
        if file.suffix == WEIGHTS_SUFFIX:
            return ModelState(file, {}, {}), [tensor for each in self.found.model_files for tensor in tensors_of(each)]
        content = (
            load_torch_file(file) if len(self.found.model_files) == 1 else tensors_in_files(self.found.model_files)
        )
        key, tensors = _state_dict_in(file, content)
        passed_over = [name for name in _nested(content) if name != key and not _BESIDE_WEIGHTS.fullmatch(name)]
        if passed_over:
            self.warnings.append(f'{file}: the weights in {key!r} are converted, those in {some(passed_over)} are not')
        live = _live(content, tensors) if key == 'state_dict' else None
        self.averages = live is not None
        if live is not None and ema:
            self.manifest_fields['weights'] = 'averaged'
        not_tensors = not_tensors_in(content if key is None else content[key])
        model = ModelState(file, content, tensors if ema or live is None else live, not_tensors=not_tensors)
        return model, assemble(model, {}, {})

    def _open_folder(self) -> tuple[ModelState, list[StoredTensor]]:
        models = [load_model_state(file) for file in self.found.model_files]
        optims = [load_optim_state(file) for file in self.found.optim_files]
        require_one_save(models, optims)
        self.unproven = unproven(optims)
        first = models[0]
        saved = first.content.get('optimizer')
        if not optims and isinstance(saved, dict):
            self.has_unnamed_masters = not {'fp32_groups', 'fp32_groups_flat'}.isdisjoint(saved)
        config = first.content.get('ds_config')
        zero = config.get('zero_optimization') if isinstance(config, dict) else None
        # In the config: stage 0 with BF16_Optimizer has the files of stage 1
        stage = _first_int(zero.get('stage') if isinstance(zero, dict) else None, optims[0].stage if optims else 0)
        n_ranks = optims[0].world_size if optims else _first_int(first.content.get('dp_world_size'))
        self.manifest_fields |= {
            'engine': 'deepspeed',
            'zero_stage': stage,
            'world_size': n_ranks,
            'deepspeed': first.version,
        }
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
        self.warnings += judge_steps(models, optims, tensors)
        return first, tensors


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
    """The iteration in the name of the folder or file, or of Trainer's folder; None for epochs."""
    for path in (found.path, found.path.parent):
        if match := re.fullmatch(r'(?:iter_|checkpoint-)(\d{1,15})(?:\.pth)?', path.name, re.ASCII):
            return int(match[1])
    return None


def _first_int(*values: Any) -> int | None:
    return next(filter(is_count, values), None)
