"""A device without a device: ``sim``, a backend of torch on which the faults of device code show, every time.

On a GPU a missing synchronisation gives wrong bytes now and then; here it does so always:

- memory of the device cannot be read by the host: ``.numpy()`` on a tensor crashes at once;
- a ``non_blocking`` copy to pinned memory leaves a pattern there, and arrives when the device is synchronised;
- a collective's result arrives when it is waited for;
- the current device belongs to the thread, and starts with 0.

It also counts (:func:`counts`), measures memory, and can run out of it. Kernels are those of the CPU, and all streams
are one, so an order that is missing between two streams does not show.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration, cpp_extension

NAME = 'sim'


@functools.cache
def extension() -> ModuleType:
    """The compiled backend: a minute's work for the first process that asks, of any environment with this torch."""
    source = Path(__file__).with_name('device.cpp')
    python = '{}.{}'.format(*sys.version_info)
    folder = Path(__file__).parents[4] / '.torch_extensions' / f'simulated_device-{torch.__version__}-{python}'
    library = folder / 'simulated_device.so'
    compiled = library.exists() and library.stat().st_mtime > source.stat().st_mtime
    # The linker writes in place while torch holds `lock`. Looked for after the library: a lock that is gone by now was
    # released after the last byte. Not left to torch, since ninja would take another environment's library for old.
    if compiled and not (folder / 'lock').exists():
        loader = ExtensionFileLoader('simulated_device', str(library))
        module = module_from_spec(spec_from_loader('simulated_device', loader))
        loader.exec_module(module)
        return module
    folder.mkdir(parents=True, exist_ok=True)
    flags = ['-O1', '-g0']
    return cpp_extension.load('simulated_device', [str(source)], flags, build_directory=str(folder))


def use(index: int) -> None:
    """Make ``sim`` known to torch, its collectives and DeepSpeed; this process's device is ``index``."""
    from deepspeed.accelerator import set_accelerator

    from tests.helpers.ranks.simulated_device.accelerator import SimulatedAccelerator

    backend_registration.rename_privateuse1_backend(NAME)
    native = extension()
    torch._register_device_module(NAME, _device_module(native))
    backend_registration.generate_methods_for_privateuse1_backend()

    def gloo_beneath(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return native.Backend(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend('simccl', gloo_beneath, devices=[NAME])
    set_accelerator(SimulatedAccelerator())
    native.set_device(index)


def _device_module(native: ModuleType) -> ModuleType:
    """``torch.sim``."""
    module = ModuleType(f'torch.{NAME}')

    def index_of(device: Any = None) -> int:
        if device is None or isinstance(device, int):
            return native.current_device() if device is None else device
        index = torch.device(device).index
        return native.current_device() if index is None else index

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        before = native.current_device()
        native.set_device(index_of(which))
        try:
            yield
        finally:
            native.set_device(before)

    def synchronize(_: Any = None) -> None:
        native.synchronize()

    members: dict[str, Any] = dict(
        Stream=torch.Stream,
        Event=torch.Event,
        current_device=native.current_device,
        current_stream=lambda device=None: torch.Stream(),
        default_stream=lambda device=None: torch.Stream(),
        device=device,
        device_count=native.device_count,
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda device=None: torch.get_rng_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        max_memory_allocated=lambda device=None: native.memory(index_of(device))[1],
        max_memory_reserved=lambda device=None: native.memory(index_of(device))[1],
        memory_allocated=lambda device=None: native.memory(index_of(device))[0],
        memory_reserved=lambda device=None: native.memory(index_of(device))[0],
        reset_peak_memory_stats=lambda device=None: native.reset_peak(index_of(device)),
        set_device=lambda device: native.set_device(index_of(device)),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        set_stream=lambda stream: None,
        stream=lambda stream: nullcontext(),
        synchronize=synchronize,
        _is_in_bad_fork=lambda: False,
    )
    vars(module).update(members)
    sys.modules[module.__name__] = module
    return module
