"""Stored weights, under the names and in the form that they have in memory: of a base model, and of an older version.

transformers renames, fuses and permutes weights when it loads them, by rules that differ between versions. So it loads
tensors on the meta device that record what is done to them. The same is done to the real ones when they are read.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from xhf_hooks.exporters.loading_check import Problems, load_with_info
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text
from xhf_hooks.model import module_tensors, names_by_identity
from xhf_hooks.sources.checkpoint.base_weights import base_weights
from xhf_hooks.sources.stored_tensors import Pieces, StoredTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Makes a tensor of those in the files, or of their fp32 masters.
Make = Callable[[bool], torch.Tensor]
#: What loading does to tensors that it leaves as they are. Casts are those of the run, not those of loading.
_UNCHANGED = ('to', 'detach', '__getitem__', 'requires_grad_', 'contiguous', '__get__')


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
    stored = base_weights(folder)
    if not stored:
        return BaseWeights()
    try:
        found = load_recorded(kind, config, stored)
    except Exception as error:  # of any type, from custom code; or accelerate is missing, which loading needs
        if _has_all_names(kind, config, stored):  # transformers before 4.48 loads no tensors that it is given
            return BaseWeights(stored)
        problem = f'could not find out how {kind.__name__} names its weights in memory, so the names in files are used'
        note = f'{folder}: {problem} ({error_text(error)})'
        return BaseWeights(stored, None, (note,))
    return BaseWeights(found.tensors, found.model)


def _has_all_names(kind: type[PreTrainedModel], config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> bool:
    """Tells whether the files have each tensor of the class under its name in memory, so that nothing was renamed."""
    with suppress(Exception):  # of any type, from custom code
        model = build_on_meta(kind, config)
        return all(any(name in stored for name in names) for _, names in names_by_identity(model))
    return False


@dataclass(frozen=True)
class Loaded:
    """A model that ``from_pretrained`` has made from stored tensors.

    Attributes:
        tensors: By name in the model. Those that the model lacks are left out.
        model: The model as ``from_pretrained`` makes it, on the meta device.
        sources: The names, among those that were given, of what each of them is made of; by name in the model.
        problems: The problems that transformers reports: names by kind of problem.
    """

    tensors: Mapping[str, StoredTensor]
    sources: Mapping[str, tuple[str, ...]]
    model: PreTrainedModel
    problems: Problems


def load_recorded(kind: type[PreTrainedModel], config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> Loaded:
    """Load stored tensors as ``from_pretrained`` of the class does, without reading their values.

    Raises:
        Exception: Anything, where the class cannot load them like this.
    """
    config = copy.deepcopy(config)
    if hasattr(config, 'quantization_config'):  # loading would make other classes of layers
        del config.quantization_config
    state = {name: _recorded(name, tensor) for name, tensor in stored.items()}
    model, problems = load_with_info(kind, None, config=config, state_dict=state, device_map={'': 'meta'})
    last_made = LastMade()
    recorded = {name: tensor for name, tensor in module_tensors(model) if isinstance(tensor, _Recorded)}
    tensors = {name: _stored(name, tensor, stored, last_made) for name, tensor in recorded.items()}
    return Loaded(tensors, {name: tensor.sources for name, tensor in recorded.items()}, model, problems)


def _stored(name: str, tensor: _Recorded, stored: Mapping[str, StoredTensor], last_made: LastMade) -> StoredTensor:
    if tensor.unchanged is not None:
        return stored[tensor.unchanged]
    made_of = tuple(stored[name] for name in tensor.sources)
    return MadeTensor(
        name,
        tuple(tensor.shape),
        made_of[0].dtype,
        trained=(),
        master=() if all(one.master is not None for one in made_of) else None,
        master_lost=any(one.master_lost for one in made_of),
        made_of=made_of,
        make=tensor.make,
        last_made=last_made,
    )


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


class _Recorded(torch.Tensor):
    """A tensor on the meta device that records how it was made.

    Attributes:
        sources: Names in the files of what it is made of.
        unchanged: The name of the one that it is; None if it was computed.
        make: Makes it of the real tensors.
    """

    sources: tuple[str, ...]
    unchanged: str | None
    make: Make

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        operands = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, _Recorded)]
        several = isinstance(result, (list, tuple))
        for place, made in enumerate(result if several else [result]):
            if not isinstance(made, _Recorded) or any(made is one for one in operands):
                continue
            first = operands[0]
            made.sources = tuple(dict.fromkeys(name for one in operands for name in one.sources))
            if len(operands) == 1 and func.__name__ in _UNCHANGED and made.shape == first.shape:
                made.unchanged = first.unchanged
                made.make = first.make
            else:
                made.unchanged = None
                made.make = _replay(func, args, kwargs, place if several else None)
        return result


def _recorded(name: str, tensor: StoredTensor) -> _Recorded:
    found = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device='meta').as_subclass(_Recorded)
    found.sources = (name,)
    found.unchanged = name
    found.make = partial(_values, tensor)
    return found


def _values(tensor: StoredTensor, from_master: bool) -> torch.Tensor:
    """All elements: of the file itself if they are one piece there, in the dtype of training."""
    is_one = len(tensor.trained) == 1 and tensor.trained[0].dtype == TORCH_DTYPES[tensor.dtype]
    return tensor.trained[0].reshape(tensor.shape) if is_one and not from_master else tensor.whole(from_master)


def _replay(func: Any, args: Any, kwargs: Any, place: int | None) -> Make:
    def make(from_master: bool) -> torch.Tensor:
        def real(one: Any) -> Any:
            return one.make(from_master) if isinstance(one, _Recorded) else one

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        return result if place is None else result[place]

    return make
