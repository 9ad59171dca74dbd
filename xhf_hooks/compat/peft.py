"""LoRA layers of peft 0.7 to 0.21."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


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
