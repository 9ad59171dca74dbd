"""Asks the installed transformers what ``from_pretrained`` would make of tensors, before there are any.

It loads traced tensors, which have no values, onto the meta device, and does its own renaming, conversions and tying.
So whatever will not come back is found, of any cause. That reads no weights, and takes tenths of a second and some MB
for a model of 8 B parameters.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from xhf_hooks.compat.deepspeed import restore_inherited_init
from xhf_hooks.compat.transformers import converts_weights, load_as_from_file
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.loading_check import Problems, as_if_alone
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.exporters.traced import TracedTensor, traced
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text
from xhf_hooks.model import module_tensors, names_by_identity

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Described(Protocol):
    """A tensor of a file or of a plan: its shape, and its dtype as safetensors writes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Loaded:
    """A model that ``from_pretrained`` has made of tensors without values.

    Attributes:
        model: On the meta device. Of tensors that are given and that its config ties, transformers 4 makes one.
            transformers 5 does that only if their values are equal, so not here.
        made: The model's tensors that were loaded, by each of their names. ``sources`` of one are the given names. Some
            may have been changed in place since, by classes that initialise weights which they have loaded.
        problems: What transformers reports.
    """

    model: PreTrainedModel
    made: Mapping[str, TracedTensor]
    problems: Problems

    @property
    def fp32_names(self) -> set[str]:
        """The names of the model's tensors in fp32: which the class keeps so if it was asked for 16 bits."""
        return {name for name, tensor in module_tensors(self.model) if tensor.dtype == torch.float32}


def ask_load(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, Described],
    dtype: torch.dtype | str = 'auto',
    arguments: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load a model as ``from_pretrained`` will do. Runs on: the thread that trains.

    Args:
        kind: The class that config.json names.
        config: Is written to config.json, and read from there.
        tensors: What the files have, by name.
        dtype: The option ``torch_dtype``.
        arguments: Keyword arguments of the class besides the config.

    Raises:
        ModelError: The config cannot be read.
        Exception: Anything, where loading cannot be tried.
    """
    with as_if_alone(), tempfile.TemporaryDirectory(prefix='xhf_hooks_') as name:
        folder = Path(name)
        config.save_pretrained(folder)
        try:
            read = type(config).from_pretrained(folder)
        except Exception as error:  # of any type, from custom code
            reason = error_text(error, 500)
            raise ModelError(f'{type(config).__name__} would not load its own config.json: {reason}') from error
        restore_inherited_init(kind)
        given = {name: traced(name, one.shape, TORCH_DTYPES[one.dtype]) for name, one in tensors.items()}
        load = partial(_load, kind, dict(torch_dtype=dtype, config=read, **(arguments or {})))
        keeps_ties = False
        try:
            model, problems = load(None, state_dict=given)
        except Exception as error:  # of any type, from custom code; raised again if the other way fails, too
            traceback.clear_frames(error.__traceback__)  # they hold a model
            loaded = load_as_from_file(load, folder, given)
            if loaded is None:
                raise
            keeps_ties = True  # that transformers loads into what the class has built, with each of its ties
            model, problems = loaded
        if problems['missing'] and not converts_weights():
            built = build_on_meta(kind, read, arguments, keeps_ties=keeps_ties)
            restored = _tie_as_built(model, built, problems['missing'])
            problems['missing'] = [name for name in problems['missing'] if name not in restored]
    made = {name: tensor for name, tensor in module_tensors(model) if isinstance(tensor, TracedTensor)}
    return Loaded(model, made, problems)


def _load(kind: Any, options: Mapping[str, Any], source: Path | None, **more_options: Any) -> tuple[Any, Problems]:
    """Call ``from_pretrained`` of a class; returns the model, and what transformers reports of it."""
    model, info = kind.from_pretrained(
        source,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported instead
        device_map={'': 'meta'},
        **options,
        **more_options,
    )
    shapes = [  # transformers 4.57 gives only names
        one if isinstance(one, str) else f'{one[0]} {tuple(one[1])}, expected {tuple(one[2])}'
        for one in info['mismatched_keys']
    ]
    names = {'missing': info['missing_keys'], 'unexpected': info['unexpected_keys'], 'of other shape': shapes}
    return model, {problem: sorted(map(str, which)) for problem, which in names.items()}


def _tie_as_built(model: PreTrainedModel, built: PreTrainedModel, missing: Sequence[str]) -> set[str]:
    """Tie missing tensors as the class does while it is built, such as those of Donut's decoder; returns their names.

    transformers 4 loads into a model that it has built, with its ties, unless a device map is given, as here.
    transformers 5 ties afterwards.

    Args:
        built: The model as its class builds it, on the meta device.
    """
    tensors, restored = dict(module_tensors(model)), set()
    for _, names in names_by_identity(built):
        loaded = [tensors[name] for name in names if isinstance(tensors.get(name), TracedTensor)]
        for name in set(names).intersection(missing) if loaded else ():
            path, _, last = name.rpartition('.')
            model.get_submodule(path)._parameters[last] = loaded[0]
            restored.add(name)
    return restored
