"""What versions of transformers since 4.36 do differently when they save, build and load a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from xhf_hooks.model import names_by_identity

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def converts_weights() -> bool:
    """Whether the installed transformers converts weights when it loads and saves, as since 5."""
    return find_spec('transformers.core_model_loading') is not None


def recorded_conversions(model: object) -> Any | None:
    """The conversions that ``from_pretrained`` made of a model's weights, which ``save_pretrained`` reverts.

    None if none are recorded: the model was not loaded, or the installed transformers converts no weights.
    """
    return getattr(model, '_weight_conversions', None)


def record_conversions(model: Any, conversions: Any) -> None:
    """Have ``save_pretrained`` revert these conversions."""
    model._weight_conversions = conversions


def ignored_keys(model: object, occasion: str) -> tuple[str, ...]:
    """Patterns of names that a class does not miss, finds in vain, or does not write.

    Args:
        model: A model or its class.
        occasion: 'load_missing', 'load_unexpected' or 'save'.
    """
    return tuple(getattr(model, f'_keys_to_ignore_on_{occasion}', None) or ())


def keeps_fp32(model: object) -> bool:
    """Whether the class may keep tensors in fp32 when it is loaded in 16 bits."""
    return any(getattr(model, name, None) for name in ('_keep_in_fp32_modules', '_keep_in_fp32_modules_strict'))


def choose_attention_again(config: PretrainedConfig) -> None:
    """Let a model that is built from this config choose the attention of each of its parts.

    ``save_pretrained`` of transformers 4.48 has reset the choice, so that parts would get the attention of the whole,
    which they may not support.
    """
    if vars(config).get('_attn_implementation_autoset') is False:
        config._attn_implementation_autoset = True


def dtype_field(config: PretrainedConfig) -> str:
    """The name of a config's dtype, which 4.56 renamed."""
    return 'dtype' if hasattr(config, 'dtype') else 'torch_dtype'


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part that describes the text model; the whole if there is none, or if there are several, as in MusicGen.

    ``get_text_config``, which transformers has since 4.45.
    """
    if hasattr(config, 'get_text_config'):
        try:
            return config.get_text_config()
        except ValueError:
            return config
    parts = [getattr(config, name, None) for name in ('decoder', 'generator', 'text_config')]
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else config


def accepted_options(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the constructor of a class takes by name."""
    taken = inspect.signature(kind).parameters
    return {name: value for name, value in options.items() if name in taken}


#: Fields of RoPE in configs of transformers 4, which 5 holds together in ``rope_parameters``.
ROPE_OPTIONS = ('rope_scaling', 'rope_theta')


def has_rope(config: PretrainedConfig) -> bool:
    """Whether the config describes RoPE that can be scaled."""
    if hasattr(config, 'rope_parameters'):
        return isinstance(config.rope_parameters, dict)
    return hasattr(config, 'rope_scaling')


def set_rope_option(config: PretrainedConfig, name: str, value: Any) -> bool:
    """Set one of :data:`ROPE_OPTIONS`, which leaves the other as it is; returns whether the config has it.

    transformers 5 takes ``rope_scaling`` for all of ``rope_parameters``, and would lose ``rope_theta``. So its class
    reads both from a config in the words of transformers 4.
    """
    if not hasattr(config, 'rope_parameters'):
        if hasattr(config, name):
            setattr(config, name, value)
        return hasattr(config, name)
    rope = config.rope_parameters
    if not isinstance(rope, dict) or any(isinstance(part, dict) for part in rope.values()):  # one by kind of layer
        return False
    fields = {key: part for key, part in config.to_dict().items() if key not in ('rope_parameters', *ROPE_OPTIONS)}
    outside = {key: rope[key] for key in ('rope_theta', 'partial_rotary_factor') if key in rope}
    scaling = {key: part for key, part in rope.items() if key not in outside}
    older = {**fields, **outside, 'rope_scaling': scaling, name: value}
    config.rope_parameters = type(config).from_dict(older).rope_parameters
    return True


def forget_scaling_by_one(config: PretrainedConfig) -> None:
    """Drop a linear scaling of RoPE by 1.0, which changes nothing, if the config's class refuses to load it.

    Classes before transformers 4.45 do. XTuner sets it after loading where the context is not longer than the base's.
    """
    scaling = getattr(config, 'rope_scaling', None)
    if not isinstance(scaling, dict) or scaling.get('factor') != 1 or scaling.get('type') != 'linear':
        return
    try:
        type(config).from_dict(config.to_dict())
    except ValueError:
        config.rope_scaling = None


def prefixes_left_out(model: PreTrainedModel) -> dict[str, str]:
    """Parts of tensor names that ``save_pretrained`` leaves out and older readers expect, by the path in the model.

    transformers 5 has flattened the vision towers of CLIP and SigLIP: it takes ``vision_model.`` off older names when
    it loads them, and puts it back only if it has loaded the model so (its function ``revert_weight_conversion``).
    Where the path itself ends with that name, as in CLIPModel, older versions have it once, too.
    """
    if not converts_weights():
        return {}
    from transformers import conversion_mapping, core_model_loading

    change = getattr(core_model_loading, 'PrefixChange', None)  # the first of transformers 5 have none
    if change is None:
        return {}
    reverted = recorded_conversions(model) or ()
    known = conversion_mapping.get_model_conversion_mapping(model)

    def prefixes_in(conversions: Sequence[Any]) -> dict[str, str]:
        nested = (one for one in conversions if isinstance(one, change) and getattr(one, 'scope_prefix', None))
        return {one.scope_prefix: one.prefix_to_remove for one in nested if one.prefix_to_remove}

    found = prefixes_in(reverted)
    return {
        path: prefix
        for path, prefix in prefixes_in(known).items()
        if path not in found and path.rpartition('.')[2] != prefix
    }


def tied_while_built(model: nn.Module, not_written: Collection[str]) -> set[str]:
    """Names that are not written, and that loading restores since the class ties them to others while it is built.

    transformers 4 loads into a model that it has built, with its ties, such as those of Donut's decoder, unless a
    device map is given, as when loading is checked. transformers 5 ties afterwards.

    Args:
        model: The model as its class builds it, on the meta device.
    """
    groups = (set(names) for _, names in names_by_identity(model))
    return {name for names in groups if not names.issubset(not_written) for name in names if name in not_written}


def loaded_without_device_map(
    load: Callable[[], tuple[Any, Any]], given: set[str], on_meta: Sequence[Callable[[], AbstractContextManager[Any]]]
) -> tuple[Any, Any] | None:
    """The same result as ``loading_check.load_with_info``, without a device map; None if that fails, too.

    transformers before 4.48 forgets the tensors that it is given with a device map. Without one, on the meta device, it
    takes all tensors for one, and reports nothing missing. It renames nothing.

    Args:
        load: Calls ``load_with_info``.
        given: Names of the tensors that it is given.
        on_meta: Ways to build a model on the meta device, of which the first that works is taken.
    """
    for context in on_meta:
        with suppress(Exception), context():  # of any type, from custom code: then the next way is tried
            model, problems = load()
            ignored = [*ignored_keys(model, 'load_missing'), *ignored_keys(model, 'save')]
            listed = model.state_dict().keys()  # which a class may override
            named = (names for _, names in names_by_identity(model) if not listed.isdisjoint(names))
            missing = (names[0] for names in named if given.isdisjoint(names))
            problems['missing'] = sorted(n for n in missing if not any(re.search(pattern, n) for pattern in ignored))
            return model, problems
    return None


def kept_in_fp32_by_name(kind: type[PreTrainedModel], names: Collection[str], dtype: torch.dtype) -> set[str] | None:
    """The tensors that ``from_pretrained`` with this dtype keeps in fp32; None if the installed one has other rules.

    transformers before 4.48 cannot load empty tensors into a class that keeps some in fp32. There it goes by the parts
    of their names, and for float16 alone (``modeling_utils.py``, ``_load_pretrained_model``).
    """
    from transformers import modeling_utils

    if 'module_to_keep_in_fp32 in key.split(".")' not in inspect.getsource(modeling_utils):
        return None
    kept = set(kind._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    return {name for name in names if kept.intersection(name.split('.'))}
