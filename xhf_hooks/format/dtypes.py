"""Maps between dtypes of torch and of the safetensors format."""

from __future__ import annotations

import torch

from xhf_hooks.errors import TensorError
from xhf_hooks.format.safetensors import AS_IN_BASE, DTYPES, FLOAT_DTYPES

#: Safetensors dtype to torch dtype, as far as this version of torch has it.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, (_, name) in DTYPES.items() if hasattr(torch, name)
}
CODES_BY_NAME = {name: code for code, (_, name) in DTYPES.items()}
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors code of a torch dtype.

    Raises:
        TensorError: The format has no code for it.
    """
    if dtype not in _CODES:
        raise TensorError(f'safetensors cannot store {dtype}; it stores {sorted(map(str, _CODES))}')
    return _CODES[dtype]


def is_float(code: str) -> bool:
    """Whether the dtype is floating point; the option ``dtype`` never casts others."""
    return code in FLOAT_DTYPES


def cast_float(code: str, wanted: str | None) -> str:
    """The dtype in which a tensor is written.

    Args:
        code: Its dtype in training.
        wanted: The dtype of all floats. None, or AS_IN_BASE where the base has no such tensor: as in training.
    """
    return wanted if wanted not in (None, AS_IN_BASE) and is_float(code) else code


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a tensor in host memory: a view if possible, else a copy."""
    flat = tensor.detach().to('cpu').contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
