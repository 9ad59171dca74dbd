"""Builds a transformers model from a folder like ``from_pretrained``, but on the meta device and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xhf_hooks.errors import BaseModelError, DamagedError
from xhf_hooks.exporters.tokenizer import base_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Arguments of ``from_pretrained`` that are not fields of the config, or that an untrusted config must not set.
_NOT_OF_THE_CONFIG = ('type', 'pretrained_model_name_or_path', 'auto_map', 'torch_dtype', 'dtype', 'name_or_path')
_NEVER_RECORDED = ('quantization_config', 'architectures', 'use_cache')
_CLEAR, _LONGEST = 20, 200  # characters of an error's text


def load_config(base: str, *, trust_remote_code: bool, why: str) -> PretrainedConfig:
    """The config of the model at ``base``, a folder or a name in the local hub cache. Offline.

    Args:
        why: Where ``base`` comes from, for messages.

    Raises:
        BaseModelError: It is missing, or needs custom code.
    """
    from transformers import AutoConfig

    try:
        if base_file(base, 'config.json') is None:  # transformers < 5 guesses the model from the folder's name
            raise FileNotFoundError('there is no such file')
        return AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # its class may raise anything
        remedy = '--base has to name a folder with the model that training started from'
        if 'trust_remote_code' in str(error):
            remedy = 'if you trust that code, add --trust-remote-code'
        raise BaseModelError(f'{base} ({why}): no usable config.json ({in_one_line(error)}); {remedy}') from None


def in_one_line(error: BaseException) -> str:
    """A library's error message, shortened to one line; with the error's class if the text is very short."""
    line = ' '.join(str(error).split())
    line = line if len(line) > _CLEAR else f'{type(error).__name__}: {line}'.rstrip(': ')
    return line if len(line) <= _LONGEST else f'{line[:_LONGEST]}...'


def apply_options(config: PretrainedConfig, options: Mapping[str, Any]) -> None:
    """Apply arguments of ``from_pretrained`` that are fields of the config, such as ``rope_scaling``."""
    for name, value in options.items():
        known = hasattr(config, name) and not name.startswith('_')
        is_plain = isinstance(value, (str, int, float, bool, dict, list, type(None)))
        if known and is_plain and name not in (*_NOT_OF_THE_CONFIG, *_NEVER_RECORDED):
            setattr(config, name, value)


def build(config: PretrainedConfig, auto_class: str | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model on the meta device.

    Args:
        auto_class: Auto class such as ``'AutoModelForCausalLM'``, or model class; None: the config's ``architectures``.

    Raises:
        BaseModelError: transformers does not have the model.
        DamagedError: transformers cannot build it from this config.
    """
    import transformers

    base = config._name_or_path
    name = auto_class or first_architecture(getattr(config, 'architectures', None))
    kind = class_named(name, base, auto=auto_class is not None)
    remote = trust_remote_code and getattr(config, 'auto_map', None)
    if kind is None and not remote:
        raise BaseModelError(
            f'{base}: its config.json names the architecture {str(name)[:80]!r}, which transformers '
            f'{transformers.__version__} does not have; set architectures, or use the version that trained it'
        )
    try:
        with torch.device('meta'):
            if kind is None:
                auto = next((name for name in config.auto_map if name.startswith('AutoModel')), 'AutoModel')
                model = getattr(transformers, auto).from_config(config, trust_remote_code=True)
            elif hasattr(kind, 'from_config'):
                model = kind.from_config(config, **({'trust_remote_code': True} if remote else {}))
            else:
                model = kind(config)
            model.tie_weights()  # transformers 5.0 leaves that to from_pretrained
        config.to_json_string()  # as is done when the weights are written
    except ImportError as error:
        raise BaseModelError(
            f'{base}: its model needs a package that is not installed ({in_one_line(error)})'
        ) from None
    except Exception as error:  # its class may raise anything
        raise DamagedError(f'{base}: building the model of config.json failed ({in_one_line(error)})') from None
    _use_generation_config(model, base)
    return model


def first_architecture(architectures: Any) -> str | None:
    """The first name in ``architectures`` of an untrusted config."""
    found = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
    return found if isinstance(found, str) else None


def class_named(name: str | None, base: str, *, auto: bool) -> Any | None:
    """A model class of transformers; None if it has no such name.

    Args:
        auto: Accept auto classes, such as ``AutoModel``.

    Raises:
        BaseModelError: It cannot be imported.
        DamagedError: The name is not a model class.
    """
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    if name is None or not name.isidentifier():
        return None
    try:
        found = getattr(transformers, name, None)
    except Exception as error:  # usually a missing package
        raise BaseModelError(f'{base}: {name[:80]} cannot be imported ({in_one_line(error)})') from None
    is_class = isinstance(found, type) and found is not transformers.PreTrainedModel
    kinds = (transformers.PreTrainedModel, *((_BaseAutoModelClass,) if auto else ()))
    if found is None or (is_class and issubclass(found, kinds)):
        return found
    raise DamagedError(f'{base}: {name[:80]!r} is not a model class of transformers; set architectures')


def _use_generation_config(model: PreTrainedModel, base: str) -> None:
    """Load generation_config.json, as ``from_pretrained`` does."""
    from transformers import GenerationConfig

    if not model.can_generate() or not (Path(base).is_dir() and (Path(base) / 'generation_config.json').is_file()):
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(base, local_files_only=True)
    except Exception as error:  # untrusted
        raise DamagedError(f'{base}: no usable generation_config.json ({in_one_line(error)})') from None
