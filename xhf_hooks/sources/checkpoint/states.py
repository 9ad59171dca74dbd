"""Parses the files that DeepSpeed writes.

Keys: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``) and the optimizers'
``state_dict``; see :mod:`.regions`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file, zip_root
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor, as_int

Shapes = dict[str, tuple[int, ...]]
_PARTITIONS = 'single_partition_of_fp32_groups'
_FLAT_KEYS = {0: _PARTITIONS, 1: _PARTITIONS, 2: _PARTITIONS, 3: 'fp32_flat_groups'}


_UNPACKED = {'F32': '<f', 'F64': '<d', 'I32': '<i', 'I64': '<q'}


@dataclass(frozen=True)
class Evidence:
    """What a file says of the save that it belongs to; None for what it does not say.

    Attributes:
        saved_as: The original file name, without ``.pt``.
        version: Version of DeepSpeed.
        steps: Optimizer steps. In a model file, with skipped ones; they go on when only the weights are loaded.
        skipped: Steps that were skipped because of overflow.
        iteration: MMEngine's iteration. Restarts when only the weights are loaded.
    """

    saved_as: str | None
    version: str | None
    steps: float | None
    skipped: int | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class ModelState:
    """A ``*_model_states.pt`` file.

    Attributes:
        content: All of it, as data.
        shapes: Shapes of trained parameters by optimizer group, in the order of the flat vectors; None without ZeRO.
        frozen_shapes, fragments: Shapes and values of frozen parameters (stages 2 and 3).
        shared: Alias to the stored name.
    """

    file: Path
    content: Mapping[str, Any]
    module: dict[str, LazyTensor]
    buffer_names: frozenset[str]
    shapes: tuple[Shapes, ...] | None
    frozen_shapes: Shapes
    fragments: dict[str, LazyTensor]
    shared: dict[str, str]
    evidence: Evidence

    @property
    def trained_dtype(self) -> str | None:
        """Safetensors dtype that DeepSpeed cast the model to, including unsaved tensors; None if it did not."""
        return trained_dtype(self.content.get('ds_config'))


@dataclass(frozen=True)
class OptimState:
    """A ``*_optim_states.pt`` file: this rank's part of each fp32 group.

    Attributes:
        paddings: For each group, the padding after each parameter; None if there is none.
    """

    file: Path
    stage: int
    world_size: int
    groups: tuple[LazyTensor, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    evidence: Evidence


def trained_dtype(ds_config: Any) -> str | None:
    """:attr:`ModelState.trained_dtype` from ``ds_config``."""
    for key, code in (('bf16', 'BF16'), ('bfloat16', 'BF16'), ('fp16', 'F16')):
        section = ds_config.get(key) if isinstance(ds_config, dict) else None
        if isinstance(section, dict) and section.get('enabled') is True:
            return code
    return None


def load_model_state(file: Path) -> ModelState:
    """Load and validate a model file.

    Raises:
        CheckpointError: It is not a model file, or of an unsupported training mode.
    """
    content = load_torch_file(file)
    if not isinstance(content, dict) or 'module' not in content or 'buffer_names' not in content:
        raise CheckpointError(f'{file}: not a model file of DeepSpeed; give the folder of a checkpoint')
    if content.get('ds_autoep_layers') or content.get('autoep_layers'):
        raise CheckpointError(f'{file}: a run with expert parallelism, which is not supported')
    if (content.get('mp_world_size') or 1) != 1:
        raise CheckpointError(f'{file}: a run with tensor parallelism, which is not supported')
    if not isinstance(content['module'], dict):
        raise CheckpointError(
            f'{file}: has no state dict of the module (pipeline parallelism?), which is not supported'
        )
    shapes = content.get('param_shapes')
    return ModelState(
        file,
        content,
        {name: t for name, t in content['module'].items() if isinstance(t, LazyTensor) and isinstance(name, str)},
        frozenset(name for name in _sequence(file, content['buffer_names'] or ()) if isinstance(name, str)),
        None if shapes is None else tuple(_shapes(file, group) for group in _sequence(file, shapes)),
        _shapes(file, content.get('frozen_param_shapes')),
        _fragments(file, content.get('frozen_param_fragments')),
        _names(file, content.get('shared_params')),
        _evidence_of_model(file, content),
    )


def load_optim_state(file: Path) -> OptimState:
    """Load and validate an optimizer file.

    Raises:
        CheckpointError: It is not an optimizer file, or of an unsupported training mode.
    """
    content = load_torch_file(file)
    state = content.get('optimizer_state_dict') if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f'{file}: not an optimizer file of DeepSpeed; give the folder of a checkpoint')
    if state.get('ds_zero_partition_groups') is not None:
        raise CheckpointError(f'{file}: a run with expert parallelism, which is not supported')
    # BF16_Optimizer (stage 1 with fp32 gradients, or stage 0) does not record its stage
    stage = as_int(state['zero_stage']) if 'zero_stage' in state else 1
    counts = state.get('partition_count')
    counts = counts if isinstance(counts, list) else [counts]
    if stage not in _FLAT_KEYS or not counts or not all(type(count) is int and count > 0 for count in counts):
        raise CheckpointError(
            f'{file}: unknown zero_stage or partition_count; this version of DeepSpeed is not supported'
        )
    if len(set(counts)) > 1:
        raise CheckpointError(
            f'{file}: a run with expert parallelism (groups of {sorted(set(counts))[:5]} ranks), which is not supported'
        )
    groups = tuple(_sequence(file, state.get(_FLAT_KEYS[stage])))
    if not all(isinstance(g, LazyTensor) and g.dtype is not None and g.is_contiguous for g in groups):
        raise CheckpointError(f'{file}: has no fp32 weights under {_FLAT_KEYS[stage]!r}; take another checkpoint')
    paddings = state.get('param_alignment_paddings')
    if paddings is not None:
        paddings = tuple(_sizes(file, group) for group in _sequence(file, paddings))
    steps = optimizer_steps(state.get('optimizer_state_dict' if stage == 3 else 'base_optimizer_state'))
    evidence = Evidence(zip_root(file), _text(content.get('ds_version')), steps)
    return OptimState(file, stage, counts[0], groups, paddings, evidence)


def _evidence_of_model(file: Path, content: Mapping[str, Any]) -> Evidence:
    meta = content.get('meta')
    return Evidence(
        zip_root(file),
        _text(content.get('ds_version')),
        as_int(content.get('global_steps')),
        as_int(content.get('skipped_steps')),
        as_int(meta.get('iter')) if isinstance(meta, dict) else None,
    )


def optimizer_steps(base: Any) -> float | None:
    """The steps that the base optimizer's state counts; parameters that were added later have fewer."""
    entries = base.get('state') if isinstance(base, dict) else base
    entries = list(entries.values()) if isinstance(entries, dict) else entries  # a list with elastic_checkpoint
    entries = entries if isinstance(entries, list) else []
    steps = [_number(entry.get('step')) for entry in entries if isinstance(entry, dict)]
    return max((step for step in steps if step is not None), default=None)


def _number(value: Any) -> float | None:
    """A number, read from the file if it is a tensor."""
    if isinstance(value, LazyTensor) and value.numel == 1 and value.dtype in _UNPACKED:
        piece = value.piece()
        with piece.file.open('rb') as file:
            file.seek(piece.offset)
            return float(struct.unpack(_UNPACKED[value.dtype], file.read(piece.nbytes))[0])
    return float(value) if type(value) is float or as_int(value) is not None else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _shapes(file: Path, shapes: Any) -> Shapes:
    found = {name: _sizes(file, shape) for name, shape in _mapping(file, shapes).items()}
    if not all(isinstance(name, str) for name in found):
        raise CheckpointError(f'{file}: has parameters without a name; take another checkpoint')
    return found


def _sizes(file: Path, sizes: Any) -> tuple[int, ...]:
    if not all(map(is_count, _sequence(file, sizes))):
        raise CheckpointError(f'{file}: has a parameter with an invalid shape; take another checkpoint')
    return tuple(sizes)


def _fragments(file: Path, fragments: Any) -> dict[str, LazyTensor]:
    found = _mapping(file, fragments)
    if not all(isinstance(t, LazyTensor) and t.is_contiguous and isinstance(n, str) for n, t in found.items()):
        raise CheckpointError(f'{file}: has invalid frozen parameters; take another checkpoint')
    return found


def _names(file: Path, names: Any) -> dict[str, str]:
    found = _mapping(file, names)
    return {alias: name for alias, name in found.items() if isinstance(alias, str) and isinstance(name, str)}


def _mapping(file: Path, value: Any) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f'{file}: expected a dict by name, found {type(value).__name__}; take another checkpoint')
    return value or {}


def _sequence(file: Path, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f'{file}: expected a list, found {type(value).__name__}; take another checkpoint')
    return value
