"""A checkpoint on disk, before anything of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint recognised by the names of its files; none has been opened yet.

    Attributes:
        given: What the user named.
        path: The checkpoint itself: DeepSpeed's tag folder, or one file.
        layout: ``'mmengine'`` (a tag folder ``iter_N.pth`` or ``epoch_N.pth``), ``'deepspeed'`` (``latest`` or a
            tag folder of any other name), ``'trainer'`` (``checkpoint-N``, transformers or Axolotl),
            ``'accelerate'`` (``pytorch_model``), ``'universal'`` (what DeepSpeed's ``ds_to_universal.py`` has made),
            ``'dcp'`` (torch.distributed.checkpoint), ``'fsdp'`` (``rank0.pth`` ... of MMEngine's FSDPStrategy), or
            ``'file'`` (one ``.pth`` with all weights).
        model_files: ``*_model_states.pt`` in rank order (one at stages 0 to 2), ``rank0.pth`` ... likewise, the
            ``.distcp`` files in the order of their names, or the one file.
        optim_files: ``*_optim_states.pt`` in rank order; only of DeepSpeed's own layouts.
        parameter_files: By name of a parameter, its fp32 values; only of ``'universal'``.
    """

    given: Path
    path: Path
    layout: str
    model_files: tuple[Path, ...]
    optim_files: tuple[Path, ...] = ()
    parameter_files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all these files."""
        files = (*self.model_files, *self.optim_files, *self.parameter_files.values())
        return sum(file.stat().st_size for file in files)
