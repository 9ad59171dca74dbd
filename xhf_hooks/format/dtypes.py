"""Between torch's dtypes and the codes of the safetensors format."""

from __future__ import annotations

import torch

from xhf_hooks.errors import TensorError
from xhf_hooks.format.safetensors import FLOAT_DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {
    'BOOL': torch.bool,
    'U8': torch.uint8,
    'I8': torch.int8,
    'F8_E5M2': torch.float8_e5m2,
    'F8_E4M3': torch.float8_e4m3fn,
    'I16': torch.int16,
    'U16': torch.uint16,
    'F16': torch.float16,
    'BF16': torch.bfloat16,
    'I32': torch.int32,
    'U32': torch.uint32,
    'F32': torch.float32,
    'C64': torch.complex64,
    'F64': torch.float64,
    'I64': torch.int64,
    'U64': torch.uint64,
}
if hasattr(torch, 'float8_e8m0fnu'):  # torch 2.7
    TORCH_DTYPES['F8_E8M0'] = torch.float8_e8m0fnu
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
    """Whether a ``dtype`` option applies to this dtype (integers and booleans are never cast)."""
    return code in FLOAT_DTYPES


def cast(tensor: torch.Tensor, code: str) -> tuple[torch.Tensor, int]:
    """Convert to another dtype, rounding once.

    Returns:
        The tensor, and how many finite elements became infinite.
    """
    dtype = TORCH_DTYPES[code]
    if tensor.dtype == dtype:
        return tensor, 0
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return converted, 0
    return converted, int(converted.isinf().sum()) - int(tensor.isinf().sum())


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The row-major bytes of a tensor in host memory; a view when it is there already, else a copy."""
    flat = tensor.detach().to('cpu').contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
