"""Builds models on the meta device: all names and shapes, and no memory for weights."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from xhf_hooks.compat.deepspeed import restore_inherited_init
from xhf_hooks.compat.transformers import choose_attention_again, converts_weights
from xhf_hooks.model import model_class, without_wrappers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Built = TypeVar('Built', bound=nn.Module)


def build_on_meta(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    arguments: Mapping[str, Any] | None = None,
    *,
    keeps_ties: bool = False,
) -> PreTrainedModel:
    """Build a model on the meta device as ``from_pretrained`` builds it, unpartitioned even at ZeRO-3.

    Args:
        arguments: Keyword arguments of the class besides the config.
        keeps_ties: Whether parameters stay tied that the class itself sets as those of other modules.
    """
    arguments = arguments or {}

    def build() -> PreTrainedModel:
        own = copy.deepcopy(config)  # ``__init__`` may edit it
        _prepare(own)
        choose_attention_again(own)
        restore_inherited_init(kind)
        model = kind(own, **arguments)
        if not keeps_ties:
            _untie_parameters(model)
        if not converts_weights():  # in transformers 4 models in the model tie their own weights when they are built
            for inner in model.modules():
                if inner is not model and hasattr(inner, 'tie_weights'):
                    inner.tie_weights()
        model.tie_weights()  # transformers 5.0 leaves that to from_pretrained
        return model

    with without_zero_init():
        return call_on_meta(build)


def copy_on_meta(
    model: PreTrainedModel, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]
) -> PreTrainedModel:
    """A copy on the meta device of the modules that a live model has, for a class that cannot be built.

    Such as one whose ``__init__`` takes more than the config. Tensors are tied as the config says.

    Args:
        config: The config of the copy.
        shapes: The full shapes of the tensors by name. A rank may hold slices.
    """

    def empty(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty(shapes.get(name, tensor.shape), dtype=tensor.dtype, device='meta')
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found

    whole = copy_modules(model, empty)
    whole.config = copy.deepcopy(config)
    type(whole).tie_weights(whole)
    return whole


def copy_modules(model: nn.Module, tensor_of: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the modules of a live model, without wrappers, adapters and hooks of engines, and without its tensors.

    Other attributes are shared, but for configs.

    Args:
        tensor_of: Makes a tensor of the copy, given its name in the model and the one of the live model.
    """
    copies: dict[int, nn.Module] = {}
    configs: dict[int, Any] = {}

    def copied(module: nn.Module, path: str) -> nn.Module:
        module = _without_adapter(_without_wrapper(module))
        if id(module) in copies:  # at a second place
            return copies[id(module)]
        copy_of: nn.Module = object.__new__(model_class(module))  # copy.copy would call __init__ of an FSDP module
        copies[id(module)] = copy_of
        vars(copy_of).update(vars(module))
        prefix = f'{path}.' if path else ''
        for tensors in ('_parameters', '_buffers'):
            own = vars(module)[tensors].items()
            setattr(copy_of, tensors, {n: None if one is None else tensor_of(f'{prefix}{n}', one) for n, one in own})
        copy_of._modules = {
            name: None if one is None else copied(one, f'{prefix}{name}') for name, one in module._modules.items()
        }
        for hooks in ('_state_dict_hooks', '_state_dict_pre_hooks'):
            kept = {key: hook for key, hook in vars(module)[hooks].items() if not _is_of_engine(hook)}
            vars(copy_of)[hooks] = type(vars(module)[hooks])(kept)
        config = vars(module).get('config')
        if hasattr(config, 'model_type'):
            if id(config) not in configs:
                configs[id(config)] = copy.deepcopy(config)
            copy_of.config = configs[id(config)]
        return copy_of

    return copied(model, '')


def _without_wrapper(module: nn.Module) -> nn.Module:
    """The module in wrappers of FSDP, activation checkpointing and torch.compile."""
    while inner := next((one for name, one in module._modules.items() if without_wrappers(name) == ''), None):
        module = inner
    return module


def _without_adapter(module: nn.Module) -> nn.Module:
    """The module that an adapter of peft has wrapped, or is a copy of."""
    while type(module).__module__.startswith('peft.'):
        parts = module._modules
        names = ('base_layer', 'token_adapter', 'original_module', 'base_model', 'model')
        inner = next((parts[name] for name in names if parts.get(name) is not None), None)
        if inner is None:
            break
        module = _without_wrapper(inner)
    return module


def _is_of_engine(hook: Any) -> bool:
    """Whether a hook of an engine would gather tensors, or rename them."""
    function = getattr(hook, 'hook', hook)  # torch wraps some
    return (getattr(function, '__module__', None) or '').startswith(('torch.distributed', 'deepspeed', 'accelerate'))


@contextmanager
def without_zero_init() -> Iterator[None]:
    """Keep transformers from partitioning models that are built or loaded at ZeRO-3."""
    integration = sys.modules.get('transformers.integrations.deepspeed')  # if it was not imported, ZeRO-3 is off
    reference = getattr(integration, '_hf_deepspeed_config_weak_ref', None)
    active = None if reference is None else reference()
    if integration is None or active is None:
        yield
        return
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration.set_hf_deepspeed_config(active)


def call_on_meta(build: Callable[[], Built]) -> Built:
    """Call ``build`` so that all tensors of the model are on the meta device.

    Some classes read values while they are built, which tensors on the meta device do not have: InternVL and Swin take
    the rates of stochastic depth from ``torch.linspace(...)``. These are built again with only their parameters there,
    as ``from_pretrained`` of transformers 4 builds all models (``init_empty_weights``).

    Args:
        build: Is called a second time if the first call fails.
    """
    with preserved_random_state():
        try:
            with torch.device('meta'):
                return build()
        except Exception:  # of any type, from custom code; the second call raises it again if it has another cause
            with torch.device('cpu'), _parameters_on_meta():
                model = build()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to('meta')
    return model


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random generators of torch, numpy and Python after the block.

    Classes may draw from them while they are built, and a run with saves must train to the same weights as one without.
    """
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _untie_parameters(model: nn.Module) -> None:
    """Give each module parameters of its own.

    A class may set a parameter of one module as that of another while it is built, as MBart does with its embeddings.
    ``from_pretrained`` does not restore that, but only what ``tie_weights`` ties and modules that are at two places:
    it puts each stored tensor, or each parameter on the meta device, in the place of what the class has built.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach(), parameter.requires_grad)
            elif parameter is not None:
                seen.add(id(parameter))


def _prepare(config: PretrainedConfig) -> None:
    """Set what ``from_pretrained`` sets: dtypes of torch, with which classes such as Apertus create tensors."""
    for name in ('dtype', 'torch_dtype'):  # renamed in transformers 4.56
        if isinstance(value := vars(config).get(name), str):
            setattr(config, name, getattr(torch, value))
    for part in vars(config).values():
        if hasattr(part, 'model_type'):  # the config of a submodel
            _prepare(part)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, modules put their parameters on the meta device when they get them, before they initialize them."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to('meta'), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
