"""A checkpoint on disk as a source of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.format.text import counted
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.checkpoint.dcp import load_dcp
from xhf_hooks.sources.checkpoint.find import FoundCheckpoint
from xhf_hooks.sources.checkpoint.regions import (
    Assembled,
    from_state_dict,
    from_zero3,
    from_zero12,
    zero3_regions,
    zero12_regions,
)
from xhf_hooks.sources.checkpoint.same_save import require_one_save, unproven
from xhf_hooks.sources.checkpoint.stage0 import stage0_masters
from xhf_hooks.sources.checkpoint.states import (
    ModelState,
    OptimState,
    load_model_state,
    load_optim_state,
    trained_dtype,
)
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file
from xhf_hooks.sources.checkpoint.universal import load_universal
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor
from xhf_hooks.sources.stored_source import StoredSource, StoredTensor

#: Keys of the state dict: MMEngine, DeepSpeed (also save_16bit_model), many trainers.
_KEYS = ('state_dict', 'module', 'model')
_MMENGINES, _OF_EMA = _KEYS[0], 'ema_state_dict'
_SHOWN = 5


@dataclass(frozen=True)
class SingleFile:
    """The content of one file.

    Attributes:
        content: All of it, as data.
        tensors: Its state dict; for a run with EMAHook, the averaged weights.
        live: The live weights of a run with EMAHook; else None.
    """

    content: Mapping[str, Any]
    tensors: dict[str, LazyTensor]
    live: dict[str, LazyTensor] | None


def load_single_file(file: Path) -> SingleFile:
    """Read the file and find its state dicts.

    Raises:
        CheckpointError: It has no state dict.
    """
    content = load_torch_file(file)
    if not isinstance(content, dict):
        raise CheckpointError(
            f'{file}: holds a {type(content).__name__}, not a checkpoint; give a .pth with a state_dict'
        )
    for key in (*(key for key in _KEYS if isinstance(content.get(key), dict)), None):
        tensors = _tensors(content if key is None else content[key])
        if tensors:
            return SingleFile(content, tensors, _live(content, tensors) if key == _MMENGINES else None)
    raise CheckpointError(f'{file}: no weights under {", ".join(_KEYS)} or at top level; give a file with a state dict')


def _live(content: Mapping[str, Any], averaged: Mapping[str, LazyTensor]) -> dict[str, LazyTensor] | None:
    """MMEngine's EMAHook swaps both before it saves (``hooks/ema_hook.py``, ``_swap_ema_state_dict``)."""
    swapped = _tensors(content[_OF_EMA]) if isinstance(content.get(_OF_EMA), dict) else {}
    found = {name: swapped.get(f'module.{name}') for name in averaged}
    if not any(tensor is not None for tensor in found.values()):
        return None
    return {name: averaged[name] if tensor is None else tensor for name, tensor in found.items()}


def _tensors(state_dict: Mapping[Any, Any]) -> dict[str, LazyTensor]:
    return {name: t for name, t in state_dict.items() if isinstance(t, LazyTensor) and isinstance(name, str)}


class CheckpointSource(StoredSource):
    """The tensors of a checkpoint of any supported layout.

    Args:
        ema: Read the averaged weights if the checkpoint holds both averaged and live ones.
        optimizer_restarted: Accept an optimizer with fewer steps than the run (ZeRO-3); see
            :func:`.same_save.require_one_save`.

    Attributes:
        found: The checkpoint.
        averages: Whether it holds both averaged and live weights, as written by MMEngine's EMAHook.
        unproven: Statements that the files cannot confirm, see :func:`.same_save.unproven`.
        facts: For the manifest and the log: ``engine`` ('deepspeed' or 'torch'), ``zero_stage``, ``world_size``,
            ``deepspeed`` (version), ``layout``, ``weights`` ('averaged' or 'live'), ``checkpoint`` (path as text).
        iteration: Completed training iterations; None if unknown.
        epoch: Completed epochs; None if unknown.
        config_text: ``meta.cfg``, the Python config that MMEngine dumped; None if there is none.
        trained_dtype: The dtype that DeepSpeed cast the model to; None if it did not.
        warnings: Notes for the user, one line each.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """

    def __init__(self, found: FoundCheckpoint, *, ema: bool = True, optimizer_restarted: bool = False) -> None:
        super().__init__()
        self.found = found
        self.unproven: tuple[str, ...] = ()
        self._optimizer_restarted = optimizer_restarted
        self._never_trained: frozenset[str] = frozenset()
        self.averages = False
        self.warnings: list[str] = []
        self.facts: dict[str, Any] = {'engine': 'torch', 'layout': found.layout, 'weights': 'live'}
        self.facts['checkpoint'] = str(found.path)
        if found.layout == 'file':
            content, assembled = self._open_file(ema)
        elif found.layout == 'dcp':
            self.unproven = ('not verifiable: that .metadata and all .distcp files are of one save',)
            content, assembled = {}, load_dcp(found)
        else:
            content, assembled = self._open_folder()
        self._tensors = {tensor.name: tensor for tensor in assembled.tensors}
        if not self._tensors:
            raise CheckpointError(f'{found.path}: holds no weights; take another checkpoint')
        self._check_sizes()
        if assembled.named_only:
            shown = ', '.join(assembled.named_only[:_SHOWN])
            self.warnings.append(
                f'{counted(len(assembled.named_only), "tensor")} named in the checkpoint, but not stored: {shown}'
            )
        meta = content.get('meta')
        meta = meta if isinstance(meta, dict) else {}
        self.iteration = _first_int(meta.get('iter'), _number_in(found), content.get('global_steps'))
        self.epoch = _first_int(meta.get('epoch'))
        self.config_text = meta['cfg'] if isinstance(meta.get('cfg'), str) else None
        self.trained_dtype = trained_dtype(content.get('ds_config'))

    def specs(self) -> list[TensorSpec]:
        """The stored tensors in state-dict order, under their first names.

        ``dtype`` is the training dtype. ``has_master``: the tensor is 16-bit and the files have fp32 values.
        ``master_lost``: training had fp32 values, but the files do not. ``aliases``: names of tied tensors.
        """
        return [
            TensorSpec(t.name, t.shape, t.dtype, t.aliases, t.master is not None, self._has_lost_master(t))
            for t in self._tensors.values()
        ]

    def _has_lost_master(self, tensor: StoredTensor) -> bool:
        if tensor.master is not None or tensor.dtype not in ('BF16', 'F16'):
            return False
        return self._never_trained.isdisjoint((tensor.name, *tensor.aliases))

    def _open_file(self, ema: bool) -> tuple[Mapping[str, Any], Assembled]:
        file = load_single_file(self.found.path)
        self.averages = file.live is not None
        if self.averages and ema:
            self.facts['weights'] = 'averaged'
        tensors = file.tensors if ema or file.live is None else file.live
        return file.content, from_state_dict(str(self.found.path), tensors, {})

    def _open_folder(self) -> tuple[Mapping[str, Any], Assembled]:
        models = [load_model_state(file) for file in self.found.model_files]
        optims = [load_optim_state(file) for file in self.found.optim_files]
        universal = self.found.layout == 'universal'
        require_one_save(models, optims, optimizer_restarted=self._optimizer_restarted, universal=universal)
        self.unproven = unproven(models, optims, universal=universal)
        self._never_trained = _never_trained(models[0])
        stage, n_ranks = _stage_and_ranks(models, optims)
        version = models[0].evidence.version
        self.facts |= {'engine': 'deepspeed', 'zero_stage': stage, 'world_size': n_ranks, 'deepspeed': version}
        groups = [optim.groups for optim in optims]
        if universal:
            assembled = load_universal(self.found, models, optimizer_restarted=self._optimizer_restarted)
        elif not optims:
            masters, warning = stage0_masters(models[0], self._reader)
            self.warnings += [warning] if warning else []
            assembled = from_state_dict(str(models[0].file), models[0].module, masters)
        elif optims[0].stage == 3:
            assembled = from_zero3(models, zero3_regions(models[0].shapes, groups))
        else:
            assembled = from_zero12(models[0], zero12_regions(models[0].shapes, groups, optims[0].paddings))
        return models[0].content, assembled

    def _check_sizes(self) -> None:
        """Check that the pieces of every tensor have as many elements as its shape."""
        for tensor in self._tensors.values():
            for pieces in (tensor.trained, tensor.master):
                numel = sum(piece.numel for piece in pieces or ())
                if pieces is not None and numel != tensor.numel:
                    raise CheckpointError(
                        f'{self.found.path}: {tensor.name} has {numel} elements, but its shape {tensor.shape} has '
                        f'{tensor.numel}; take another checkpoint'
                    )


def _stage_and_ranks(models: Sequence[ModelState], optims: Sequence[OptimState]) -> tuple[int, int | None]:
    """The ZeRO stage in the config: stage 0 with BF16_Optimizer has the files of stage 1."""
    content = models[0].content
    zero = content['ds_config'].get('zero_optimization') if isinstance(content.get('ds_config'), dict) else None
    stage = _first_int(zero.get('stage') if isinstance(zero, dict) else None, optims[0].stage if optims else 0)
    ranks = optims[0].world_size if optims else _first_int(content.get('dp_world_size'))
    return stage, ranks


def _never_trained(model: ModelState) -> frozenset[str]:
    """Buffers, and parameters in no optimizer group; without ZeRO, the latter are unknown."""
    if model.shapes is None:
        return model.buffer_names
    trained = {name for group in model.shapes for name in group}
    trained |= {alias for alias, name in model.shared.items() if name in trained}
    return model.buffer_names | (model.module.keys() | model.frozen_shapes.keys()) - trained


def _number_in(found: FoundCheckpoint) -> int | None:
    """The iteration in the name of the folder or file, or of Trainer's folder; None for epochs."""
    number = '(0|[1-9][0-9]{0,14})'
    match = re.fullmatch(rf'(?:iter_|checkpoint-){number}(?:\.pth)?', found.path.name)
    match = match or re.fullmatch(f'checkpoint-{number}', found.path.absolute().parent.name)
    return int(match[1]) if match else None


def _first_int(*values: Any) -> int | None:
    return next(filter(is_count, values), None)
