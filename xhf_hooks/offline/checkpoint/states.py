"""Parses the files that DeepSpeed writes.

Keys: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``) and the optimizers'
``state_dict``; see :mod:`.regions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.offline.checkpoint.torch_file import load_torch_file, zip_root
from xhf_hooks.offline.checkpoint.unpickler import as_int

Shapes = dict[str, tuple[int, ...]]
_UNSUPPORTED = (
    'of a run with tensor or expert parallelism, or of an unknown ZeRO stage, which is not supported; load it with '
    'DeepSpeed and save the weights from there'
)


@dataclass(frozen=True)
class ModelState:
    """A ``*_model_states.pt`` file, or a file with little more than a state dict.

    Attributes:
        content: All of it, as data.
        shapes: Shapes of trained parameters by optimizer group, in the order of the flat vectors; None without ZeRO.
        frozen_shapes, fragments: Shapes and values of frozen parameters (stages 2 and 3).
        not_tensors: See :func:`not_tensors_in`.
        shared: Alias to the stored name.
        saved_as: See :func:`.torch_file.zip_root`.
    """

    file: Path
    content: Mapping[str, Any]
    module: dict[str, torch.Tensor]
    buffer_names: frozenset[str] = frozenset()
    shapes: list[Shapes] | None = None
    frozen_shapes: Shapes = field(default_factory=dict)
    fragments: dict[str, torch.Tensor] = field(default_factory=dict)
    not_tensors: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    saved_as: str = ''

    @property
    def version(self) -> Any:
        """Version of DeepSpeed."""
        return self.content.get('ds_version')

    @property
    def steps(self) -> int | None:
        """Optimizer steps, without those that were skipped because of overflow; None if unknown."""
        steps = as_int(self.content.get('global_steps'))
        return None if steps is None else steps - (as_int(self.content.get('skipped_steps')) or 0)

    @property
    def trained(self) -> frozenset[str] | None:
        """All names of the parameters in optimizer groups; None without ZeRO, where DeepSpeed does not record them."""
        if self.shapes is None:
            return None
        trained = {name for group in self.shapes for name in group}
        return frozenset(trained | {alias for alias, name in self.shared.items() if name in trained})

    @property
    def never_trained(self) -> frozenset[str]:
        """Buffers, and parameters in no optimizer group; without ZeRO, the latter are unknown."""
        trained = self.trained
        if trained is None:
            return self.buffer_names
        return self.buffer_names | (self.module.keys() | self.frozen_shapes.keys()) - trained


@dataclass(frozen=True)
class OptimState:
    """A ``*_optim_states.pt`` file: this rank's part of each fp32 group.

    Attributes:
        paddings: For each group, the padding after each parameter; None if there is none.
        steps: Steps that the optimizer has made; None if it does not count.
        saved_as: See :func:`.torch_file.zip_root`.
    """

    file: Path
    stage: int
    world_size: int
    groups: list[torch.Tensor]
    paddings: list[list[int]] | None
    version: Any
    steps: int | None
    saved_as: str


def trained_dtype(ds_config: Any) -> str | None:
    """Safetensors dtype that DeepSpeed cast the model to, including unsaved tensors; None if it did not."""
    for key, code in (('bf16', 'BF16'), ('bfloat16', 'BF16'), ('fp16', 'F16')):
        section = ds_config.get(key) if isinstance(ds_config, dict) else None
        if isinstance(section, dict) and section.get('enabled') is True:
            return code
    return None


@contextmanager
def parsing(file: Path, what: str) -> Iterator[None]:
    """Turns what damaged or foreign content leads to into a CheckpointError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f'{type(error).__name__}: {error}'[:100]
        raise CheckpointError(f'{file}: not {what} ({reason}); take another checkpoint') from error


def load_model_state(file: Path) -> ModelState:
    """Load a model file.

    Raises:
        CheckpointError: It is not a model file, or of an unsupported training mode.
    """
    content = load_torch_file(file)
    with parsing(file, 'a model file of DeepSpeed'):
        has_experts = content.get('ds_autoep_layers') or content.get('autoep_layers')
        if has_experts or (content.get('mp_world_size') or 1) != 1:
            raise CheckpointError(f'{file}: {_UNSUPPORTED}')
        shapes = content.get('param_shapes')
        return ModelState(
            file,
            content,
            tensors_in(content['module']),
            frozenset(content['buffer_names'] or ()),
            None if shapes is None else [_shapes(group) for group in shapes],
            _shapes(content.get('frozen_param_shapes') or {}),
            tensors_in(content.get('frozen_param_fragments') or {}),
            not_tensors_in(content['module']),
            dict(content.get('shared_params') or {}),
            zip_root(file),
        )


def load_optim_state(file: Path) -> OptimState:
    """Load an optimizer file.

    Raises:
        CheckpointError: It is not an optimizer file, or of an unsupported training mode.
    """
    content = load_torch_file(file)
    with parsing(file, 'an optimizer file of DeepSpeed'):
        state = content['optimizer_state_dict']
        # BF16_Optimizer (stage 1 with fp32 gradients, or stage 0) does not record its stage
        stage = as_int(state['zero_stage']) if 'zero_stage' in state else 1
        counts = state['partition_count']
        counts = counts if isinstance(counts, list) else [counts]
        has_experts = state.get('ds_zero_partition_groups') is not None or len(set(counts)) > 1
        if has_experts or stage not in (0, 1, 2, 3):
            raise CheckpointError(f'{file}: {_UNSUPPORTED}')
        groups = state['fp32_flat_groups' if stage == 3 else 'single_partition_of_fp32_groups']
        return OptimState(
            file,
            stage,
            int(counts[0]),
            [group.view(-1) for group in groups],
            state.get('param_alignment_paddings'),
            content.get('ds_version'),
            _steps(state.get('optimizer_state_dict' if stage == 3 else 'base_optimizer_state')),
            zip_root(file),
        )


def _steps(base: Any) -> int | None:
    """The steps that the base optimizer's state counts; parameters that were added later have fewer."""
    entries = base.get('state') if isinstance(base, dict) else base
    entries = entries.values() if isinstance(entries, dict) else entries or ()  # a list with elastic_checkpoint
    steps = [entry.get('step') for entry in entries if isinstance(entry, dict)]
    return max((int(step) for step in steps if isinstance(step, (int, float, torch.Tensor))), default=None)


def tensors_in(values: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict."""
    return {name: t for name, t in values.items() if isinstance(t, torch.Tensor) and isinstance(name, str)}


def tensors_in_files(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """The tensors of a model that ``torch.save`` wrote into several files, each with a part of the state dict."""
    contents = map(load_torch_file, files)
    return {name: tensor for part in contents if isinstance(part, dict) for name, tensor in tensors_in(part).items()}


def not_tensors_in(values: Mapping[Any, Any]) -> dict[str, str]:
    """The kind of each entry of a state dict that is no plain tensor and cannot be read, by its name."""
    return {
        name: _kind_of(value)
        for name, value in values.items()
        if isinstance(name, str) and not isinstance(value, torch.Tensor)
    }


def _kind_of(value: Any) -> str:
    name = f'{type(value).__module__}.{type(value).__name__}'.removeprefix('builtins.')
    if name.startswith('numpy.'):
        return 'numpy array'
    if name == 'torch._utils._rebuild_sparse_tensor':
        return 'sparse tensor'
    if 'DTensor' in name or name == 'torch._utils._rebuild_wrapper_subclass':
        return 'DTensor, or another subclass of tensors'
    return 'None' if value is None else name


def _shapes(shapes: Mapping[str, Any]) -> Shapes:
    return {name: tuple(shape) for name, shape in shapes.items()}
