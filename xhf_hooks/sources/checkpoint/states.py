"""Parses the files that DeepSpeed writes, and checks that they come from one save, each under its own rank's name.

Keys: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``) and the optimizers'
``state_dict``; see :mod:`.regions`.

Copying checkpoints may swap, mix or leave behind files, which the weights alone do not show. What is compared here is
written by every rank and cheap to read; it cannot tell two runs of equal steps apart (:func:`unproven`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.text import counted
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file, zip_root
from xhf_hooks.sources.checkpoint.unpickler import as_int

Shapes = dict[str, tuple[int, ...]]
_DEEPSPEEDS = re.compile(r'(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_\w+_states|mp_rank_\d+_model_states')
_HINT = 'put the files of one save together'
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
    def never_trained(self) -> frozenset[str]:
        """Buffers, and parameters in no optimizer group; without ZeRO, the latter are unknown."""
        if self.shapes is None:
            return self.buffer_names
        trained = {name for group in self.shapes for name in group}
        trained |= {alias for alias, name in self.shared.items() if name in trained}
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
        told = f'{type(error).__name__}: {error}'[:100]
        raise CheckpointError(f'{file}: not {what} ({told}); take another checkpoint') from error


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


def _shapes(shapes: Mapping[str, Any]) -> Shapes:
    return {name: tuple(shape) for name, shape in shapes.items()}


def require_all_ranks(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    """Check that the files of all ranks are there and no others, by the number of ranks that the first one records.

    Args:
        models, optims: In the order of ranks.

    Raises:
        CheckpointError: A file is missing, or left over from another run.
    """
    if not optims:
        if models[0].shapes is not None and not any(tensor.numel() for tensor in models[0].module.values()):
            raise CheckpointError(
                f'{models[0].file}: holds no weights, and there are no *_optim_states.pt files; copy them, too'
            )
        return
    first = optims[0]
    for states, n_ranks in ((optims, first.world_size), (models, first.world_size if first.stage == 3 else 1)):
        expected = [re.sub(r'rank_\d+_mp', f'rank_{rank}_mp', states[0].file.name) for rank in range(n_ranks)]
        names = [state.file.name for state in states]
        for name in [*expected, *names]:
            if name not in names or name not in expected:
                what, remedy = ('left over from another run', _HINT) if name in names else ('missing', 'copy it, too')
                raise CheckpointError(
                    f'{first.file.with_name(name)}: {what}: {first.file.name} is of ZeRO-{first.stage} with '
                    f'{counted(first.world_size, "rank")}; {remedy}'
                )


def require_one_save(models: Sequence[ModelState], optims: Sequence[OptimState]) -> None:
    """Compare what the files say of their save.

    Args:
        optims: In the order of ranks.

    Raises:
        CheckpointError: A file comes from another rank or another save.
    """
    states: list[ModelState | OptimState] = [*models, *optims]
    for state in states:
        if state.saved_as != state.file.stem and _DEEPSPEEDS.fullmatch(state.saved_as):
            raise CheckpointError(
                f'{state.file}: was saved as {state.saved_as}.pt and renamed; restore its name, or {_HINT}'
            )
    _same('ZeRO stage', ((o.file, o.stage) for o in optims))
    _same('number of ranks', ((o.file, o.world_size) for o in optims))
    _same('optimizer step', ((o.file, o.steps) for o in optims))
    _same('global_steps', ((m.file, m.steps) for m in models))
    _same('DeepSpeed version', ((state.file, state.version) for state in states))
    _same('shapes of parameters', ((m.file, [m.shapes, m.frozen_shapes]) for m in models))


def unproven(optims: Sequence[OptimState]) -> tuple[str, ...]:
    """Statements that the files cannot confirm, for the user to check."""
    if len(optims) < 2:
        return ()
    found = ['not verifiable: that all files are of one run; they agree on ranks, steps and shapes, and name no run']
    if any(optim.saved_as != optim.file.stem for optim in optims):
        found.append('not verifiable: only the file names say which rank wrote which file')
    return tuple(found)


def other_steps(models: Sequence[ModelState], optims: Sequence[OptimState]) -> str | None:
    """What the files say, if the optimizer has made other steps than the model, or does not count them."""
    if not optims or (optims[0].steps is not None and models[0].steps in (None, optims[0].steps)):
        return None
    return (
        f'the optimizer of {optims[0].file} has made {optims[0].steps} steps, {models[0].file.name} {models[0].steps}'
    )


def _same(what: str, values: Iterable[tuple[Path, Any]]) -> None:
    known = [(file, value) for file, value in values if value is not None]
    for file, value in known[1:]:
        first, expected = known[0]
        if value != expected:
            shown, wanted = str(value)[:60], str(expected)[:60]
            raise CheckpointError(
                f'{file}: has {what} {shown}, but {first.name} has {wanted}: not of one save; {_HINT}'
            )
