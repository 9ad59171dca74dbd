"""Hand-made DeepSpeed checkpoints in its file layout, for what cannot be trained on this machine (fp16)."""

import collections
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch


class ZeroStageEnum(enum.IntEnum):
    """Like that of ``deepspeed.runtime.zero.config``, and pickled the same way."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 master weights of odd shapes: fewer elements than ranks, a scalar, an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        'embed.weight': (13, 7), 'a.weight': (5, 3), 'a.bias': (1,), 'scalar': (), 'empty': (0, 4), 'b.weight': (11,),
        'norm.weight': (7,), 'head.weight': (7, 13),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def optim(rank: int) -> str:
    """The file of a rank's optimizer."""
    return f'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt'


def model3(rank: int) -> str:
    """The file of a rank's model at ZeRO-3."""
    return f'zero_pp_rank_{rank}_mp_rank_00_model_states.pt'


@dataclass
class MadeCheckpoint:
    """The contents of a checkpoint and how to save them.

    Attributes:
        masters: fp32 master weights of trained parameters, in optimizer order.
        groups: Names by parameter group; None: a single group.
        alignment: Each parameter is padded to a multiple of this in the flat vector (DeepSpeed 0.19.8; ZeRO-1 and 2).
        sub_group: At ZeRO-3, a rank's flat vector is cut after this many elements.
        frozen, buffers: Saved unchanged.
        step, skipped: Steps of the engine, and how many of them it skipped after an overflow.
    """

    masters: Mapping[str, torch.Tensor] = field(default_factory=some_weights)
    dtype: torch.dtype = torch.float16
    stage: int = 1
    world_size: int = 2
    groups: Sequence[Sequence[str]] | None = None
    alignment: int = 1
    sub_group: int = 10**9
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    step: int = 5
    skipped: int = 0

    @property
    def as_trained(self) -> dict[str, torch.Tensor]:
        """The tensors that reading it must return."""
        rounded = {name: master.to(self.dtype) for name, master in self.masters.items()}
        return {**rounded, **self.frozen, **self.buffers}

    def write(self, folder: Path) -> Path:
        """Write the files into ``folder``."""
        folder.mkdir(parents=True)
        for rank in range(self.world_size):
            torch.save(self._optim_state(rank), folder / optim(rank))
            if self.stage == 3:
                torch.save(self._model_state(rank), folder / model3(rank))
        if self.stage < 3:
            torch.save(self._model_state(0), folder / 'mp_rank_00_model_states.pt')
        return folder

    def _names(self) -> list[list[str]]:
        return [list(self.masters)] if self.groups is None else [list(group) for group in self.groups]

    def _model_state(self, rank: int) -> dict[str, Any]:
        module = collections.OrderedDict((name, tensor.clone()) for name, tensor in self.as_trained.items())
        fragments = {name: tensor.clone() for name, tensor in self.frozen.items()}
        if self.stage == 3:
            module.update((n, torch.empty(0, dtype=module[n].dtype)) for n in (*self.masters, *self.frozen))
            fragments = {name: self._slice(tensor, rank) for name, tensor in self.frozen.items()}
        module.update((alias, module[name]) for alias, name in self.shared.items())
        shapes = [collections.OrderedDict((n, self.masters[n].shape) for n in group) for group in self._names()]
        saves_frozen = self.stage >= 2
        return {
            'module': module,
            'buffer_names': list(self.buffers),
            'optimizer': None,
            'param_shapes': shapes,
            'frozen_param_shapes': {n: t.shape for n, t in self.frozen.items()} if saves_frozen else None,
            'shared_params': dict(self.shared),
            'frozen_param_fragments': fragments if saves_frozen else None,
            'global_steps': self.step,
            'skipped_steps': self.skipped,
            'dp_world_size': self.world_size,
            'mp_world_size': 1,
            'ds_config': self._config(),
            'ds_version': '0.19.8',
        }

    def _optim_state(self, rank: int) -> dict[str, Any]:
        step = torch.tensor(float(self.step - self.skipped))
        steps = {'state': {0: {'step': step}}, 'param_groups': [{'lr': 1e-3} for _ in self._names()]}
        state: dict[str, Any] = {'zero_stage': ZeroStageEnum(self.stage), 'partition_count': self.world_size}
        if self.stage == 3:
            slices = [self._slice(self.masters[name], rank) for group in self._names() for name in group]
            state |= {'fp32_flat_groups': list(torch.cat(slices).split(self.sub_group)), 'optimizer_state_dict': steps}
            steps['state'] = {i: {'step': step} for i in range(len(state['fp32_flat_groups']))}
        else:
            parts, paddings = zip(*(self._partition(group, rank) for group in self._names()), strict=True)
            state |= {'single_partition_of_fp32_groups': list(parts), 'base_optimizer_state': steps}
            state |= {'partition_count': [self.world_size] * len(parts)}
            if self.alignment > 1:
                state['param_alignment_paddings'] = list(paddings)
        return {'optimizer_state_dict': state, 'ds_config': self._config(), 'ds_version': '0.19.8'}

    def _config(self) -> dict[str, Any]:
        return {'fp16': {'enabled': self.dtype == torch.float16}, 'zero_optimization': {'stage': self.stage}}

    def _partition(self, group: list[str], rank: int) -> tuple[torch.Tensor, list[int]]:
        """Stage 1 and 2: the group as one vector, aligned to 2 * ranks; the last rank's padding is not saved."""
        paddings = [-self.masters[name].numel() % self.alignment for name in group]
        parts = []
        for name, padding in zip(group, paddings, strict=True):
            parts += [self.masters[name].reshape(-1), torch.full((padding,), 99.0)]
        vector = torch.cat(parts)
        size = -(-vector.numel() // (2 * self.world_size)) * 2
        aligned = torch.cat([vector, torch.full((size * self.world_size - vector.numel(),), 77.0)])
        mine = aligned[rank * size : (rank + 1) * size]
        if rank == self.world_size - 1:
            mine = mine[: mine.numel() - (aligned.numel() - vector.numel())]
        return mine.clone(), paddings

    def _slice(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Stage 3: ceil(numel / ranks) elements, padded."""
        size = -(-tensor.numel() // self.world_size)
        flat = torch.cat([tensor.reshape(-1), tensor.new_full((size * self.world_size - tensor.numel(),), 88.0)])
        return flat[rank * size : (rank + 1) * size].clone()


def save_dcp(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """Save with torch.distributed.checkpoint on one process, without a process group."""
    import torch.distributed.checkpoint as dcp

    save = getattr(dcp, 'save', None) or dcp.save_state_dict  # torch 2.1 has no other
    alone = {'no_dist': True} if 'no_dist' in signature(save).parameters else {}  # torch 2.4 and 2.5 see it
    save(state, storage_writer=dcp.FileSystemWriter(folder, **options), **alone)
    return folder
