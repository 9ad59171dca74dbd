"""Maps between dtypes of torch and of the safetensors format."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xhf_hooks.errors import TensorError
from xhf_hooks.format.safetensors import AS_IN_BASE as AS_IN_BASE
from xhf_hooks.format.safetensors import DTYPES, FLOAT_DTYPES

#: Safetensors dtype to torch dtype, as far as this version of torch has it.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, (_, name) in DTYPES.items() if name is not None and hasattr(torch, name)
}
#: Returns the row-major bytes of a tensor in host memory. The other argument: the offset in the file.
ToHost = Callable[[torch.Tensor, int], memoryview]
CODES_BY_NAME = {name: code for code, (_, name) in DTYPES.items() if name is not None}
#: Names of typed storages in files of ``torch.save``.
CODES_BY_STORAGE = {
    'BoolStorage': 'BOOL',
    'ByteStorage': 'U8',
    'UntypedStorage': 'U8',
    'CharStorage': 'I8',
    'ShortStorage': 'I16',
    'HalfStorage': 'F16',
    'BFloat16Storage': 'BF16',
    'IntStorage': 'I32',
    'FloatStorage': 'F32',
    'ComplexFloatStorage': 'C64',
    'DoubleStorage': 'F64',
    'LongStorage': 'I64',
}
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


def cast(tensor: torch.Tensor, code: str) -> tuple[torch.Tensor, int]:
    """Convert to another dtype.

    Returns:
        The tensor, and the number of finite elements that became infinite.
    """
    dtype = TORCH_DTYPES[code]
    if tensor.dtype == dtype:
        return tensor, 0
    converted = tensor.to(dtype)
    return converted, count_overflows(tensor, converted)


def count_overflows(source: torch.Tensor, target: torch.Tensor) -> int:
    """Finite elements of ``source`` that are infinite in ``target``."""
    if not (source.numel() and source.is_floating_point() and target.is_floating_point()):
        return 0
    largest = torch.finfo(target.dtype).max
    if largest >= torch.finfo(source.dtype).max:
        return 0
    low, high = torch.aminmax(source)
    if -largest <= low and high <= largest:  # several times faster than counting infinities
        return 0
    return int(target.isinf().sum()) - int(source.isinf().sum())


def host_bytes(tensor: torch.Tensor, offset: int = 0) -> memoryview:
    """The row-major bytes of a tensor in host memory: a view if possible, else a copy.

    Args:
        offset: Ignored; see :data:`ToHost`.
    """
    flat = tensor.detach().to('cpu').contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
