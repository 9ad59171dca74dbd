"""What the files of DeepSpeed record beside the weights, and what tells of which rank and save each one is.

Written by ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``) and the optimizers'
``state_dict``. None of it is needed to read the weights, so nothing here is refused for being absent or odd.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.regular_files import open_regular
from xhf_hooks.sources.checkpoint.inert import Global, Inert, as_data, as_int
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import zip_root

#: Of a parameter group. Other keys may be of one rank: D-Adaptation and Prodigy sum there over what a rank holds.
_SETTINGS = ('lr', 'initial_lr', 'betas', 'eps', 'weight_decay', 'momentum', 'decoupled_weight_decay')
#: Section and key of ``ds_config``. Other keys may be of one machine: paths of NVMe disks and of logs.
_CONFIG = (
    *((None, key) for key in ('train_batch_size', 'gradient_accumulation_steps', 'gradient_clipping')),
    *((section, 'enabled') for section in ('bf16', 'bfloat16', 'fp16', 'torch_autocast')),
    *(('zero_optimization', key) for key in ('stage', 'round_robin_gradients')),
    ('optimizer', 'type'),
    ('scheduler', 'type'),
)
#: Of Adam, RMSprop, SGD and Lion.
_MOMENTS = ('exp_avg_sq', 'square_avg', 'momentum_buffer', 'exp_avg')
_UNPACKED = {'F32': '<f', 'F64': '<d', 'I32': '<i', 'I64': '<q'}

#: Of one group, where in a rank's part each parameter's part starts, and its number of elements.
Slices = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class ModelEvidence:
    """Of a model file; None is what it does not say.

    Attributes:
        saved_as: The name that the file was saved under, without ``.pt``.
        version: Of DeepSpeed.
        steps: Optimizer steps, those that were skipped included. Goes on when weights alone are loaded.
        skipped: Steps that were not made, since a gradient had overflowed.
        iteration: Of MMEngine's run. Begins anew when weights alone are loaded.
        config: What ``ds_config`` says in every file of a save.
    """

    saved_as: str | None
    version: str | None
    steps: int | None
    skipped: int | None
    iteration: int | None
    config: dict[str, Any]


@dataclass(frozen=True)
class OptimEvidence:
    """Of an optimizer file; None is what it does not say.

    Attributes:
        saved_as, version, config: As of a model file.
        steps: That the optimizer has made, of each flat tensor; None for one of which it does not count them.
        settings: Of each parameter group, what is the same on all ranks.
        scaler: Of the loss.
        slices: Of each group (stages 1 and 2).
        moments: Of the gradients, one for each flat tensor, element by element; () if it keeps none.
    """

    saved_as: str | None
    version: str | None
    config: dict[str, Any]
    steps: tuple[float | None, ...]
    settings: list[dict[str, Any]]
    scaler: Any
    slices: tuple[Slices, ...] | None
    moments: tuple[LazyTensor, ...]

    @property
    def step(self) -> float | None:
        """Of the optimizer; a parameter that joined later counts fewer."""
        return max((step for step in self.steps if step is not None), default=None)


def model_evidence(file: Path, content: Mapping[str, Any]) -> ModelEvidence:
    """What a model file records; its ``ds_config`` is plain data already."""
    meta = content.get('meta')
    return ModelEvidence(
        zip_root(file),
        _text(content.get('ds_version')),
        as_int(content.get('global_steps')),
        as_int(content.get('skipped_steps')),
        as_int(meta.get('iter')) if isinstance(meta, dict) else None,
        _config(content.get('ds_config')),
    )


def optim_evidence(file: Path, content: Mapping[str, Any], state: Mapping[str, Any], base_key: str) -> OptimEvidence:
    """What an optimizer file records.

    Args:
        state: Of ZeRO's optimizer.
        base_key: Where in it that of the optimizer inside is.
    """
    base = state.get(base_key)
    entries = _entries(base)
    return OptimEvidence(
        zip_root(file),
        _text(content.get('ds_version')),
        _config(as_data(content.get('ds_config'), f'{file}: ds_config')),
        tuple(_number(entry.get('step')) for entry in entries),
        _settings(file, base),
        _plain(as_data(state.get('loss_scaler'), f'{file}: loss_scaler')),
        _slices(state.get('param_slice_mappings')),
        _moments(entries),
    )


def _entries(base: Any) -> list[dict[Any, Any]]:
    """What the optimizer keeps of each flat tensor; with ``elastic_checkpoint`` it is a list of these."""
    entries = base.get('state') if isinstance(base, dict) else base
    entries = list(entries.values()) if isinstance(entries, dict) else entries
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _settings(file: Path, base: Any) -> list[dict[str, Any]]:
    groups = base.get('param_groups') if isinstance(base, dict) else None
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    where = f'{file}: param_groups'
    return [{key: _plain(as_data(group[key], where)) for key in _SETTINGS if key in group} for group in groups]


def _config(config: Any) -> dict[str, Any]:
    config = config if isinstance(config, dict) else {}
    found = {}
    for section, key in _CONFIG:
        values = config if section is None else config.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), (bool, int, float, str)):
            found[key if section is None else f'{section}.{key}'] = values[key]
    return found


def _plain(value: Any) -> Any:
    """A tree of values that can be compared; None stands for the others."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, LazyTensor):
        return _number(value)
    return value if isinstance(value, (bool, int, float, str, Global)) else None


def _number(value: Any) -> float | None:
    """A number, or that in a tensor, which is read."""
    if isinstance(value, LazyTensor) and value.numel == 1 and value.dtype in _UNPACKED:
        piece = value.piece()
        with open_regular(piece.file) as file:
            file.seek(piece.offset)
            return float(struct.unpack(_UNPACKED[value.dtype], file.read(piece.nbytes))[0])
    return float(value) if type(value) is float or as_int(value) is not None else None


def _slices(mappings: Any) -> tuple[Slices, ...] | None:
    """Of ``param_slice_mappings``; None if it is not made of ``fragment_address`` (``utils/tensor_fragment.py``)."""
    if not isinstance(mappings, list) or not all(isinstance(group, dict) for group in mappings):
        return None
    found: list[Slices] = []
    for group in mappings:
        found.append({})
        for name, address in group.items():
            known = address.state if isinstance(address, Inert) and isinstance(address.state, dict) else {}
            start, numel = as_int(known.get('start')), as_int(known.get('numel'))
            if start is None or numel is None or not isinstance(name, str):
                return None
            found[-1][name] = (start, numel)
    return tuple(found)


def _moments(entries: Sequence[Mapping[Any, Any]]) -> tuple[LazyTensor, ...]:
    for key in _MOMENTS:
        found = tuple(entry.get(key) for entry in entries)
        if found and all(isinstance(m, LazyTensor) and m.dtype == 'F32' and m.is_contiguous for m in found):
            return found
    return ()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
