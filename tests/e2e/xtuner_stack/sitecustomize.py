"""Lets a CUDA build of torchvision, and xtuner, be imported beside a CPU build of torch.

Python runs this at start-up when its folder is on PYTHONPATH. It only hooks in: torch is imported
no earlier than it would be without it.
"""

import atexit
import importlib.abc
import sys

# Without its C extension torchvision's import dies where it registers fake kernels for these.
MISSING_OPS = (
    'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
    'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)
KEPT_ALIVE = []  # a torch.library.Library takes its definitions with it when it is collected


class BeforeImport(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees each import before it happens."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == 'torchvision':
            declare_torchvision_ops()
        elif fullname == 'xtuner':
            fill_in_for_cuda()
            fill_in_for_transformers()
            wait_for_gathers()
        return None


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
