"""The dtype of each output tensor, where the option ``dtype`` is set.

``'bfloat16'`` and ``'float16'`` give what ``from_pretrained`` with that dtype and ``save_pretrained`` give: some
classes keep some tensors in fp32, such as DeepSeek-V3's ``e_score_correction_bias`` and T5's ``wo``. ``'base'`` gives
each tensor the dtype that it has in the base model's own files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters.base_files import base_folder, base_json
from xhf_hooks.exporters.on_meta import without_zero_init
from xhf_hooks.format.dtypes import CODES_BY_NAME, TORCH_DTYPES, is_float
from xhf_hooks.format.index import weight_files
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.planning.types import ExportEntry, TensorSpec
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What the option ``dtype`` can name; 8-bit and quantized weights belong to scales that training does not have.
_WRITABLE = ('F32', 'BF16', 'F16')


@dataclass(frozen=True)
class BaseDtypes:
    """The dtypes in the files of a base model.

    Attributes:
        of_tensor: By name in the files.
        most: The dtype of most floating-point elements; that of tensors that the base does not have.
        of_model: The dtype in its config.json, else ``most``.
    """

    base_dir: str
    of_tensor: Mapping[str, str]
    most: str
    of_model: str

    def applied_to(self, entries: Sequence[ExportEntry], prefix: str) -> list[ExportEntry]:
        """The entries with the base's dtypes.

        Args:
            prefix: ``base_model_prefix`` of the class; names with and without it are the same for ``from_pretrained``.

        Raises:
            OptionError: The base has other tensors, or they are quantized.
        """
        found: dict[str, str] = {}
        for entry in entries:
            name = entry.hf_name
            names = (name, f'{prefix}.{name}', name.removeprefix(f'{prefix}.'))
            codes = [self.of_tensor[name] for name in names if name in self.of_tensor]
            if is_float(entry.dtype) and codes:
                found[name] = codes[0]
                if codes[0] not in _WRITABLE:
                    raise _cannot_tell(f'{name} is quantized ({codes[0]}) in {self.base_dir}')
        if not found:
            raise _cannot_tell(f'{self.base_dir} has no tensor of the trained model by name')
        return [replace(e, dtype=found.get(e.hf_name, self.most)) if is_float(e.dtype) else e for e in entries]


def base_dtypes(base_dir: str) -> BaseDtypes:
    """Read the headers of the base model's files, from its folder or the local hub cache. Reads no tensors.

    Raises:
        OptionError: It has no safetensors files.
        DamagedError: One of its files cannot be read.
    """
    of_tensor: dict[str, str] = {}
    elements: Counter[str] = Counter()
    for path in _files(base_dir):
        for entry in read_header(path).entries:
            of_tensor[entry.name] = entry.dtype
            if entry.dtype in _WRITABLE:
                elements[entry.dtype] += math.prod(entry.shape)
    most = max(elements, key=elements.__getitem__, default='F32')
    content = base_json(base_dir, 'config.json')
    named = CODES_BY_NAME.get(str(content.get('dtype') or content.get('torch_dtype')))
    return BaseDtypes(base_dir, of_tensor, most, named if named in _WRITABLE else most)


def _files(base_dir: str) -> list[Path]:
    folder = base_folder(base_dir)
    files = [] if folder is None else weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        name = missing[0] if missing else 'model.safetensors'
        raise _cannot_tell(f'the base model {base_dir!r} has no {name} on this machine')
    return files


def _cannot_tell(reason: str) -> OptionError:
    return OptionError('dtype', f'another one, since {reason}', 'base')


def cast_to(
    code: str, entries: Sequence[ExportEntry], own: Mapping[str, TensorSpec], reference: PreTrainedModel
) -> list[ExportEntry]:
    """The entries with a dtype, except those that ``from_pretrained`` with this dtype keeps in fp32.

    Args:
        own: The tensors that they are made of, by name in the model.
        reference: The model on the meta device.
    """
    floats = [name for name, spec in own.items() if is_float(spec.dtype)]
    with without_zero_init():
        kept = {own[name].name for name in _kept_in_fp32(reference, floats, code)}
    result = []
    for entry in entries:
        if is_float(entry.dtype):
            entry = replace(entry, dtype=code if kept.isdisjoint(entry.reads) else 'F32')
        result.append(entry)
    return result


def _kept_in_fp32(reference: PreTrainedModel, names: Collection[str], code: str) -> set[str]:
    """Asks the installed transformers, whose rule differs between versions, and between parameters and buffers.

    So a model with these names, and one element in each tensor, is loaded.
    """
    listed = {
        name: getattr(reference, name, None) for name in ('_keep_in_fp32_modules', '_keep_in_fp32_modules_strict')
    }
    if code == 'F32' or not any(listed.values()):
        return set()
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

    numbers = {name: torch.zeros(1, device='cpu') for name in names}
    with quiet():
        config = PretrainedConfig(tie_word_embeddings=False)
        loaded = Stub.from_pretrained(None, config=config, state_dict=numbers, torch_dtype=TORCH_DTYPES[code])
    return {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}


def _add(model: nn.Module, name: str, *, is_buffer: bool) -> None:
    *path, last = name.split('.')
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]
    if is_buffer:
        model.register_buffer(last, torch.zeros(1, device='cpu'))
    else:
        model.register_parameter(last, nn.Parameter(torch.zeros(1, device='cpu')))
