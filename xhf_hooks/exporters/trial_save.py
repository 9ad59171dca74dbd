"""What ``save_pretrained`` of the installed transformers writes, learned from saves of tiny tensors.

transformers 4.52 to 4.57 give vision-language models the names of older versions when they save, and which fields the
index has depends on the version, too. Here the reference model's own ``save_pretrained`` is called with a state dict of
one-element tensors, and what it writes is looked at.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from xhf_hooks.errors import ModelError
from xhf_hooks.format.text import some
from xhf_hooks.model import quiet
from xhf_hooks.system import memory_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ONE_NBYTES = 8


def saved_names(reference: PreTrainedModel, names: Sequence[str]) -> dict[str, str]:
    """The name in the model by the name in the files, in the order of ``save_pretrained``.

    For transformers < 5. Writes no tensor to a disk.

    Args:
        reference: A model on the meta device; it is not changed.

    Raises:
        ModelError: ``save_pretrained`` fails, or does not write each of the tensors.
    """
    shards: dict[str, torch.Tensor] = {}

    def keep(shard: dict[str, torch.Tensor], path: str) -> None:
        shards.update(shard)

    with _trial_of(reference) as (trial, folder):
        numbers = {name: torch.tensor([number]) for number, name in enumerate(names)}
        trial.save_pretrained(
            folder, state_dict=numbers, is_main_process=False, safe_serialization=False, save_function=keep
        )
    written = {hf_name: names[int(number)] for hf_name, number in shards.items()}
    if lost := set(names) - set(written.values()):
        raise ModelError(f'save_pretrained of {type(reference).__name__} does not write {some(sorted(lost), 5)}')
    return written


def index_metadata(reference: PreTrainedModel) -> dict[str, Any]:
    """The ``metadata`` of the index that the model gets if it is split, with the sizes of the trial.

    Raises:
        ModelError: ``save_pretrained`` fails, or writes no index.
    """
    with _trial_of(reference) as (trial, folder):
        two = {name: torch.zeros(1, dtype=torch.int64) for name in ('first', 'second')}
        trial.save_pretrained(folder, state_dict=two, max_shard_size=_ONE_NBYTES)
        (index,) = Path(folder).glob('*.index.json')
        return json.loads(index.read_text())['metadata']


@contextmanager
def _trial_of(reference: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, str]]:
    """A copy of the model whose ``save_pretrained`` writes weights on any rank, and a temporary folder.

    Raises:
        ModelError: The block fails; the cause is in the text.
    """
    trial = copy.copy(reference)  # save_pretrained edits the config; the tensors are shared
    trial.config = copy.deepcopy(reference.config)
    trial.config.distributed_config = None  # transformers 5.23 would gather and wait
    trial.can_generate = lambda: False  # no generation config, which may be invalid
    trial.should_save_on_this_rank = lambda is_main_process: True  # transformers 5.23 writes on rank 0 alone
    try:
        with (
            tempfile.TemporaryDirectory(prefix='xhf_hooks_', dir=memory_place()) as folder,
            quiet(),
            _without_deepspeed(),
        ):
            yield trial, folder
    except Exception as error:  # a model's class may override save_pretrained
        kind = type(reference).__name__
        raise ModelError(f'save_pretrained of {kind} failed with tensors of one element: {error!r}') from error


@contextmanager
def _without_deepspeed() -> Iterator[None]:
    """Keep ``save_pretrained`` from importing DeepSpeed to unwrap a bare model."""
    from transformers import modeling_utils

    if 'deepspeed' in sys.modules:
        yield
        return
    with mock.patch.object(modeling_utils, 'unwrap_model', lambda model: model):
        yield
