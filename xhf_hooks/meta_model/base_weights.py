"""The weights in a base model's files, under the names and in the form that they have in memory.

transformers renames, fuses and permutes weights when it loads them, by rules that differ between versions. So it loads
tensors on the meta device that record what is done to them. The same is done to the real ones when they are read.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from xhf_hooks.exporters.rehearsal import load_and_tell
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text
from xhf_hooks.model import module_tensors
from xhf_hooks.sources.checkpoint.base_weights import base_weights
from xhf_hooks.sources.stored_tensors import Pieces, StoredTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: What loading does to tensors that it leaves as they are. Casts are those of the run, not those of loading.
_UNCHANGED = ('to', 'detach', '__getitem__', 'requires_grad_', 'contiguous', '__get__')


@dataclass(frozen=True)
class BaseWeights:
    """What a folder lends a run.

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
        config: That of the folder, which may differ from that of the trained model, as in its vocabulary.

    Raises:
        CheckpointError: Files are missing or damaged.
    """
    stored = base_weights(folder)
    if not stored:
        return BaseWeights()
    config = copy.deepcopy(config)
    if hasattr(config, 'quantization_config'):  # loading would make other classes of layers
        del config.quantization_config
    state = {name: _recorded(tensor) for name, tensor in stored.items()}
    try:
        model, _ = load_and_tell(kind, None, config=config, state_dict=state, device_map={'': 'meta'})
    except Exception as error:  # the class may be custom code; transformers may lack accelerate
        told = f'{kind.__name__} did not tell its names in memory, so those in the files are taken'
        note = f'{folder}: {told} ({error_text(error)})'
        return BaseWeights(stored, None, (note,))
    last_made = _LastMade()
    tensors = {
        name: _stored(name, tensor, stored, last_made)
        for name, tensor in module_tensors(model)
        if isinstance(tensor, _Recorded)
    }
    return BaseWeights(tensors, model)


def _stored(name: str, tensor: _Recorded, stored: Mapping[str, StoredTensor], last_made: _LastMade) -> StoredTensor:
    if tensor.unchanged is not None:
        return stored[tensor.unchanged]
    made_of = [stored[name] for name in tensor.sources]
    return _MadeTensor(
        name,
        tuple(tensor.shape),
        made_of[0].dtype,
        trained=(),
        make=tensor.make,
        last_made=last_made,
        stored_nbytes=sum(one.read_nbytes(False) for one in made_of),
    )


class _LastMade:
    """Holds the tensors that were made last: what is read of them in parts, by several threads, is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = lru_cache(maxsize=2)(lambda make: make().contiguous())

    def __call__(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._lock, torch.no_grad():
            return self._made(make)


@dataclass(frozen=True, eq=False)
class _MadeTensor(StoredTensor):
    """A tensor that is made of those in the files when it is read."""

    make: Callable[[], torch.Tensor] = field(kw_only=True)
    last_made: _LastMade = field(kw_only=True)
    stored_nbytes: int = field(kw_only=True)

    def pieces(self, from_master: bool) -> Pieces:
        return (self.last_made(self.make),)

    def read_nbytes(self, from_master: bool) -> int:
        return self.stored_nbytes


class _Recorded(torch.Tensor):
    """A tensor on the meta device that records how it was made.

    Attributes:
        sources: Names in the files of what it is made of.
        unchanged: The name of the one that it is; None if it was computed.
        make: Makes it of the real tensors.
    """

    sources: tuple[str, ...]
    unchanged: str | None
    make: Callable[[], torch.Tensor]

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


def _recorded(tensor: StoredTensor) -> _Recorded:
    found = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device='meta').as_subclass(_Recorded)
    found.sources = (tensor.name,)
    found.unchanged = tensor.name
    found.make = lambda: tensor.trained[0].reshape(tensor.shape)
    return found


def _replay(func: Any, args: Any, kwargs: Any, place: int | None) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        real_args, real_kwargs = tree_map(lambda one: one.make() if isinstance(one, _Recorded) else one, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        return result if place is None else result[place]

    return make
