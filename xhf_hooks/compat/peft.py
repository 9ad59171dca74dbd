"""LoRA layers of peft 0.7 to 0.21, and what their initialisation does to the base."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

#: Values of ``init_lora_weights`` that edit the base by data of the run, which peft does not have when it loads the
#: adapter. A layer without such data is not edited, or peft refuses it (``tuners/lora/layer.py``).
_INITS_BY_DATA = ('lora_ga', 'corda')


def active_adapters(peft_model: PeftModel) -> list[str]:
    """The names of the adapters that make the model's outputs.

    peft 0.7 has for the tuners of prompts, which have one, a method of the transformers model that they are around.
    """
    found = peft_model.active_adapters
    return [peft_model.active_adapter] if callable(found) else list(found)


def uses_dora(layer: LoraLayer, adapter: str) -> bool:
    """Whether an adapter of the layer is DoRA, which peft has since 0.9."""
    return getattr(layer, 'use_dora', {}).get(adapter, False)


def magnitude_name(path: str, adapter: str, names: Container[str]) -> str:
    """The name of DoRA's magnitudes, which were a parameter of the layer before peft 0.12 and are a module's since.

    Args:
        path: The layer's path in the model.
        names: Names of the model's tensors.
    """
    parameter = f'{path}.lora_magnitude_vector.{adapter}'
    return parameter if parameter in names else f'{parameter}.weight'


def edits_base(init: Any) -> bool:
    """Whether peft edits the base of an adapter with this ``init_lora_weights``: asked of the installed version."""
    if init in _INITS_BY_DATA:
        return True
    edited = _edited_base(init, 0)
    return edited is None or edited.count_nonzero().item() > 0


def edits_base_again(init: Any) -> bool:
    """Whether peft does to the base what it did before training when it loads such an adapter, to the last bit.

    PiSSA and OLoRA do. PiSSA with ``_niter_`` draws random numbers, and others need data of the run.
    """
    if init in _INITS_BY_DATA:
        return False
    edited, again = _edited_base(init, 0), _edited_base(init, 1)
    return edited is not None and again is not None and torch.equal(edited, again)


def _edited_base(init: Any, seed: int) -> torch.Tensor | None:
    """By how much an adapter changes a layer when it is made; None if it cannot be made of a layer alone.

    Args:
        seed: The seed of random numbers that the init may draw. The layer does not depend on it.
    """
    weight = torch.arange(32 * 32, dtype=torch.float32).sin().view(32, 32)  # with many singular values
    if init is None or isinstance(init, bool):
        return torch.zeros_like(weight)
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(*weight.shape, bias=False)
        layer.weight.data.copy_(weight)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed those of devices, too
        try:
            get_peft_model(nn.Sequential(layer), LoraConfig(r=2, target_modules=['0'], init_lora_weights=init))
        except Exception:  # it needs data or packages, to fit the adapter to the base
            return None
    return layer.weight.detach() - weight
