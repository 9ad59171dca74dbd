"""A checkpoint on disk as a source of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from xhf_hooks.records import TensorSpec
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.checkpoint.records import FoundCheckpoint, Piece


class CheckpointSource(Source):
    """Reads slices of the files through mmap and casts them on the way; holds no tensor.

    Runs on: one process, or several that each got it by fork or pickle, or several threads.

    Attributes:
        found: The checkpoint that is read.
        facts: For the manifest and the log: ``engine`` ('deepspeed' or 'torch'), ``zero_stage``, ``world_size``,
            ``deepspeed`` (version), ``layout``, ``checkpoint`` (path as text).
        iteration: Training iterations done, None if the files don't say.
        epoch: Epochs done, None if the files don't say.
        config_text: ``meta.cfg`` as MMEngine dumped it (text of a Python config file), else None.
        config_name: The config's file name, where the files tell it (``meta.experiment_name``...), else None.
        ds_config: DeepSpeed's config of the run, plain values only; {} if there is none.
        warnings: One-line notes for the user (tensors without data, optimizer groups not understood ...).
        memory_factor: 1: a gathered tensor takes its bytes.

    Raises:
        CheckpointError: See :mod:`xhf_hooks.errors`; one line that names the file and what to do.
    """

    def __init__(self, found: FoundCheckpoint) -> None:
        raise NotImplementedError

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Never: it isn't made from a live model, nor registered."""
        return False

    def specs(self) -> list[TensorSpec]:
        """Every tensor with data in the checkpoint, in state-dict order, under its first name.

        ``dtype`` is the training dtype. ``has_master``: an fp32 copy is in the files, and the training dtype is
        16-bit. ``aliases``: tied names (``shared_params``, or names of one storage).
        """
        raise NotImplementedError

    def pieces(self, name: str, *, masters: bool) -> tuple[Piece, ...]:
        """Where the values lie; one after the other they are the row-major tensor.

        Args:
            masters: The fp32 master if there is one. Else what gives the training dtype: 16-bit weights where
                the files have them (stages 0 to 2), fp32 slices whose cast they are otherwise (stage 3).
        """
        raise NotImplementedError

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, masters: bool) -> int:
        """Cast ``len(out) / width`` elements from element ``start`` on into ``out``. Memory: a few MB.

        With ``masters=False`` and another ``dtype`` than the training dtype, values are first rounded to the
        training dtype, as the hook's are. With ``masters=True`` they are rounded once, from the master.

        Args:
            out: Writable bytes, of a mapped file for example.
            dtype: Element-type code to write.

        Returns:
            How many finite elements became infinite.
        """
        raise NotImplementedError

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], masters: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors in fresh memory, for entries that are made of several (``combine``)."""
        yield {}
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Mapped files stay behind; the other process maps them again."""
        raise NotImplementedError
