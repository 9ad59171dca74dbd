"""What versions of transformers since 4.36 do differently when they save, build and load a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Result = TypeVar('Result')
#: The end of the name of a buffer of GPT-2, GPT-J and GPT-Neo that transformers saved before 4.31. transformers 5 does
#: not ignore it, as it does other old buffers. It goes when checkpoints of 4.30 are not converted any more.
BUFFER_OF_OLD = '.masked_bias'


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


def conversions_of_text_model(model: PreTrainedModel) -> list[Any] | None:
    """The conversions with which ``from_pretrained`` makes a text model of the files of a vision-language base.

    None if AutoModelForCausalLM makes models of this class of no such base, if they have the same names there, or if
    the installed transformers converts no weights, as before 5. Without a base, ``save_pretrained`` leaves out such a
    change of prefixes (``core_model_loading.py``, ``revert_weight_conversion``).
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if not converts_weights() or not any(
        kind == type(model).__name__ and model_type != model.config.model_type for model_type, kind in kinds
    ):
        return None
    from transformers import core_model_loading

    change_of_prefix = getattr(core_model_loading, 'PrefixChange', ())  # 5.0 has none
    conversions = _known_conversions(model)
    return conversions if any(isinstance(one, change_of_prefix) for one in conversions) else None


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

    Classes before transformers 4.45 do. Trainers set it after loading where the context is not longer than the base's.
    """
    scaling = getattr(config, 'rope_scaling', None)
    if not isinstance(scaling, dict) or scaling.get('factor') != 1 or scaling.get('type') != 'linear':
        return
    try:
        type(config).from_dict(config.to_dict())
    except ValueError:
        config.rope_scaling = None


#: What a tower's class held its modules under before transformers 5, in which it has them itself.
_IN_TOWERS = ('vision_model', 'text_model')


def prefixes_left_out(model: PreTrainedModel) -> dict[str, str]:
    """Parts of tensor names that ``save_pretrained`` leaves out and older readers expect, by path.

    transformers 5 has flattened the vision towers of CLIP and SigLIP: it takes ``vision_model.`` off older names when
    it loads them, and puts it back only if it has loaded the model so (its function ``revert_weight_conversion``).
    Classes with a tower of their own, as CLIPModel, had none of these names in it before.

    Returns:
        The prefix by the path of the tower, without that of the base model; '' for a tower by itself.
    """
    from transformers import core_model_loading

    change = getattr(core_model_loading, 'PrefixChange', ())  # the first of transformers 5 have none

    def prefixes_in(conversions: Sequence[Any]) -> dict[str, str]:
        removals = [one for one in conversions if isinstance(one, change) and one.prefix_to_remove]
        return {getattr(one, 'scope_prefix', None) or '': one.prefix_to_remove for one in removals}

    reverted = prefixes_in(recorded_conversions(model) or ())
    paths = {path for path, _ in model.named_modules()}
    found = {}
    for scope, prefix in prefixes_in(_known_conversions(model)).items():
        # A scope lacks the prefix of the base model
        path = scope if scope in paths else f'{model.base_model_prefix}.{scope}'
        is_of_tower = not _is_own_tower(model, path) if scope else prefix in _IN_TOWERS
        if scope not in reverted and is_of_tower:
            found[scope] = prefix
    return found


def _is_own_tower(model: PreTrainedModel, path: str) -> bool:
    """Whether a module's config is defined in the same file as the model's. Their own classes may be anybody's."""
    try:
        tower = model.get_submodule(path)
    except AttributeError:
        return False
    return type(model.config).__module__ == type(tower.config).__module__


def _known_conversions(model: PreTrainedModel) -> list[Any]:
    """What transformers 5 converts when it loads a model of this class, but for names that transformers 4 reads."""
    from transformers import conversion_mapping

    return conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)


def read_in_two_forms(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The tensors of the files that transformers 5 also reads transposed, as it finds them in older files.

    Args:
        names: The names in the files of what is saved as the model has it.
    """
    conversions = [
        one
        for one in _known_conversions(model)
        if any(getattr(operation, 'check_dims', False) for operation in getattr(one, 'operations', ()))
    ]
    return [name for name in names if any(one.rename_source_key(name)[1] is not None for one in conversions)]


def without_legacy_names(names: Iterable[str]) -> dict[str, str]:
    """Names of tensors with the words of transformers 5, for older ones that transformers 4 reads, too."""
    from transformers import conversion_mapping

    found = {name: name for name in names}
    for one in conversion_mapping.get_checkpoint_conversion_mapping('legacy') or ():
        found = {name: one.rename_source_key(present)[0] for name, present in found.items()}
    return found


def older_layer_types(config: PretrainedConfig) -> dict[str, str]:
    """Kinds of layers in the words of transformers 4, by the words of 5; {} if the class had the same words before.

    Those whose field had another name, ``layers_block_type``.
    """
    from transformers import configuration_utils

    is_renamed = getattr(config, 'attribute_map', {}).get('layers_block_type') == 'layer_types'
    known = getattr(configuration_utils, '_LEGACY_LAYER_TYPE_REMAP', {}) if is_renamed else {}
    return {now: older for older, now in reversed(known.items())}  # the first one of several


#: Kinds of models that transformers 5.23 writes in another form than transformers 4.57 reads, by ``model_type``, where
#: nothing in transformers 5 says so: what 4.57 makes of them. It is a last resort, and ends with
#: exporters/assets/older_readers.py, when this package requires transformers 5.
_UNREAD_ALWAYS = {'dbrx': 'refuses fields of attn_config and ffn_config'}
#: The same of models that were built from a config. Of a base it is known how it was before.
_UNREAD_IF_BUILT = {
    'altclip': 'finds the layers of the vision model under other names',
    'flava': 'finds biases of the heads under other names',
    'fuyu': 'reads the sizes of the text model in another place',
    'luke': 'finds the bias of the head under another name',
    'mamba2': 'cannot read that time_step_limit is infinite',
    'modernbert-decoder': 'takes global_rope_theta in all layers',
    'mt5': 'scales what the head gets',
    'vit_mae': 'finds the layers of the decoder under other names',
    'vit_msn': 'finds the layers under other names',
}


def tell_unread(model_type: str, *, has_base: bool) -> list[str]:
    """What transformers 4 does with a model of this kind, in a list; [] if it reads it, as far as is known.

    Args:
        has_base: Whether the model started from files that are known.
    """
    kinds = _UNREAD_ALWAYS if has_base else {**_UNREAD_ALWAYS, **_UNREAD_IF_BUILT}
    return [kinds[model_type]] if model_type in kinds else []


def load_as_from_file(load: Callable[..., Result], folder: Path, tensors: Mapping[str, torch.Tensor]) -> Result | None:
    """Load tensors as if they were in a folder's weight file; None if transformers does not read it as it used to.

    transformers before 4.48 forgets the tensors that it is given with a device map.

    Args:
        load: Calls ``from_pretrained`` of a class with a source and more options.
        folder: Has a config.json, and gets a weight file without tensors.
    """
    from safetensors.torch import save_file
    from transformers import modeling_utils

    was_read = False

    def read(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
        nonlocal was_read
        was_read = True
        return dict(tensors)

    save_file({}, folder / 'model.safetensors', {'format': 'pt'})
    # Where FSDP loads on the first rank alone, the others would get no tensors
    replaced = {'load_state_dict': read, 'is_fsdp_enabled': lambda: False}
    original = {name: vars(modeling_utils)[name] for name in replaced if hasattr(modeling_utils, name)}
    vars(modeling_utils).update({name: replaced[name] for name in original})
    try:
        # What is missing gets no values, for which each tensor would be made on the CPU
        loaded = load(folder, _fast_init=False)
    except Exception:  # of any type, from custom code
        return None
    finally:
        vars(modeling_utils).update(original)
    return loaded if was_read else None
