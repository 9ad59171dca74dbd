"""Warnings about tensors that readers with transformers 4 do not find, or tie, in a save made with transformers 5.

They are about models that were built from a config, of which the installed transformers knows what it reads of older
files. Tensors of a base are compared with its files (:func:`.warn_of_base`). It ends with
exporters/assets/older_readers.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from xhf_hooks.compat.transformers import (
    converts_weights,
    prefixes_left_out,
    read_in_two_forms,
    text_config,
)
from xhf_hooks.exporters.ask_save import SaveAnswer
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.exporters.reference import TIE
from xhf_hooks.format.loaded_files import CONFIG
from xhf_hooks.format.text import counted, some
from xhf_hooks.model import input_embedding, model_class, output_embedding, without_wrappers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def warn_of_older_tensors(
    model: PreTrainedModel, config: PretrainedConfig, answer: SaveAnswer, base_model: LocatedBase
) -> list[str]:
    """Warnings about what a model that was built from its config has for transformers 5 alone.

    Args:
        model: The model whose class was asked.
        config: The config to write.
        answer: What is written, with the final config.json.
    """
    if not converts_weights():
        return []
    name = model_class(model).__name__
    warnings = [
        f'{name} was not loaded from a folder with the tensor names of the Hub, so the save has the names that '
        f"transformers 5 gives (without '{prefix}'{f' in {path}' if path else ''}), which neither transformers 4 nor "
        f"vLLM reads. To keep the Hub's names, load the model, before training, from a folder that has them"
        for path, prefix in prefixes_left_out(model).items()
    ]
    if base_model.read_json('config.json').get('model_type') != config.model_type:
        as_in_memory = [
            key
            for tensors in answer.weights.values()
            for key, one in tensors.items()
            if one.is_source and one.sources == (key,)
        ]
        if two := read_in_two_forms(model, as_in_memory):
            warnings.append(
                f'{counted(len(two), "tensor")} of the save ({some(two)}) {"has" if len(two) == 1 else "have"} the '
                f'shape that transformers 5 gives {name}, which transformers 4 cannot read: it has them transposed'
            )
    return warnings + _warn_of_tie(model, config, answer)


def _warn_of_tie(model: PreTrainedModel, config: PretrainedConfig, answer: SaveAnswer) -> list[str]:
    """A warning if the text model's config says something else of the head than what is written.

    transformers 4 goes by the former (``get_text_config`` in ``tie_weights`` of ``modeling_utils.py`` of 4.57),
    transformers 5 by the config of the model that has the head.
    """
    content, written, text = json.loads(answer.files[CONFIG]), answer.written_names, text_config(config)
    part = next((key for key, value in vars(config).items() if value is text), '')
    fields = content.get(part) if part else content
    older = fields.get(TIE) if isinstance(fields, dict) else None
    head, embedding = (_path_of(model, name) for name in ('get_output_embeddings', 'get_input_embeddings'))
    if older is None or head is None or output_embedding(model) is None:  # MusicGen has a list of heads
        return []
    # Of tied ones, either may be written; an embedding may be tied to something else, too, as in CSM
    are_one = output_embedding(model) is input_embedding(model)
    is_tied = f'{head}.weight' not in written or (are_one and f'{embedding}.weight' not in written)
    if older == is_tied:
        return []
    where = f'{part}.{TIE}' if part else TIE
    result = f'misses {head}.weight, and makes a random one' if is_tied else f'ties {head}.weight, or refuses'
    return [
        f'config.json: {where} is {older}, but {head}.weight of {model_class(model).__name__} is '
        f'{"" if is_tied else "not "}tied to the input embedding. transformers 4 goes by that field: it '
        f'{result}. To avoid this, set model.config.{where} to {is_tied} before training'
    ]


def _path_of(model: PreTrainedModel, getter: str) -> str | None:
    """The path of the layer that a method of a model returns, without wrappers; None if it has none."""
    try:
        layer = getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None
    return next((without_wrappers(path) for path, module in model.named_modules() if module is layer), None)
