"""A checkpoint on disk, before any file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint recognised by its file names.

    Attributes:
        given: The path that the user gave.
        path: The checkpoint: DeepSpeed's tag folder, or one file.
        layout: ``'mmengine'`` (a tag folder ``iter_N.pth`` or ``epoch_N.pth``), ``'deepspeed'`` (``latest`` or a
            tag folder of another name), ``'trainer'`` (``checkpoint-N``, transformers or Axolotl),
            ``'accelerate'`` (``pytorch_model``), ``'universal'`` (made by DeepSpeed's ``ds_to_universal.py``),
            ``'dcp'`` (torch.distributed.checkpoint), ``'fsdp'`` (``rank0.pth`` ... of MMEngine's FSDPStrategy), or
            ``'file'`` (one ``.pth`` with all weights).
        model_files: ``*_model_states.pt`` in rank order (one at stages 0 to 2), ``rank0.pth`` ... likewise, the
            ``.distcp`` files sorted by name, or the one file.
        optim_files: ``*_optim_states.pt`` in rank order; DeepSpeed's layouts only.
        parameter_files: Parameter name to the file of its fp32 values; ``'universal'`` only.
    """

    given: Path
    path: Path
    layout: str
    model_files: tuple[Path, ...]
    optim_files: tuple[Path, ...] = ()
    parameter_files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total size of these files."""
        files = (*self.model_files, *self.optim_files, *self.parameter_files.values())
        return sum(file.stat().st_size for file in files)
