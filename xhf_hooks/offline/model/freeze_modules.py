"""Freezes what the run's config freezes, and checks frozen weights that the checkpoint of an adapter lacks.

For the latter it finds out whether the base has the weights of training, and their dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from xhf_hooks.compat.peft import edits_base
from xhf_hooks.exporters.find_model import adapters_in, adapters_in_use
from xhf_hooks.format.dtypes import CODES_BY_NAME, is_float
from xhf_hooks.model import module_tensors
from xhf_hooks.offline.model.run_config import RunConfig
from xhf_hooks.offline.model.stored_names import is_of_adapter
from xhf_hooks.sources.stored_tensors import StoredTensor

#: Options in the config of a model that freeze, and the parts that they freeze in LLaVAModel and in InternVL_V1_5.
_FROZEN_BY = {
    'freeze_llm': {'llm', 'language_model'},
    'freeze_visual_encoder': {'visual_encoder', 'vision_model'},
}


def freeze_parts(module: nn.Module, model: Mapping[str, Any]) -> None:
    """Freeze the parts of a model that its config in the run's config freezes; adapters stay trainable.

    Models around them, such as Sa2VA's, have their config under the name of the part.
    """
    for option, names in _FROZEN_BY.items():
        for path, parameter in module.named_parameters() if model.get(option) is True else ():
            if not names.isdisjoint(path.split('.')[:2]):
                parameter.requires_grad_(is_of_adapter(path))
    for name, part in module.named_children():
        if isinstance(model.get(name), Mapping):
            freeze_parts(part, model[name])


def frozen_in(module: nn.Module, names: Collection[str]) -> list[str]:
    """The names whose tensors are not trained."""
    return [name for name, tensor in module_tensors(module) if not tensor.requires_grad and name in names]


def edited_by_adapters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of weights that adapters edit when they are made, as PiSSA and OLoRA do, and the name of the init."""
    for path, peft_model in adapters_in(module).items():
        configs = (peft_model.peft_config[name] for name in adapters_in_use(peft_model))
        inits = [getattr(config, 'init_lora_weights', None) for config in configs]  # other tuners have none
        for init in filter(edits_base, inits):
            names = (f'{path}.{name}'.removeprefix('.') for name, _ in peft_model.named_parameters())
            yield from ((name, str(init)) for name in names if '.base_layer.' in name)


def dtype_of_frozen(
    module: nn.Module, config: RunConfig, stored: Mapping[str, StoredTensor], cast_to: str | None
) -> str | None:
    """The dtype that training gave to weights of the base; None if nothing shows it.

    Of an adapter's run in which DeepSpeed did not cast them, it is that of frozen weights in the checkpoint; else that
    in the run's config, with which the model was loaded; else that of a 16-bit adapter. peft makes adapters of 16-bit
    models in fp32 by default, so fp32 says nothing.

    Args:
        module: The meta model's.
        stored: The tensors of the checkpoint, by each of their names.
        cast_to: The dtype that DeepSpeed cast the model to; None if it did not.
    """
    if cast_to is not None or not adapters_in(module):
        return cast_to
    frozen = Counter(stored[name].dtype for name in frozen_in(module, stored) if is_float(stored[name].dtype))
    if frozen:
        return frozen.most_common(1)[0][0]
    llm = None if 'visual_encoder' in config.model else config.model.get('llm')  # which may have another dtype
    named = (llm.get('torch_dtype') or llm.get('dtype')) if isinstance(llm, Mapping) else None
    if isinstance(named, str) and named.removeprefix('torch.') in CODES_BY_NAME:
        return CODES_BY_NAME[named.removeprefix('torch.')]
    trained = {tensor.dtype for tensor in stored.values() if is_float(tensor.dtype)}
    return trained.pop() if len(trained) == 1 and trained <= {'BF16', 'F16'} else None
