"""Models that are split by layers, not by ZeRO or FSDP: DeepSpeed's AutoTP is read, other ways are refused by name.

AutoTP (``tensor_parallel: {autotp_size}``) puts rows of some linear layers and columns of others on different ranks.
Each of its layers knows how it is split, and gathers itself (``gather_params`` in DeepSpeed's
``module_inject/layers.py``); the parameters have the full shapes, for universal checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from xhf_hooks.errors import ModelError
from xhf_hooks.model import is_class_of, modules_in, parameters_of
from xhf_hooks.planning.spread import Spread
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.sources.whole_tensors import WholeTensorsSource

#: The layers that gather what they split. The ones for Conv1D (GPT-2) do not (0.19.6): rows are columns there.
_LAYERS = (
    'LinearLayer',
    'LinearAllreduce',
    'LmHeadLinearAllreduce',
    'SubParamLinearLayer',
    'SubParamLinearAllreduce',
    'GateUpPack_LinearLayer',
    'fused_LinearLayer',
)
_USE_ZERO_3 = 'ZeRO-3, which also spreads a model over all ranks'


class AutoTpSource(WholeTensorsSource):
    """Gathers the split layers of DeepSpeed's AutoTP; everything else is whole on every rank. At ZeRO-0 to 2."""

    memory_factor = 4  # a padded shard, all of them, and the whole

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return any(map(_is_split, parameters_of(modules_in(model))))

    def spread(self, specs: Sequence[TensorSpec], collective: Collective) -> dict[str, Spread]:
        """The same as for other models, except for masters, which ZeRO spreads over some of the ranks only."""
        return super().spread([spec for spec in specs if not spec.from_master], collective)

    def spread_of(self, tensor: torch.Tensor) -> Spread | None:
        return None if _is_split(tensor) else super().spread_of(tensor)

    def gather(self, spec: TensorSpec) -> torch.Tensor:
        return _whole(self.tensors[spec.name], super().gather(spec))

    def full_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(_description(tensor)['original_shape']) if _is_split(tensor) else super().full_shape(tensor)


def refuse_other_parallelism(model: nn.Module) -> None:
    """Raise if ranks hold different layers, experts or heads of the model and this package cannot assemble them.

    Raises:
        ModelError: The message names the kind of parallelism, and what to do instead.
    """
    if is_class_of(type(model), 'deepspeed', 'PipelineModule'):
        raise ModelError(
            f'{type(model).__name__}: expected the same layers on every rank, found pipeline parallelism of DeepSpeed '
            f'(PipelineModule). Train a PreTrainedModel with {_USE_ZERO_3}'
        )
    modules = modules_in(model)
    parameters = [*parameters_of(modules)]
    of_experts = {each for each in set(map(type, modules)) if is_class_of(each, 'deepspeed', 'AutoEPMoELayer')}
    if of_experts or any(map(_is_of_some_ranks, parameters)):
        experts = [name for name, module in model.named_modules() if type(module) in of_experts]
        experts += [name for name, parameter in model.named_parameters() if _is_of_some_ranks(parameter)]
        raise ModelError(
            f'{experts[0]}: expected the same experts on every rank, found expert parallelism of DeepSpeed '
            f'(expert_parallel, or deepspeed.moe with ep_size). Train without it, with {_USE_ZERO_3}'
        )
    is_any_split = any(map(_is_split, parameters))
    for name, parameter in model.named_parameters() if is_any_split else ():
        if _is_split(parameter) and (problem := _why_unreadable(parameter)) is not None:
            raise ModelError(f"{name}: split by AutoTP (DeepSpeed's tensor parallelism, autotp_size), {problem}")
    for module in modules:  # of transformers 5.0 to some version before 5.23; in 4, packed weights
        if vars(module).get('_tp_size') not in (None, 1) and not _is_split_into_dtensors(module):
            raise ModelError(
                f'{type(module).__name__}: expected DTensors, which know what part of a tensor each rank holds, found '
                f'other tensors, which this version of transformers makes for tensor or expert parallelism (tp_plan). '
                f'Use a version that makes DTensors, such as 5.23, or train with {_USE_ZERO_3}'
            )
    if is_any_split:
        _refuse_lost_adapters(model)


def _refuse_lost_adapters(model: nn.Module) -> None:
    """DeepSpeed 0.19.6 replaces an adapted layer by its base, split."""
    for tuner in model.modules():
        for target in getattr(tuner, 'targeted_module_names', ()):
            if any(map(_is_split, tuner.model.get_submodule(target).parameters(recurse=False))):
                raise ModelError(
                    f"{target}: expected an adapter, found none: AutoTP (DeepSpeed's tensor parallelism, autotp_size) "
                    f'removed it when it split this layer. Adapt layers that its partition_config does not split, or '
                    f'train with {_USE_ZERO_3}'
                )


def _is_split_into_dtensors(model: nn.Module) -> bool:
    is_packed = any('packed' in str(getattr(module, '_hf_tp_plan', '')) for module in model.modules())
    return not is_packed and any(hasattr(parameter, 'placements') for parameter in model.parameters())


def _why_unreadable(parameter: torch.Tensor) -> str | None:
    layer, description = _layer(parameter), _description(parameter)
    kind = type(layer).__name__
    if kind not in _LAYERS or description.get('original_shape') is None:
        reason = f'as {kind}, which the installed DeepSpeed does not describe well enough'
    elif description.get('conversion', {}).get('unsupported_reason') is not None:
        reason = f'as {kind}, which DeepSpeed cannot gather: {description["conversion"]["unsupported_reason"]}'
    elif hasattr(parameter, 'ds_id'):
        return 'and by ZeRO-3 at once. Use one of them: AutoTP with ZeRO-0 to 2, or ZeRO-3 without autotp_size'
    else:
        return None
    return f'{reason}. Remove autotp_size, and train with {_USE_ZERO_3}'


def _whole(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A parameter, or its fp32 master, from the shards of the ranks that split it. Runs on: all ranks.

    ``gather_params`` replaces a parameter's data, and knows a bias by its identity. So a copy of the layer, with the
    shard for a parameter, gathers instead of the live one.
    """
    if not _is_split(parameter):
        return shard
    layer, stand_in = copy.copy(_layer(parameter)), nn.Parameter(shard, requires_grad=False)
    layer._parameters = {name: stand_in if own is parameter else own for name, own in layer._parameters.items()}
    layer.gather_params([stand_in])
    return stand_in.data


def _is_split(tensor: torch.Tensor) -> bool:
    return getattr(tensor, 'ds_is_replaced_module', False)


def _layer(tensor: torch.Tensor) -> Any:
    return getattr(getattr(tensor, 'gather_params', None), '__self__', None)


def _description(tensor: torch.Tensor) -> dict[str, Any]:
    return getattr(tensor, 'ds_autotp_universal_checkpoint_meta', {})


def _is_of_some_ranks(parameter: torch.Tensor) -> bool:
    """Whether the parameter belongs to an expert that other ranks do not have (DeepSpeed ``moe/experts.py``)."""
    if getattr(parameter, 'allreduce', True) is not False or not hasattr(parameter, 'group_name'):
        return False
    from deepspeed.utils import groups

    return groups._get_expert_parallel_world_size(parameter.group_name) > 1
