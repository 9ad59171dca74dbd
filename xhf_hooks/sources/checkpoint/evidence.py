"""Metadata in DeepSpeed's files that identifies the save and the rank of each file.

Written by ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``) and the optimizers'
``state_dict``. It is not needed to read the weights, so missing or unusual values are not an error.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.files.regular_files import open_regular
from xhf_hooks.sources.checkpoint.inert import Global, Inert, as_data, as_int
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import zip_root

#: Keys of a parameter group that are equal on all ranks; in others, D-Adaptation and Prodigy keep sums of one rank.
_SETTINGS = ('lr', 'initial_lr', 'betas', 'eps', 'weight_decay', 'momentum', 'decoupled_weight_decay')
#: Sections and keys of ``ds_config`` that are equal on all machines; others may be paths.
_CONFIG = (
    *((None, key) for key in ('train_batch_size', 'gradient_accumulation_steps', 'gradient_clipping')),
    *((section, 'enabled') for section in ('bf16', 'bfloat16', 'fp16', 'torch_autocast')),
    *(('zero_optimization', key) for key in ('stage', 'round_robin_gradients')),
    ('optimizer', 'type'),
    ('scheduler', 'type'),
)
#: Optimizer moments, element by element: Adam, RMSprop, SGD, Lion.
_MOMENTS = ('exp_avg_sq', 'square_avg', 'momentum_buffer', 'exp_avg')
_UNPACKED = {'F32': '<f', 'F64': '<d', 'I32': '<i', 'I64': '<q'}

#: Maps a parameter to (start in a rank's part of the group, number of elements).
Slices = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class ModelEvidence:
    """Metadata of a model file; None for missing values.

    Attributes:
        saved_as: The original file name, without ``.pt``.
        version: Version of DeepSpeed.
        steps: Optimizer steps, including skipped ones. Continues when only the weights are loaded.
        skipped: Steps that were skipped because of overflow.
        iteration: MMEngine's iteration. Restarts when only the weights are loaded.
        config: Values of ``ds_config`` that are equal in all files of a save.
    """

    saved_as: str | None
    version: str | None
    steps: int | None
    skipped: int | None
    iteration: int | None
    config: dict[str, Any]


@dataclass(frozen=True)
class OptimEvidence:
    """Metadata of an optimizer file; None for missing values.

    Attributes:
        saved_as, version, config: See :class:`ModelEvidence`.
        steps: Optimizer steps of each flat tensor; None where they are not counted.
        settings: Values of each parameter group that are equal on all ranks.
        scaler: State of the loss scaler.
        slices: Parameters' places in each group (stages 1 and 2).
        moments: One moment of each flat tensor; () if there is none.
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
        """Number of optimizer steps; parameters that were added later have fewer."""
        return max((step for step in self.steps if step is not None), default=None)


def model_evidence(file: Path, content: Mapping[str, Any]) -> ModelEvidence:
    """The metadata of a model file, whose ``ds_config`` is plain data already."""
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
    """The metadata of an optimizer file.

    Args:
        state: The state of ZeRO's optimizer.
        base_key: Its key for the state of the base optimizer.
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
    """The optimizer's state of each flat tensor; with ``elastic_checkpoint`` it is a list."""
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
    """A tree of comparable values; None replaces others."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, LazyTensor):
        return _number(value)
    return value if isinstance(value, (bool, int, float, str, Global)) else None


def _number(value: Any) -> float | None:
    """A number, read from the file if it is a tensor."""
    if isinstance(value, LazyTensor) and value.numel == 1 and value.dtype in _UNPACKED:
        piece = value.piece()
        with open_regular(piece.file) as file:
            file.seek(piece.offset)
            return float(struct.unpack(_UNPACKED[value.dtype], file.read(piece.nbytes))[0])
    return float(value) if type(value) is float or as_int(value) is not None else None


def _slices(mappings: Any) -> tuple[Slices, ...] | None:
    """``param_slice_mappings``; None unless it consists of ``fragment_address`` (``utils/tensor_fragment.py``)."""
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
