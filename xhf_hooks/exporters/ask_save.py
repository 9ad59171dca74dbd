"""Asks ``save_pretrained`` of a trained model's class what it would write: which tensors into which file, and the rest.

A copy of the model runs its own class's ``save_pretrained`` with traced tensors (:mod:`.traced`), which have names and
shapes and no values. A function in the place of safetensors' ``save_file`` notes its arguments and writes nothing. So
names, order, ties, conversions of fused weights, configs and custom code are those of the installed transformers and of
the class itself. The copy has no parameter or buffer of the live model, and no hook of an engine; it shares other
attributes, but for configs.
"""

from __future__ import annotations

import copy
import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from xhf_hooks.compat.transformers import record_conversions, recorded_conversions
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.loading_check import as_if_alone
from xhf_hooks.exporters.on_meta import copy_modules
from xhf_hooks.exporters.traced import TracedTensor, ValueStandIn, traced
from xhf_hooks.format.index import INDEX_SUFFIX, SHARD_NAME, WEIGHTS_SUFFIX
from xhf_hooks.format.loaded_files import WEIGHT_SUFFIXES
from xhf_hooks.format.text import error_text, some
from xhf_hooks.model import model_class
from xhf_hooks.system.library_settings import as_the_only_process, replaced_in_this_thread

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

#: Attributes of a model and a config that was loaded onto several devices, or split over ranks; the copy is whole.
_DEVICE_ATTRIBUTES = ('hf_device_map', '_hf_hook', '_tp_size', '_device_mesh', 'distributed_config')

#: What a ``save_pretrained`` is called with, if it has such options: one file, since the planner divides tensors into
#: files, and no model card of sentence-transformers, which would describe the whole run.
_OPTIONS = {'max_shard_size': sys.maxsize, 'create_model_card': False}


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model to save.

    Attributes:
        tie_key: Equal for tensors that are one, and that loading ties again.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tie_key: object


@dataclass(frozen=True)
class SaveAnswer:
    """What ``save_pretrained`` would write.

    Attributes:
        weights: The tensors of each safetensors file, by their names in it and in its order. Their sources are names in
            the model. The files of one model are one here, ``model.safetensors``.
        files: The content of all other files, by path.
        not_saved: Files that cannot be written: the content depends on values of tensors, or is weights of another
            format.
        problem: Why a ``save_pretrained`` of the class's own failed; then the answer is that of transformers.
    """

    weights: Mapping[str, Mapping[str, TracedTensor]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    not_saved: tuple[str, ...] = ()
    problem: str | None = None

    @cached_property
    def written_names(self) -> set[str]:
        """Names in the model of what the files have: not those of which another tied name is there."""
        return {name for tensors in self.weights.values() for one in tensors.values() for name in one.sources}


def has_own_save(model: nn.Module) -> bool:
    """Whether the class of a model of transformers overrides ``save_pretrained``."""
    from transformers import PreTrainedModel

    return model_class(model).save_pretrained is not PreTrainedModel.save_pretrained


def ask_save(
    model: PreTrainedModel,
    tensors: Mapping[str, ModelTensor],
    config: PretrainedConfig,
    generation: GenerationConfig | None,
) -> SaveAnswer:
    """Ask the class of a model of transformers. Runs on: any rank, for itself.

    Args:
        model: The trained model, or one on the meta device.
        tensors: All tensors of its state dict by name, each with its full shape.
        config: The config to write.
        generation: The generation config to write, if the class generates; None writes none.

    Raises:
        ModelError: ``save_pretrained`` of transformers fails, or writes no safetensors file.
    """
    from transformers import PreTrainedModel

    def make_copy(stand_in: ValueStandIn) -> Any:
        made = _copied(model, tensors, stand_in)
        made.config = copy.deepcopy(config)
        for name in _DEVICE_ATTRIBUTES:
            vars(made).pop(name, None)
            vars(made.config).pop(name, None)
        if generation is None:
            made.can_generate = lambda: False
        else:
            made.generation_config = copy.deepcopy(generation)
        if any(map(_is_of_quantizer, recorded_conversions(made) or ())):
            record_conversions(made, None)
        return made

    kind, problem = model_class(model), None
    if has_own_save(model):
        try:
            return _require_weights(kind, _ask(kind.save_pretrained, make_copy))
        except Exception as error:  # of any type, from the class
            problem = error_text(error)
    try:
        found = _require_weights(kind, _ask(PreTrainedModel.save_pretrained, make_copy))
    except Exception as error:  # of any type: conversions refuse in many ways
        # It names tensors that are one and that the class does not declare to be tied. Each of these names is written
        undeclared = {name: replace(one, tie_key=name) for name, one in tensors.items() if f"'{name}'" in str(error)}
        if any(one.tie_key != tensors[name].tie_key for name, one in undeclared.items()):
            return ask_save(model, {**tensors, **undeclared}, config, generation)
        raise ModelError(
            f'save_pretrained of {kind.__name__} failed with tensors without values: {error_text(error, 500)}'
        ) from error
    return SaveAnswer(found.weights, found.files, found.not_saved, problem)


def ask_save_around(whole: nn.Module, tensors: Mapping[str, ModelTensor], skipped_paths: Collection[str]) -> SaveAnswer:
    """Ask the class of what surrounds a model of transformers, such as SentenceTransformer. Runs on: any rank.

    Args:
        whole: The trained model.
        tensors: All of its tensors by name.
        skipped_paths: Paths of models in it that are saved separately; their ``save_pretrained`` does nothing.

    Raises:
        Exception: Anything, from ``save_pretrained`` of the class.
    """

    def make_copy(stand_in: ValueStandIn) -> Any:
        made = _copied(whole, tensors, stand_in)
        for path, module in made.named_modules():
            if path in skipped_paths:
                module.save_pretrained = lambda *arguments, **options: None
        return made

    return _ask(model_class(whole).save_pretrained, make_copy)


def _ask(save: Callable[..., object], make_copy: Callable[[ValueStandIn], Any]) -> SaveAnswer:
    """Ask once; where the code reads values of tensors, once more with other values."""
    known = inspect.signature(save).parameters
    options = {name: value for name, value in _OPTIONS.items() if name in known}
    one = ValueStandIn(1)
    found = _ask_once(save, make_copy(one), options)
    if not one.was_read:
        return found
    again = _ask_once(save, make_copy(ValueStandIn(2)), options)
    files = {name: data for name, data in found.files.items() if again.files.get(name) == data}
    differing = sorted((found.files.keys() | again.files.keys()) - files.keys())
    return SaveAnswer(found.weights, files, (*found.not_saved, *differing))


def _ask_once(save: Callable[..., object], model_copy: Any, options: Mapping[str, Any]) -> SaveAnswer:
    from transformers import modeling_utils

    with tempfile.TemporaryDirectory(prefix='xhf_hooks_') as temporary:
        folder = Path(temporary).resolve()
        # transformers looks for wrappers, of which the copy has none, and imports DeepSpeed for that: it takes seconds
        unwrapping = replaced_in_this_thread(modeling_utils, {'unwrap_model': lambda model, **options: model})
        recorded = warnings.catch_warnings(record=True)
        with as_if_alone(), as_the_only_process(), unwrapping, recorded, _files_noted(model_copy, folder) as noted:
            warnings.simplefilter('always')  # transformers treats warnings about a generation config as errors
            save(model_copy, str(folder), **options)
        paths = sorted(path for path in folder.rglob('*') if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    weights = {name: given for name, given in noted.items() if name.endswith(WEIGHTS_SUFFIX) and _is_traced(given)}
    written = {name: data for name, data in files.items() if not name.endswith(WEIGHT_SUFFIXES)}
    lost = [name for name in (*noted, *files) if name not in weights and name not in written]
    return SaveAnswer(
        _merge_shards(weights),
        written,
        tuple(sorted(name for name in lost if not name.endswith(INDEX_SUFFIX))),  # a save writes its own index
    )


def _merge_shards(weights: Mapping[str, Mapping[str, TracedTensor]]) -> dict[str, Mapping[str, TracedTensor]]:
    """The files of weights, where those into which a model was split are one again."""
    found: dict[str, dict[str, TracedTensor]] = {}
    for name, tensors in weights.items():
        if SHARD_NAME.fullmatch(Path(name).name):
            name = name[: -len('-00001-of-00001.safetensors')] + WEIGHTS_SUFFIX
        found.setdefault(name, {}).update(tensors)
    return dict(found)


def _require_weights(kind: type, answer: SaveAnswer) -> SaveAnswer:
    if not answer.weights:
        from transformers import __version__

        raise ModelError(
            f'save_pretrained of {kind.__name__} in transformers {__version__} writes no safetensors file by the '
            f'function save_file of safetensors.torch (it wrote {some(sorted(answer.files), 5)}), so a save cannot '
            f'find out what it holds; use another version of transformers, and please report this'
        )
    return answer


def _copied(model: nn.Module, tensors: Mapping[str, ModelTensor], stand_in: ValueStandIn) -> Any:
    """A copy of a model with traced tensors. Its state dict has one of each name, though tied tensors are one."""
    made: dict[object, TracedTensor] = {}

    def tensor_of(name: str, live: torch.Tensor) -> torch.Tensor:
        one = tensors.get(name)
        if one is None:  # a buffer that is in no state dict
            return torch.empty(live.shape, dtype=live.dtype, device='meta')
        if one.tie_key not in made:
            made[one.tie_key] = traced(name, one.shape, one.dtype, stand_in)
            # What nn.Parameter sets on a subclass of Tensor
            made[one.tie_key]._is_param = isinstance(live, nn.Parameter)
        return made[one.tie_key]

    def name_tensors(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in state:
            one = tensors.get(name)
            if one is not None and isinstance(state[name], torch.Tensor):
                tied = made.get(one.tie_key)  # none for an extra state
                state[name] = traced(name, one.shape, one.dtype, stand_in, tied)

    found = copy_modules(model, tensor_of)
    hooks = found._state_dict_hooks
    found._state_dict_hooks = type(hooks)({-1: name_tensors, **hooks})  # before those of the model's own code
    return found


def _is_of_quantizer(conversion: Any) -> bool:
    """Whether a quantizer has made this conversion when it loaded the model, such as dequantizing; it is gone since."""
    return any(hasattr(operation, 'hf_quantizer') for operation in getattr(conversion, 'operations', ()))


@contextmanager
def _files_noted(model_copy: nn.Module, folder: Path) -> Iterator[dict[str, Any]]:
    """Inside, functions that write weights of the copy into the folder note, by path, what they are given.

    They are replaced in the modules that define its classes, where ``from safetensors.torch import save_file`` has put
    them, and called as they are for anything else, such as a save by another thread.
    """
    noted: dict[str, Any] = {}

    def note(write: Callable[..., Any], given: Any, file: Any, args: Any, kwargs: Any) -> Any:
        # torch.save takes an open file, too
        name = file if isinstance(file, (str, Path)) else getattr(file, 'name', '')
        path = Path(name).resolve() if isinstance(name, (str, Path)) else Path()
        if not path.is_relative_to(folder):
            return write(given, file, *args, **kwargs)
        noted[path.relative_to(folder).as_posix()] = given
        return None

    save_file, save = safetensors.torch.save_file, torch.save

    def note_safetensors(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return note(save_file, dict(tensors), filename, args, kwargs)

    def note_pickle(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return note(save, obj, f, args, kwargs)

    kinds = {kind for module in model_copy.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds} | {'safetensors.torch', 'torch'}
    scopes = [vars(sys.modules[name]) for name in names if name in sys.modules]
    functions = {id(save_file): note_safetensors, id(save): note_pickle}
    places = [(scope, key, value) for scope in scopes for key, value in scope.items() if id(value) in functions]
    try:
        for scope, key, value in places:
            scope[key] = functions[id(value)]
        yield noted
    finally:
        for scope, key, value in places:
            scope[key] = value


def _is_traced(given: Any) -> bool:
    return isinstance(given, dict) and bool(given) and all(isinstance(one, TracedTensor) for one in given.values())
