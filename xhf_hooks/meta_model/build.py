"""Builds the trained model on the meta device.

- XTuner's models, from the run's config: ``llm``, ``ref_llm``, ``visual_encoder``, ``projector``, ``v_head``.
- Models of transformers.Trainer and Axolotl, from ``config.json`` and ``adapter_config.json`` in the checkpoint.
- Other modules that contain one transformers model, from the folder given with ``--base``. Its path in the module
  follows from the names in the checkpoint.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xhf_hooks.errors import BaseModelError, ConfigError
from xhf_hooks.exporters.base_files import base_folder
from xhf_hooks.exporters.hf_assets import forget_use_cache
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.meta_model import transformers_model
from xhf_hooks.meta_model.base_weights import BaseWeights, weights_of_base
from xhf_hooks.meta_model.beside import config_of_trainer, take_generation_config
from xhf_hooks.meta_model.run_config import RunConfig, required
from xhf_hooks.model import module_tensors, names_by_identity
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.library_settings import quiet

#: Fields of an XTuner model's config that hold models, and fields that hold their adapters (xtuner ``model/*.py``).
_MODELS = ('llm', 'ref_llm', 'visual_encoder')
_ADAPTERS = {'lora': 'llm', 'llm_lora': 'llm', 'visual_encoder_lora': 'visual_encoder'}
_ADAPTER = 'adapter_config.json'


@dataclass(frozen=True)
class Base:
    """A base model.

    Attributes:
        folder: Where it is, as it was given.
        names: Names in it, by ``id`` of the meta model's tensor.
        weights: Its weights by these names; none if its files are not on this machine.
    """

    folder: str
    names: Mapping[int, list[str]]
    weights: Mapping[str, StoredTensor]


@dataclass
class MetaModel:
    """The trained model on the meta device, and the base models of its parts.

    Attributes:
        described_by: The config that it was built from, for messages.
        shapes: Of the checkpoint's tensors, by each of their names.
        bases: The base models.
        notes: Notes for the user.
    """

    described_by: str
    shapes: Mapping[str, tuple[int, ...]]
    trust_remote_code: bool
    module: nn.Module = field(default_factory=nn.Module)
    bases: list[Base] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def built_from(
        self,
        folder: str,
        why: str,
        class_of: Callable[[Any], str | None] = lambda config: None,
        edit: Callable[[Any], None] = lambda config: None,
        config_in: Path | None = None,
    ) -> nn.Module:
        """Build the model of ``folder``'s config, edited to fit the checkpoint, and record it as a base.

        Args:
            folder: Or its name in the local hub cache.
            class_of: Returns the name of the class for the config; None: the one that the config names.
            config_in: A folder whose config.json describes the trained model.
        """
        trust = self.trust_remote_code
        hf_config = transformers_model.load_config(folder, trust_remote_code=trust, why=why)
        edit(hf_config)
        of_base = copy.deepcopy(hf_config)
        if config_in is not None:
            where = f'{config_in}/config.json'
            hf_config = transformers_model.load_config(str(config_in), trust_remote_code=trust, why=where)
            forget_use_cache(hf_config, folder)
            hf_config._name_or_path = folder
        auto_class = class_of(hf_config)
        model = transformers_model.build(hf_config, auto_class, trust_remote_code=trust)
        if transformers_model.fit_config(hf_config, model, self.shapes):
            model = transformers_model.build(hf_config, auto_class, trust_remote_code=trust)
        if getattr(hf_config, 'auto_map', None) and not trust:
            self.notes.append(f'{folder} has custom code, which was not run; --trust-remote-code allows it')
        names, place = {id(tensor): names for tensor, names in names_by_identity(model)}, base_folder(folder)
        found = BaseWeights() if place is None else weights_of_base(type(model), of_base, place)
        conversions = found.conversions
        if conversions is None and all(found.tensors.keys() & set(each) for each in names.values()):
            conversions = []  # it could not be loaded, but has the same names: from_pretrained would convert nothing
        if conversions is not None:  # save_pretrained reverts them, and without any sorts the names
            model._weight_conversions = conversions
        self.bases.append(Base(folder, names, found.tensors))
        self.notes += found.notes
        return model


def build_meta_model(
    config: RunConfig | None,
    checkpoint: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    base: str | None,
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build the model of a checkpoint.

    Args:
        config: The run's config.
        checkpoint: The tag folder or file. ``config.json`` is looked for beside it and in the hook's folders.
        shapes: Of the checkpoint's tensors, by each of their names.
        base: Folder or hub name given by the user; takes precedence over the config and the checkpoint.

    Raises:
        ConfigError, BaseModelError: No usable config was found.
        DamagedError: The config describes a model that cannot be built.
    """
    folder = _hugging_face_folder(checkpoint)
    with quiet():
        if config is not None and config.model is not None and _is_xtuners(config.model):
            return _of_xtuner(config.model, config.where, shapes, base, trust_remote_code)
        if base is None and folder is None:
            found = 'no config was found' if config is None else f'{config.where} has no supported model'
            raise ConfigError(
                f"{checkpoint}: {found}, and there is no config.json beside it. Name the run's config with "
                f'--config, or a folder with the config.json of the model with --base'
            )
        return _of_transformers(checkpoint, folder, shapes, base, trust_remote_code)


def _of_xtuner(
    model: Mapping[str, Any],
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    base: str | None,
    trust_remote_code: bool,
) -> MetaModel:
    kind = model['type'].rpartition('.')[2]
    meta_model = MetaModel(f'{kind} of {where}', shapes, trust_remote_code)
    module = meta_model.module
    for name in _MODELS:
        if isinstance(model.get(name), Mapping):
            child = _child_of_xtuner(meta_model, model, name, where, base if name != 'visual_encoder' else None)
            if kind == 'RewardModel' and name == 'llm':
                child = child.model  # xtuner keeps the backbone only (model/reward.py)
            module.add_module(name, child)
    for option, name in _ADAPTERS.items():
        if isinstance(model.get(option), Mapping) and hasattr(module, name):
            lora = transformers_model.lora_config_of(model[option], where)
            setattr(module, name, transformers_model.adapt(getattr(module, name), lora))
    _add_the_rest(module, model, shapes)
    _freeze(module, model)
    return meta_model


def _child_of_xtuner(
    meta_model: MetaModel, model: Mapping[str, Any], name: str, where: str, base: str | None
) -> nn.Module:
    options, what = model[name], f'model.{name}.pretrained_model_name_or_path'
    folder = base or str(required(options.get('pretrained_model_name_or_path'), what, where))
    parts = str(required(options.get('type'), f'model.{name}.type', where)).split('.')
    auto_class = parts[-2] if parts[-1] == 'from_pretrained' and len(parts) > 1 else parts[-1]

    def edit(hf_config: Any) -> None:
        transformers_model.apply_options(hf_config, options)
        if name != 'visual_encoder':
            _enlarge_context(hf_config, model.get('max_position_embeddings'))

    return meta_model.built_from(folder, '--base' if base else f'{what} of {where}', lambda _: auto_class, edit)


def _of_transformers(
    checkpoint: Path,
    folder: Path | None,
    shapes: Mapping[str, tuple[int, ...]],
    given: str | None,
    trust_remote_code: bool,
) -> MetaModel:
    base: Any = folder if given is None else given
    described_by, lora = str(base), None
    places = [base_folder(str(one)) for one in (given, folder) if one is not None]
    with_adapter = [place for place in places if place is not None and (place / _ADAPTER).is_file()]
    if with_adapter:
        place = with_adapter[0]
        lora = transformers_model.adapter_config_in(place)
        if given is None or place == places[0]:
            base = lora.base_model_name_or_path
        if not base:
            raise BaseModelError(f'{place}/{_ADAPTER} has no base_model_name_or_path; set it to the base model')
        described_by = f'{place}/{_ADAPTER} and {base}'
    meta_model = MetaModel(described_by, shapes, trust_remote_code)
    model: nn.Module
    if lora is None:
        model = meta_model.built_from(str(base), 'the model', config_in=config_of_trainer(checkpoint))
        take_generation_config(model, checkpoint)
    else:
        model = meta_model.built_from(str(base), 'the model', partial(transformers_model.class_for_adapter, lora))
        take_generation_config(model, checkpoint)
        model = transformers_model.adapt(model, lora)
    meta_model.module = _placed(model, _prefix(model, shapes, checkpoint, str(base)))
    return meta_model


def _is_xtuners(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get('llm'), Mapping) and 'pretrained_model_name_or_path' in model['llm']


def _enlarge_context(config: Any, wanted: Any) -> None:
    """Same as ``_prepare_for_long_context_training`` in xtuner ``model/sft.py``."""
    now = getattr(config, 'max_position_embeddings', None)
    if type(wanted) is int and type(now) is int and hasattr(config, 'rope_scaling'):
        factor = float(-(-wanted // now)) if wanted > now else 1.0
        config.rope_scaling = {'type': 'linear', 'factor': factor}


def _add_the_rest(module: nn.Module, model: Mapping[str, Any], names: Collection[str]) -> None:
    children = {name.partition('.')[0] for name in names}
    if 'v_head' in children:
        hidden = module.llm.config.get_text_config().hidden_size
        module.v_head = nn.Linear(hidden, 1, bias=False, device='meta')
    if 'ref_llm' in children and not hasattr(module, 'ref_llm'):
        module.ref_llm = nn.Module()  # a copy of llm, not exported; its tensors are skipped by name
    if 'visual_encoder' in model:
        module.add_module('projector', _projector(module, model))


def _projector(module: nn.Module, model: Mapping[str, Any]) -> nn.Module:
    """XTuner's own class: its code is exported with the weights."""
    with transformers_model.refused_as(ConfigError, "a LLaVAModel needs xtuner's projector"), torch.device('meta'):
        from xtuner.model.modules.projector import ProjectorConfig, ProjectorModel

        sizes = dict(
            visual_hidden_size=module.visual_encoder.config.hidden_size,
            llm_hidden_size=module.llm.config.hidden_size,
            depth=model.get('projector_depth', 2),
        )
        return ProjectorModel(ProjectorConfig(**sizes))


def _freeze(module: nn.Module, model: Mapping[str, Any]) -> None:
    """Freeze parts as LLaVAModel does; adapters stay trainable."""
    for name in ('llm', 'visual_encoder'):
        if model.get(f'freeze_{name}') is True:
            for path, parameter in getattr(module, name).named_parameters():
                parameter.requires_grad_('lora_' in path)


def _hugging_face_folder(checkpoint: Path) -> Path | None:
    """The folder with Trainer's config.json, in or above the checkpoint; else the newest save of HFCheckpointHook."""
    work_dir = checkpoint.parent
    manifests = [*work_dir.glob(f'*/hf_model*/{MANIFEST_NAME}'), *work_dir.glob(f'hf_model*/{MANIFEST_NAME}')]
    saved = [file.parent for file in sorted(manifests, key=lambda file: file.stat().st_mtime, reverse=True)]
    for folder in (checkpoint, work_dir, work_dir.parent, *saved):
        if any((folder / name).is_file() for name in (_ADAPTER, 'config.json')):
            return folder
    return None


def _prefix(model: nn.Module, names: Collection[str], checkpoint: Path, source: str) -> str:
    """The prefix of the model's tensors in the checkpoint, such as ``'llm.'``; '' for the model itself."""
    own = [name for name, tensor in module_tensors(model) if isinstance(tensor, nn.Parameter)]
    pairs = ((name, there) for name in own[:50] for there in names)
    found = Counter(there.removesuffix(name) for name, there in pairs if f'.{there}'.endswith(f'.{name}'))
    if not found:
        raise BaseModelError(
            f'{source}: {type(model).__name__} has tensors such as {own[0] if own else "none"}, but {checkpoint} has '
            f'{sorted(names)[:1]}; --base has to name the model that was trained'
        )
    return min(found, key=lambda prefix: (-found[prefix], len(prefix)))


def _placed(model: nn.Module, prefix: str) -> nn.Module:
    """An empty module with the model at the given path."""
    for name in reversed(prefix.split('.')[:-1]):
        outer = nn.Module()
        outer.add_module(name, model)
        model = outer
    return model
