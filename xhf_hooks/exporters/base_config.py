"""Tells what an adapter loses that has no config: its base computes with the base's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xhf_hooks.exporters.assets.base_files import LocatedBase

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Fields that change no logits, beside those that transformers gives every config: of loading, training and generation,
#: and the size of the vocabulary, which :func:`.hf_assets.warn_of_lost_rows` compares.
_WITHOUT_EFFECT = re.compile(
    r'_.*|.*(drop|initializer|init_std|loss|token_id).*|auto_map|use_cache|gradient_checkpointing|pretraining_tp|'
    r'attn_implementation|quantization_config|output_.*|(torch_)?dtype|vocab_size'
)


def warn_of_lost_config(model: PreTrainedModel, base_model: LocatedBase) -> list[str]:
    """A warning if the trained model computes with other settings than its base, such as scaled RoPE.

    Both configs are as the class in the installed transformers reads them; what others have set in the live one that
    the class does not know is not compared.

    Args:
        model: The trained model, without its PeftModel.
        base_model: The base, onto which the adapter is loaded. If its config is not found, or describes another kind of
            model, of which the trained one is a part, nothing is compared.
    """
    config = model.config
    fields = base_model.read_json('config.json')
    if fields.get('model_type') != config.model_type:
        return []
    try:
        trained, of_base = _as_json(config), _as_json(type(config).from_dict(fields))
    except Exception:  # of any type, from custom code; whether the adapter loads is checked elsewhere
        return []
    differing = dict(_differences(trained, of_base))
    if not differing:
        return []
    values = ', '.join(f'{name} ({own!r}; in the base {other!r})' for name, (own, other) in differing.items())
    settings = ', '.join(f'{name}={own!r}' for name, (own, _) in differing.items() if '.' not in name)
    remedy = f'load the base with from_pretrained(..., {settings}), or save' if settings else 'save'
    return [
        f'the config of the trained model differs from that of {base_model.name} in {values}, and an adapter has no '
        f'config: loaded onto that base, it gives other outputs than in training. To avoid this, {remedy} the merged '
        f"model, which has these settings (lora='merge' or 'both'; after QLoRA, xhf-convert --lora merge)"
    ]


def _as_json(config: PretrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def _differences(trained: Mapping[str, Any], of_base: Mapping[str, Any], path: str = '') -> Iterator[tuple[str, Any]]:
    """The fields of two configs, and of configs in them, that change the logits: the path of each, with both values."""
    from transformers import PretrainedConfig

    of_every_config = PretrainedConfig().to_dict()
    for name, other in of_base.items():
        own = trained.get(name)
        if name in of_every_config or _WITHOUT_EFFECT.fullmatch(name):
            continue
        if isinstance(own, dict) and isinstance(other, dict) and 'model_type' in other:
            yield from _differences(own, other, f'{path}{name}.')
        elif _without_scaling_by_one(own) != _without_scaling_by_one(other):
            yield f'{path}{name}', (own, other)


def _without_scaling_by_one(value: Any) -> Any:
    """The settings of RoPE without a linear scaling by 1.0, which changes nothing, and which trainers set.

    The kind of scaling has two names in transformers 4, and either is enough.
    """
    if not isinstance(value, dict) or not value.keys() & {'type', 'rope_type'}:
        return value
    settings = dict(value)
    former = settings.pop('type', None)
    settings['rope_type'] = settings.get('rope_type', former)
    if settings['rope_type'] == 'linear' and settings.get('factor') == 1:
        settings |= {'rope_type': 'default'}
        del settings['factor']
    return None if settings == {'rope_type': 'default'} else settings
