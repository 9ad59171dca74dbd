"""What a class keeps in fp32 where the option ``dtype`` names 16 bits.

``from_pretrained`` with that dtype, and then ``save_pretrained``, would write DeepSeek-V3's ``e_score_correction_bias``
and T5's ``wo`` in fp32, for example.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.model import quiet
from xhf_hooks.system import memory_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def kept_in_fp32(reference: PreTrainedModel, names: Collection[str], code: str) -> set[str]:
    """Those of the tensors that ``from_pretrained`` with this dtype loads in fp32. Asks the installed transformers.

    The rule differs between versions, and between parameters and buffers. So a model with these names, and one element
    in each tensor, is loaded.

    Args:
        reference: The model that ``from_pretrained`` will build.
        names: Floating-point tensors of it.
        code: Safetensors dtype.
    """
    listed = {
        name: getattr(reference, name, None) for name in ('_keep_in_fp32_modules', '_keep_in_fp32_modules_strict')
    }
    if code == 'F32' or not any(listed.values()):
        return set()
    from safetensors.torch import save_file
    from transformers import PretrainedConfig, PreTrainedModel

    buffers = {name for name, _ in reference.named_buffers(remove_duplicate=False)}

    class Stub(PreTrainedModel):
        config_class = PretrainedConfig
        _keep_in_fp32_modules = type(reference)._keep_in_fp32_modules
        _keep_in_fp32_modules_strict = getattr(type(reference), '_keep_in_fp32_modules_strict', None)

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            for name in names:
                _add(self, name, is_buffer=name in buffers)
            self.post_init()
            for name, value in listed.items():  # an instance adds those of its parts
                setattr(self, name, value)

        def _init_weights(self, module: nn.Module) -> None:
            """Nothing to initialize."""

    with tempfile.TemporaryDirectory(prefix='xhf_hooks_', dir=memory_place()) as folder, quiet():
        PretrainedConfig(tie_word_embeddings=False).save_pretrained(folder)
        tensors = {name: torch.zeros(1) for name in names}
        save_file(tensors, Path(folder) / 'model.safetensors', metadata={'format': 'pt'})
        loaded = Stub.from_pretrained(folder, torch_dtype=TORCH_DTYPES[code])
    return {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}


def _add(model: nn.Module, name: str, *, is_buffer: bool) -> None:
    *path, last = name.split('.')
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]
    if is_buffer:
        model.register_buffer(last, torch.zeros(1))
    else:
        model.register_parameter(last, nn.Parameter(torch.zeros(1)))
