"""The other ways to save a ZeRO-3 model as a Hugging Face folder, and what a disk allows, for ``tools/bench.py``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:  # its import prints a warning to standard output, and that is for bench.py's table alone
    import deepspeed

FLOOR = 'floor: one process writes as many bytes'
FLOOR_FSYNC = 'floor: the same, with fsync'
FLOOR_ALL = 'floor: all processes write as many bytes together'
FLOOR_GATHER = 'floor: all_gather of as many bytes, nothing written'
XTUNER = "XTuner's hook: consolidate, save_pretrained"
DEEPSPEED = 'DeepSpeed: consolidate, torch.save'
ACCELERATE = 'Accelerate: get_state_dict, save_pretrained'
DCP = 'PyTorch DCP: HuggingFaceStorageWriter, consolidated'
_BLOCK_NBYTES = 16 * 2**20


class Floor:
    """Writes as many bytes as a save, and does nothing else. Runs on: all ranks, every method.

    Out of memory as large as the model: a save does not find its bytes in the processor's cache, either.
    """

    def __init__(self, nbytes: int) -> None:
        self._share = nbytes // dist.get_world_size()
        self._data = memoryview(torch.ones(nbytes if dist.get_rank() == 0 else self._share, dtype=torch.uint8).numpy())

    def on_one_rank(self, folder: Path, *, fsync: bool = False) -> None:
        """One process writes all of them."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            _write(folder / 'bytes', self._data, fsync)
        dist.barrier()

    def on_all_ranks(self, folder: Path) -> None:
        """Each process writes its part into a file of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f'bytes{dist.get_rank()}', self._data[: self._share])
        dist.barrier()

    def all_gathered(self, bucket_nbytes: int) -> None:
        """What 'stream', 'parallel' and the peers wait for: every process gets all, a bucket at a time."""
        world_size = dist.get_world_size()
        bucket = torch.empty(bucket_nbytes // world_size * world_size, dtype=torch.uint8)
        share = torch.frombuffer(self._data, dtype=torch.uint8)[: self._share]
        for part in share.split(len(bucket) // world_size):
            dist.all_gather_into_tensor(bucket[: len(part) * world_size], part)


def _write(path: Path, data: memoryview, fsync: bool = False) -> None:
    with path.open('wb', buffering=0) as file:
        for start in range(0, len(data), _BLOCK_NBYTES):
            file.write(data[start : start + _BLOCK_NBYTES])
        if fsync:
            os.fsync(file.fileno())


@contextmanager
def limited_writes(nbytes_per_sec: float) -> Iterator[None]:
    """This process's writes of weights wait, as those of a client of a share that gives it no more."""
    pwrite, lock, due = os.pwrite, threading.Lock(), 0.0

    def wait_and_write(fd: int, data: memoryview, offset: int) -> int:
        nonlocal due
        nbytes = pwrite(fd, data, offset)
        with lock:
            due = max(due, time.perf_counter()) + nbytes / nbytes_per_sec
            wait = due - time.perf_counter()
        time.sleep(max(0.0, wait))
        return nbytes

    os.pwrite = wait_and_write
    try:
        yield
    finally:
        os.pwrite = pwrite


def xtuner_way(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """What xtuner 0.2.0's HFCheckpointHook.after_run does, without the tokenizer."""
    state_dict = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state_dict)
    dist.barrier()


def deepspeed_way(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """What ``engine.save_16bit_model`` does; called by its parts, because it wants an optimizer."""
    state_dict = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        torch.save(state_dict, folder / 'pytorch_model.bin')
    dist.barrier()


class AcceleratePeer:
    """``accelerator.get_state_dict`` and ``save_pretrained``, as Accelerate's documentation has it."""

    def __init__(self) -> None:
        self._accelerator = None

    def __call__(self, engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
        if self._accelerator is None:
            self._accelerator = self._make(engine)
        state_dict = self._accelerator.get_state_dict(engine)
        engine.module.save_pretrained(
            folder, is_main_process=dist.get_rank() == 0, save_function=self._accelerator.save, state_dict=state_dict
        )
        dist.barrier()

    def _make(self, engine: deepspeed.DeepSpeedEngine) -> object:
        os.environ['ACCELERATE_USE_DEEPSPEED'] = 'true'
        from accelerate import Accelerator, DeepSpeedPlugin

        config = {
            'train_micro_batch_size_per_gpu': 1,
            'bf16': {'enabled': True},
            'zero_optimization': {'stage': 3, 'stage3_gather_16bit_weights_on_model_save': True},
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        accelerator.deepspeed_config = config  # as accelerator.prepare does, which would build another engine
        return accelerator


class DcpPeer:
    """PyTorch's distributed checkpoint of a model of the same names and shapes, sharded as FSDP2 shards it.

    It cannot read ZeRO-3's partitions; each rank is given its rows of every tensor.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh('cpu', (dist.get_world_size(),))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._state: dict[str, torch.Tensor] = {}
        for name, parameter in _parameters(model):
            shape = parameter.ds_shape
            each = -(-shape[0] // world_size)
            rows = max(0, min(each, shape[0] - rank * each))
            local = torch.zeros(rows, *shape[1:], dtype=torch.bfloat16)
            self._state[name] = DTensor.from_local(
                local, mesh, [Shard(0)], shape=shape, stride=torch.empty(shape, device='meta').stride()
            )

    def save(self, folder: Path) -> None:
        """Runs on: all ranks."""
        import torch.distributed.checkpoint as dcp

        folder.mkdir(parents=True, exist_ok=True)
        writer = dcp.HuggingFaceStorageWriter(
            path=str(folder),
            fqn_to_index_mapping=dict.fromkeys(self._state, 1),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(self._state, storage_writer=writer)


def _parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


PEERS = {XTUNER: xtuner_way, DEEPSPEED: deepspeed_way, ACCELERATE: AcceleratePeer()}
