"""Stored weights, under the names and in the form that they have in memory: of a base model, and of an older version.

transformers renames, fuses and permutes weights when it loads them, by rules that differ between versions. So it loads
tensors that record what is done to them (:mod:`xhf_hooks.exporters.ask_load`). The same is done to the real ones when
they are read.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xhf_hooks.exporters.ask_load import Loaded, ask_load
from xhf_hooks.exporters.traced import ElementRange, TracedTensor, replay
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text
from xhf_hooks.offline.checkpoint.hf_folder import weights_of_folder
from xhf_hooks.sources.stored_tensors import Pieces, StoredTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Makes a tensor of those in the files, or of their fp32 masters.
Make = Callable[[bool], torch.Tensor]


@dataclass(frozen=True)
class BaseWeights:
    """The tensors of a base model, for weights that the checkpoint of a run lacks.

    Attributes:
        tensors: By name in the model. Those that the model lacks are left out.
        loaded: The model as ``from_pretrained`` makes it, on the meta device; None if it could not be loaded.
    """

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    loaded: PreTrainedModel | None = None
    notes: tuple[str, ...] = ()


def weights_of_base(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> BaseWeights:
    """Load a folder as ``from_pretrained`` of the class does, without reading weights.

    Args:
        config: The config of the folder, which may differ from the trained model's, as in its vocabulary.

    Raises:
        CheckpointError: Files are missing or damaged.
    """
    stored = weights_of_folder(folder)
    if not stored:
        return BaseWeights()
    try:
        loaded = load_stored(kind, config, stored)
    except Exception as error:  # of any type, from custom code; or accelerate is missing, which loading needs
        problem = f'could not find out how {kind.__name__} names its weights in memory, so the names in files are used'
        note = f'{folder}: {problem} ({error_text(error)})'
        return BaseWeights(stored, None, (note,))
    return BaseWeights(tensors_made(loaded, stored), loaded.model)


def load_stored(kind: type[PreTrainedModel], config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> Loaded:
    """Load stored tensors as ``from_pretrained`` of the class does, without reading their values.

    Raises:
        Exception: Anything, where the class cannot load them like this.
    """
    config = copy.deepcopy(config)
    if hasattr(config, 'quantization_config'):  # loading would make other classes of layers
        del config.quantization_config
    loaded = ask_load(kind, config, stored)
    for tensor in loaded.made.values():
        tensor.require_unchanged()
    return loaded


def tensors_made(loaded: Loaded, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a loaded model, by each of their names there.

    Args:
        stored: What it was loaded from.
    """
    last_made = LastMade()
    return {name: _tensor_made(name, tensor, stored, last_made) for name, tensor in loaded.made.items()}


def _tensor_made(
    name: str, tensor: TracedTensor, stored: Mapping[str, StoredTensor], last_made: LastMade
) -> StoredTensor:
    made_of, shape = tuple(stored[source] for source in tensor.sources), tensor.shape_and_dtype[0]
    if tensor.element_range == ElementRange(tensor.sources[0], 0) and shape == made_of[0].shape:
        return made_of[0]
    return MadeTensor(
        name,
        shape,
        made_of[0].dtype,
        trained=(),
        master=() if all(one.master is not None for one in made_of) else None,
        master_lost=any(one.master_lost for one in made_of),
        made_of=made_of,
        make=partial(_make, tensor, made_of),
        last_made=last_made,
    )


def _make(tensor: TracedTensor, made_of: Sequence[StoredTensor], from_master: bool) -> torch.Tensor:
    values = {source: _values(one, from_master) for source, one in zip(tensor.sources, made_of, strict=True)}
    return replay({'': tensor}, values, with_copies=False)['']


class LastMade:
    """Holds the tensors that were made last: what is read of them in parts, by several threads, is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = lru_cache(maxsize=2)(lambda make, from_master: make(from_master).contiguous())

    def __call__(self, make: Make, from_master: bool) -> torch.Tensor:
        with self._lock, torch.no_grad():
            return self._made(make, from_master)


@dataclass(frozen=True, eq=False)
class MadeTensor(StoredTensor):
    """A tensor that is made of those in the files when it is read.

    Attributes:
        made_of: The tensors in the files.
    """

    made_of: tuple[StoredTensor, ...] = field(kw_only=True)
    make: Make = field(kw_only=True)
    last_made: LastMade = field(kw_only=True)

    def pieces(self, from_master: bool) -> Pieces:
        return (self.last_made(self.make, from_master and self.master is not None),)

    def read_nbytes(self, from_master: bool) -> int:
        return sum(one.read_nbytes(from_master and self.master is not None) for one in self.made_of)


def _values(tensor: StoredTensor, from_master: bool) -> torch.Tensor:
    """All elements: of the file itself if they are one piece there, in the dtype of training."""
    is_one = len(tensor.trained) == 1 and tensor.trained[0].dtype == TORCH_DTYPES[tensor.dtype]
    return tensor.trained[0].reshape(tensor.shape) if is_one and not from_master else tensor.whole(from_master)
