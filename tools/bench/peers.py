"""The other ways to save a ZeRO-3 model as a Hugging Face folder, and what the disk allows. Runs on: all ranks."""

from __future__ import annotations

import mmap
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from bench.ways import ACCELERATE, FLOOR_ALL, FSYNC, XTUNER
from tests.helpers.runs.zero_config import zero_config

#: Files per rank that DCP consolidates into: two, so that no thread on any rank is idle.
_DCP_FILES_PER_RANK = 2
#: As in torchtitan (components/checkpoint.py), where DCP's authors set it (torchtitan#1625).
_DCP_THREADS = 5
_BLOCK_NBYTES = 16 * 2**20
_DIRECT_ALIGNMENT = 4096


def xtuner_way(engine: nn.Module, folder: Path) -> None:
    """Save like xtuner 0.2.0's HFCheckpointHook.after_run, without the tokenizer."""
    state_dict = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state_dict)
    dist.barrier()


@cache
def _accelerator() -> Any:
    os.environ['ACCELERATE_USE_DEEPSPEED'] = 'true'
    from accelerate import Accelerator, DeepSpeedPlugin

    config = zero_config(3, stage3_gather_16bit_weights_on_model_save=True)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    accelerator.deepspeed_config = config  # like accelerator.prepare, which would build another engine
    return accelerator


def accelerate_way(engine: nn.Module, folder: Path) -> None:
    """``accelerator.get_state_dict`` and ``save_pretrained``, as in Accelerate's documentation."""
    state_dict, save = _accelerator().get_state_dict(engine), _accelerator().save
    is_main_process = dist.get_rank() == 0
    engine.module.save_pretrained(folder, is_main_process=is_main_process, save_function=save, state_dict=state_dict)
    dist.barrier()


class DcpPeer:
    """PyTorch's distributed checkpoint of a model of the same names and shapes, sharded as FSDP2 shards it.

    A ZeRO-3 partition may end within a row, but a DTensor is a block of rows, so DCP cannot take partitions. Instead
    each rank has its rows of every tensor, with as many bytes. Every rank writes a file of its shards; from these the
    Hugging Face files are made, all of about the same size.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from torch.distributed.tensor import Shard, zeros

        how = dict(dtype=torch.bfloat16, device_mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
        self._state: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, int] = {}
        n_files, before = _DCP_FILES_PER_RANK * dist.get_world_size(), 0
        total = sum(parameter.ds_numel for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            self._state[name] = zeros(*parameter.ds_shape, placements=[Shard(0)], **how)
            self._file_of[name] = 1 + before * n_files // total
            before += parameter.ds_numel

    def save(self, folder: Path) -> None:
        """As DCP's authors recommend: each rank makes some of the files. Runs on: all ranks."""
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank

        sharded = folder / 'sharded'
        sharded.mkdir(parents=True, exist_ok=True)
        writer = HuggingFaceStorageWriter(str(sharded), self._file_of, save_distributed=True)
        save(self._state, storage_writer=writer)
        consolidate_safetensors_files_on_every_rank(str(sharded), str(folder), self._file_of, _DCP_THREADS)


class MetaPeer(DcpPeer):
    """torch_checkpointing 0.1.1 of Meta: a file of shards from each rank, and Hugging Face files made from these.

    On a CPU it needs two changes: its ranks exchange what they hold through tensors on 'cuda' (``metadata_manager.py``,
    ``_all_gather_pickled_data``), which a gather of objects replaces; and direct writes, which it makes of any size,
    are off. Its asynchronous saver would call the same consolidation in a process of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.metadata_manager import DefaultMetadataManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(model)
        DefaultMetadataManager._all_gather_pickled_data = _gather_by_rank
        layout = LayoutInfo('model_{rank}.safetensors', SafetensorsSerialization())
        self._storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                items={'model': ItemSpec(layout=layout, resharder=DefaultResharder())},
                save=SyncCheckpointSaverConfig(),
                storage_config=self._storage,
            )
        )

    def save(self, folder: Path) -> None:
        """Runs on: all ranks."""
        from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint

        sharded = folder / 'sharded'
        if dist.get_rank() == 0:
            shutil.rmtree(sharded, ignore_errors=True)  # of the save before, which it refuses to replace
        dist.barrier()
        self._manager.save(str(sharded), {'model': self._state})
        dist.barrier()  # its synchronous saver has none
        consolidate_hf_safetensors_checkpoint(
            str(sharded),
            output_dir=str(folder),
            fqn_to_index_mapping=self._file_of,
            storage_config=self._storage,
        )


def _gather_by_rank(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    found = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


#: Peers by name; called with the engine and the folder on all ranks.
PEERS = {XTUNER: xtuner_way, ACCELERATE: accelerate_way}


class Floors:
    """Writes as many bytes as a save, and does nothing else.

    Bytes come from memory as large as the model, since a save does not find its bytes in the CPU cache, either.
    """

    def __init__(self, nbytes: int) -> None:
        self._rank = dist.get_rank()
        self._share = nbytes // dist.get_world_size() + 1
        # Anonymous mapped memory is page-aligned, as O_DIRECT requires
        self._data = memoryview(mmap.mmap(-1, nbytes if self._rank == 0 else self._share))
        torch.frombuffer(self._data, dtype=torch.uint8).fill_(1)

    def write(self, floor: str, folder: Path) -> None:
        """Rank 0 writes it all, or each process its part into a separate file."""
        by_all = floor.startswith(FLOOR_ALL)
        folder.mkdir(parents=True, exist_ok=True)
        if by_all or self._rank == 0:
            data = self._data[: self._share] if by_all else self._data
            _write(folder / f'bytes{self._rank}', data, floor.endswith(FSYNC))


def _write(path: Path, data: memoryview, fsync: bool) -> None:
    """Make a file. With fsync, O_DIRECT writes all but the end; of several methods this was the fastest."""
    aligned = len(data) - len(data) % _DIRECT_ALIGNMENT if fsync else 0
    path.touch()
    for start, end, flags in ((0, aligned, os.O_DIRECT), (aligned, len(data), 0)):
        fd = os.open(path, os.O_WRONLY | flags)
        while start < end:
            start += os.pwrite(fd, data[start : min(end, start + _BLOCK_NBYTES)], start)
        if fsync:
            os.fsync(fd)
        os.close(fd)
