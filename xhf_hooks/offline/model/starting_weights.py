"""The weights that a run started from, as its config names them: a base model, and checkpoints loaded over it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.errors import BaseModelError, XhfError
from xhf_hooks.exporters.assets.base_files import find_base_file
from xhf_hooks.exporters.find_model import adapters_in
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import is_float
from xhf_hooks.format.loaded_files import CONFIG
from xhf_hooks.format.text import some
from xhf_hooks.model import module_tensors, without_wrappers
from xhf_hooks.offline.checkpoint.source import CheckpointSource
from xhf_hooks.offline.model.base_weights import LastMade, MadeTensor
from xhf_hooks.offline.model.run_config import RunConfig, Unread, parse_config
from xhf_hooks.offline.model.stored_names import name_in_base
from xhf_hooks.sources.stored_tensors import StoredTensor

#: Fields of a model's config, or of a part of it, that name a base.
_OF_BASE = ('model_path', 'pretrained_model_name_or_path')
#: Models that load ``pretrained_pth`` when they have their adapters. Sa2VA loads it before it adds them, under names of
#: the plain model.
_LOAD_AFTER_ADAPTERS = ('LLaVAModel', 'InternVL_V1_5')


def base_named_by(config: RunConfig, stored: Collection[str], save_of_run: Path | None) -> str | None:
    """The base model that the run's config names, if it is on this machine.

    Args:
        stored: Names in the checkpoint. A part of the model without tensors there, such as a frozen encoder, needs no
            base.
        save_of_run: A save of this run by the hook, whose model the base has to be of; None if there is none.

    Raises:
        BaseModelError: The config names several that may be meant.
    """
    named = []
    for path, _, value in config.parts_with(_OF_BASE):
        if isinstance(value, str) and any(name.startswith(path) for name in stored):
            named.append(value)
    kind = None if save_of_run is None else _kind(save_of_run / CONFIG)
    found: dict[Path, str] = {}  # by folder, since several parts may name it
    for name in named:
        file = find_base_file(name, CONFIG)
        if file is not None and kind in (None, _kind(file)):
            found.setdefault(file.parent.resolve(), name)
    if len(found) > 1:
        raise BaseModelError(f'{config.where} names {some([*found.values()])}: give one of them with --base')
    return next(iter(found.values()), None)


def _kind(config_file: Path) -> Any:
    return strict_json.read(config_file).get('model_type')


@dataclass(frozen=True)
class LoadedOver:
    """A checkpoint that a run loaded over the weights of its base before training.

    Attributes:
        option: The field of the config that names it.
        path: The file or folder, or an expression in the config that was not read.
        prefix: The path, with a dot at the end, of the part of the model that loaded it; '' for the model itself.
        is_before_adapters: Whether tensors with a plain name were loaded into modules that got an adapter later.
        rounds_to_fp16: Whether a folder was read by ``guess_load_checkpoint``, with which models load
            ``pretrained_pth``: it rounds the fp32 masters to fp16.
    """

    option: str
    path: str | Unread
    prefix: str = ''
    is_before_adapters: bool = False
    rounds_to_fp16: bool = False


def checkpoints_loaded_over(config: RunConfig) -> list[LoadedOver]:
    """The checkpoints that a run loaded over its base, in order: ``pretrained_pth``, then MMEngine's ``load_from``.

    With ``resume``, ``load_from`` is an earlier checkpoint of the run, whose own config names what that had loaded.
    """
    found = []
    for path, part, value in config.parts_with(('pretrained_pth',)):
        if isinstance(value, (str, Unread)):
            kind = part.get('type')
            kind = getattr(kind, '__name__', str(kind)).rpartition('.')[2]  # a class, in the config of a live run
            is_before = kind not in _LOAD_AFTER_ADAPTERS
            found.append(LoadedOver(f'model.{path}pretrained_pth', value, path, is_before, rounds_to_fp16=True))
    source = config.fields.get('load_from')
    if not isinstance(source, (str, Unread)):
        return found
    if not config.fields.get('resume'):
        return [*found, LoadedOver('load_from', source)]
    return [*found, *(one for one in _loaded_before(source) if one.option == 'load_from')]


def _loaded_before(resumed: str | Unread) -> list[LoadedOver]:
    """What the run that wrote a checkpoint had loaded; nothing if the checkpoint is gone, as retention deletes it."""
    try:
        text = None if isinstance(resumed, Unread) else CheckpointSource.open(Path(resumed)).config_text
        return (
            [] if text is None else checkpoints_loaded_over(RunConfig(str(resumed), parse_config(text, str(resumed))))
        )
    except XhfError:
        return []


@dataclass(frozen=True)
class StartingWeights:
    """Tensors that a run loaded over its base.

    Attributes:
        tensors: By name in the trained model, with its adapters.
        files: Which checkpoint each of them is in, by these names.
        unreadable: Why checkpoints that the run loaded cannot be read, a sentence each.
    """

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    @classmethod
    def find(cls, module: nn.Module, loaded: Sequence[LoadedOver]) -> StartingWeights:
        """Read the names in the checkpoints that a run loaded.

        Args:
            module: The trained model: live or on the meta device.
        """
        names = [name for name, _ in module_tensors(module)] if loaded else []
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, str] = {}
        unreadable = []
        for one in loaded:
            try:
                if isinstance(one.path, Unread):
                    raise BaseModelError(f'it is {one.path.text!r} (line {one.path.line}), which is not run')
                source = CheckpointSource.open(Path(one.path))
            except (XhfError, OSError) as error:
                unreadable.append(f'the run loaded the weights of {one.option} over those of its base: {error}')
                continue
            stored = {f'{one.prefix}{without_wrappers(n)}': t for n, t in source.tensors.items()}
            if one.rounds_to_fp16 and source.found.path.is_dir():
                stored = {name: _rounded_to_fp16(tensor) for name, tensor in stored.items()}
            for name in names:
                plain = name_in_base(name) if one.is_before_adapters else name
                match = stored.get(name) or stored.get(plain)
                if match is not None:
                    tensors[name], files[name] = match, f'{one.path} ({one.option})'
        return cls(tensors, files, tuple(unreadable))

    def lend(self, names: Sequence[str], of_base: StoredTensor | None, shape: tuple[int, ...]) -> StoredTensor | None:
        """What a frozen tensor had when training began; that of the base if nothing was loaded over it.

        Args:
            names: Its names in the trained model.
            of_base: The base's; its dtype is that of the model into which the checkpoint was loaded.
        """
        over = next((self.tensors[name] for name in names if name in self.tensors), None)
        if over is None or over.shape != shape:
            return of_base
        dtype = of_base.dtype if of_base is not None and is_float(over.dtype) else over.dtype
        return replace(over, dtype=dtype, master=None)

    def require_readable(self) -> None:
        """Require that each checkpoint that the run loaded can be read.

        Raises:
            BaseModelError: One of them cannot.
        """
        if self.unreadable:
            raise BaseModelError(
                f'{self.unreadable[0]}; put it back, or give with --config a copy of the config that names where it is '
                f'(or does not name it, if it had none of the frozen weights); or convert the adapter alone, with '
                f'--lora adapter'
            )

    def notes_on_adapters(self, module: nn.Module, base: str) -> list[str]:
        """Notes on adapters that are saved without the weights on which they were trained.

        Args:
            module: The trained model: live or on the meta device.
            base: The base that the config of the adapters names.
        """
        notes = [f'{one}. If it has weights of the base, an adapter needs them, too' for one in self.unreadable]
        paths = [f'{path}.'.removeprefix('.') for path in adapters_in(module)]
        frozen = [name for name, tensor in module_tensors(module) if not tensor.requires_grad]
        used = [self.files[name] for name in frozen if name in self.files and name.startswith(tuple(paths))]
        if used:
            files = some(list(dict.fromkeys(used)))
            notes.append(
                f'the adapter was trained on {base} with the weights of {files} loaded over it, and makes another '
                f"model on {base} alone. A merged model has these weights (lora='merge')"
            )
        return notes


def _rounded_to_fp16(tensor: StoredTensor) -> StoredTensor:
    if tensor.master is None:
        return tensor
    return MadeTensor(
        tensor.name,
        tensor.shape,
        'F16',
        trained=(),
        made_of=(tensor,),
        make=lambda from_master: tensor.whole(True).half(),
        last_made=LastMade(),
    )
