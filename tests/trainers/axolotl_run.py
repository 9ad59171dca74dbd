"""``axolotl train`` on a CPU: ``axolotl_run.py CONFIG.yaml``, on every rank.

The trainer, its configuration, its plugins and its saves are Axolotl's own. Stand-ins replace packages of up to 700 MB
that Axolotl imports in every run, and that these runs don't use: triton (kernels for GPUs), numba (compiles the packing
of samples), wandb.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module whose functions do nothing but decorate."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = self
        parent, _, child = name.rpartition('.')
        if parent:
            setattr(sys.modules[parent], child, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return lambda function=None, **_: function


def train(config: str) -> None:
    """``axolotl train CONFIG``."""
    # Before the stand-ins, which they would take for the packages
    import deepspeed  # noqa: F401
    import torch
    import transformers.modeling_utils  # noqa: F401
    from accelerate import DistributedType, ParallelismConfig, PartialState

    for name in ('triton', 'triton.language', 'numba', 'wandb'):
        StandIn(name)
    # Accelerate has ranks on a CPU only where the caller asks for it, and Axolotl doesn't; FSDP only on GPUs
    PartialState._prepare_backend = lambda *_, **__: ('gloo', DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, 'device', torch.device('cpu'))
    build_mesh = ParallelismConfig.build_device_mesh  # Axolotl asks for cuda
    ParallelismConfig.build_device_mesh = lambda self, _: build_mesh(self, 'cpu')
    torch.cuda.can_device_access_peer = lambda *_: False
    from axolotl.cli.train import do_cli

    do_cli(config)


if __name__ == '__main__':  # datasets starts processes that import this file
    train(sys.argv[1])
