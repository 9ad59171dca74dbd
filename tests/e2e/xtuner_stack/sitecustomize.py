"""Lets xtuner 0.1 and 0.2, and what they use, run on a machine without a GPU.

Python runs this at start-up when its folder is on PYTHONPATH. It only hooks in: torch is imported
no earlier than it would be without it.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path

# Without its C extension torchvision's import dies where it registers fake kernels for these.
MISSING_OPS = (
    'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
    'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)
KEPT_ALIVE = []  # a torch.library.Library takes its definitions with it when it is collected


class BeforeImport(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees each import before it happens; and has what AFTER_IMPORT names filled in after it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == 'torchvision':
            declare_torchvision_ops()
        elif fullname == 'deepspeed':
            fill_in_for_oneccl()
        elif fullname == 'xtuner':
            fill_in_for_cuda()
            fill_in_for_transformers()
            wait_for_gathers()
        elif fullname in AFTER_IMPORT:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is not None:
                load = spec.loader.exec_module
                spec.loader.exec_module = functools.partial(load_and_fill_in, load, AFTER_IMPORT[fullname])
            return spec
        return None


def load_and_fill_in(load, fill_in, module):
    load(module)
    fill_in(module)


def has_gpu():
    return os.environ.get('CUDA_VISIBLE_DEVICES') != ''


def fill_in_for_oneccl():
    """DeepSpeed 0.13 imports Intel's packages for a CPU, and needs neither when gloo is used."""
    spec = importlib.machinery.PathFinder.find_spec('deepspeed')
    accelerator = Path(spec.submodule_search_locations[0], 'accelerator', 'cpu_accelerator.py')
    if 'import oneccl_bindings_for_pytorch' not in accelerator.read_text():
        return
    for name in ('intel_extension_for_pytorch', 'oneccl_bindings_for_pytorch'):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, module)


def use_gloo(cpu_accelerator):
    """In place of oneCCL, for which DeepSpeed 0.13 would compile an operator."""
    accelerator = cpu_accelerator.CPU_Accelerator
    if hasattr(cpu_accelerator, 'oneccl_bindings_for_pytorch'):
        create = accelerator.create_op_builder
        accelerator.create_op_builder = lambda self, name: None if name == 'CCLCommBuilder' else create(self, name)


def count_one_core(numa):
    """DeepSpeed before 0.16 has a program count the cores, which few machines have."""
    numa.get_numa_cores = lambda: [[0]]


def fill_in_for_triton(driver):
    """DeepSpeed 0.16 decorates kernels as it is imported, for which triton 3.2 asks a GPU's driver."""
    if not has_gpu() and hasattr(driver.driver, 'set_active'):
        driver.driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: None))


class Done:
    """In place of a work handle: what it was for is done."""

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


def emulate_in_gloo(c10d):
    """Gloo before torch 2.2 has no bfloat16, and neither gathers into one tensor nor scatters from one."""
    import torch

    if tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 2):
        return
    all_reduce, all_gather = c10d.all_reduce, c10d.all_gather

    def copy_of(tensor):
        return tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach().clone()

    def by_copy(original):
        def run(tensor, *args, async_op=False, **kwargs):
            if tensor.dtype != torch.bfloat16:
                return original(tensor, *args, async_op=async_op, **kwargs)
            copy = copy_of(tensor)
            original(copy, *args, **kwargs)
            tensor.detach().copy_(copy)
            return Done() if async_op else None

        return run

    # Their arguments are named as torch names them, for DeepSpeed passes some by name
    def gather(tensor_list, tensor, group=None, async_op=False):
        copies = [copy_of(one) for one in tensor_list]
        all_gather(copies, copy_of(tensor), group=group)
        for one, copy in zip(tensor_list, copies, strict=True):
            one.detach().copy_(copy)
        return Done() if async_op else None

    def gather_into(output_tensor, input_tensor, group=None, async_op=False):
        gather(list(output_tensor.view(-1).chunk(c10d.get_world_size(group))), input_tensor.reshape(-1), group)
        return Done() if async_op else None

    def scatter_from(output, input, op=c10d.ReduceOp.SUM, group=None, async_op=False):
        copy = copy_of(input)
        all_reduce(copy, op=op, group=group)
        mine = copy.view(-1).chunk(c10d.get_world_size(group))[c10d.get_rank(group)]
        output.detach().copy_(mine.view(output.shape))
        return Done() if async_op else None

    for name in ('all_reduce', 'broadcast', 'reduce'):
        setattr(c10d, name, by_copy(getattr(c10d, name)))
    c10d.all_gather, c10d.all_gather_into_tensor, c10d.reduce_scatter_tensor = gather, gather_into, scatter_from


def stay_on_cpu(data_preprocessor):
    """XTuner moves what prepares its data to the GPU; since 0.2 it asks whether there is one."""
    if not has_gpu():
        data_preprocessor.BaseDataPreprocessor.cuda = lambda self, *args, **kwargs: self


def find_bitsandbytes(import_utils):
    """transformers before 4.43 does not see it without a GPU, and leaves out what it imports of torch with it."""
    asked = import_utils.is_bitsandbytes_available
    if not has_gpu() and 'cuda' in getattr(asked, '__wrapped__', asked).__code__.co_names:
        import_utils.is_bitsandbytes_available = lambda *args, **kwargs: import_utils._bitsandbytes_available


def quantize_on_cpu(quantizer):
    """transformers before 4.43 wants a GPU for what bitsandbytes 0.50 quantizes on a CPU, too."""
    kind = quantizer.Bnb4BitHfQuantizer
    if not has_gpu() and 'validate_bnb_backend_availability' not in kind.validate_environment.__code__.co_names:
        kind.validate_environment = lambda self, *args, **kwargs: None
        kind.update_device_map = lambda self, device_map: device_map or {'': 'cpu'}


AFTER_IMPORT = {
    'transformers.quantizers.quantizer_bnb_4bit': quantize_on_cpu,
    'mmengine.model.base_model.data_preprocessor': stay_on_cpu,
    'deepspeed.accelerator.cpu_accelerator': use_gloo,
    'deepspeed.utils.numa': count_one_core,
    'torch.distributed.distributed_c10d': emulate_in_gloo,
    'transformers.utils.import_utils': find_bitsandbytes,
    'triton.runtime.driver': fill_in_for_triton,
}


def declare_torchvision_ops():
    import torch

    if torch.version.cuda is None and not KEPT_ALIVE:
        library = torch.library.Library('torchvision', 'DEF')
        for schema in MISSING_OPS:
            library.define(schema)
        KEPT_ALIVE.append(library)


def fill_in_for_cuda():
    import torch

    if not torch.cuda.is_available():
        torch.cpu.is_bf16_supported = lambda: True
        torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
        torch.cuda.set_device = lambda device: None
        # transformers 4.48 has the CPU quantize with IPEX only; bitsandbytes 0.50 does without it
        from transformers.integrations import bitsandbytes

        bitsandbytes.is_ipex_available = lambda: True


def fill_in_for_transformers():
    """XTuner's own mixtures of experts ask for a name that is gone from the transformers 4.48 that it pins."""
    from transformers import pytorch_utils

    pytorch_utils.is_torch_greater_or_equal_than_1_13 = True


def wait_for_gathers():
    """DeepSpeed starts several gathers and waits for the last of them only, which gloo does not keep in order.

    While transformers loads a model at ZeRO-3, what comes late overwrites weights that were just loaded.
    """
    import torch.distributed

    original = torch.distributed.all_gather_into_tensor
    if hasattr(original, 'waits'):
        return

    def gather(*args, **kwargs):
        work = original(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    gather.waits = True
    torch.distributed.all_gather_into_tensor = gather


sys.meta_path.insert(0, BeforeImport())


@atexit.register
def leave_process_group():
    """Nobody in xtuner does, and gloo's threads then abort about one process in thirty as it ends."""
    distributed = sys.modules.get('torch.distributed')
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
