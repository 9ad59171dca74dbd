"""DeepSpeed's view of the simulated device: what its class for CUDA says, where that differs from the CPU's."""

import functools
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.helpers.ranks.simulated_device import NAME


class SimulatedAccelerator(CPU_Accelerator):
    """An asynchronous device with memory of its own; DeepSpeed's operators are those for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, 'simccl'
        self._torch = torch.get_device_module(NAME)
        same = (
            *('empty_cache', 'memory_allocated', 'max_memory_allocated', 'memory_reserved', 'max_memory_reserved'),
            *('reset_peak_memory_stats', 'synchronize', 'stream', 'current_stream', 'default_stream'),
            *('set_device', 'current_device', 'device_count', 'device'),
        )
        for name in same:
            setattr(self, name, getattr(self._torch, name))
        self.memory_cached, self.max_memory_cached = self.memory_reserved, self.max_memory_reserved
        self.reset_max_memory_allocated = self.reset_max_memory_cached = self.reset_peak_memory_stats

    Stream = property(lambda self: torch.Stream)
    Event = property(lambda self: torch.Event)

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f'{NAME}:{device_index}'

    def current_device_name(self) -> str:
        return f'{NAME}:{self._torch.current_device()}'

    def total_memory(self, device_index: int | None = None) -> int:
        return 2**30

    def available_memory(self, device_index: int | None = None) -> int:
        return 2**30 - self._torch.memory_allocated(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {'allocated_bytes.all.current': self._torch.memory_allocated(device_index)}

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def _tensor_class(self, dtype: torch.dtype) -> Any:
        return functools.partial(torch.tensor, dtype=dtype, device=NAME)

    BFloat16Tensor = property(lambda self: self._tensor_class(torch.bfloat16))
    ByteTensor = property(lambda self: self._tensor_class(torch.uint8))
    FloatTensor = property(lambda self: self._tensor_class(torch.float32))
    HalfTensor = property(lambda self: self._tensor_class(torch.float16))
    IntTensor = property(lambda self: self._tensor_class(torch.int32))
    LongTensor = property(lambda self: self._tensor_class(torch.int64))
