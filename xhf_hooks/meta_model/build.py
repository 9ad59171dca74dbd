"""Builds the trained model on the meta device.

- XTuner's models, from the run's config: ``llm``, ``ref_llm``, ``visual_encoder``, ``projector``, ``v_head``.
- Models of transformers.Trainer and Axolotl, from ``config.json`` and ``adapter_config.json`` in the checkpoint.
- Other modules that contain one transformers model, from the folder given with ``--base``. Its path in the module
  follows from the names in the checkpoint.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.base_files import base_file, base_folder
from xhf_hooks.compat.transformers import text_config
from xhf_hooks.errors import BaseModelError, ConfigError
from xhf_hooks.exporters.hf_assets import forget_use_cache
from xhf_hooks.meta_model import transformers_model
from xhf_hooks.meta_model.base_weights import BaseWeights, weights_of_base
from xhf_hooks.meta_model.beside import ADAPTER_CONFIG, config_of_trainer, folder_beside, hugging_face_folder
from xhf_hooks.meta_model.placing import below, find_class, find_prefix, has_other_tensors, place
from xhf_hooks.meta_model.run_config import RunConfig, required
from xhf_hooks.model import names_by_identity
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Fields of an XTuner model's config that hold models, and fields that hold their adapters (xtuner ``model/*.py``).
_MODELS = ('llm', 'ref_llm', 'visual_encoder')
_ADAPTERS = {'lora': 'llm', 'llm_lora': 'llm', 'visual_encoder_lora': 'visual_encoder'}


@dataclass(frozen=True)
class Base:
    """A base model.

    Attributes:
        folder: Where it is, as it was given.
        model: As it was built. Since then, peft may have adapted it.
        names: Names in it, by ``id`` of the meta model's tensor.
        weights: Its weights by these names, none if it has no files of them; None if it is not on this machine.
    """

    folder: str
    model: PreTrainedModel
    names: Mapping[int, list[str]]
    weights: Mapping[str, StoredTensor] | None

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        """Whether the run is known to have frozen one of its tensors: by peft, or by an option of XTuner's model.

        Buffers count as frozen if parameters are.
        """
        has_frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        return has_frozen and not tensor.requires_grad

    def may_lack(self, tensor: torch.Tensor) -> bool:
        """Whether transformers loads the model without this one of its tensors."""
        patterns = getattr(self.model, '_keys_to_ignore_on_load_missing', None) or ()
        return any(re.search(pattern, name) for pattern in patterns for name in self.names[id(tensor)])

    def why_not_lent(self, found: StoredTensor | None, shape: tuple[int, ...]) -> str:
        """Why it cannot lend a tensor of this shape, to continue a message.

        Args:
            found: What it has of that name.
        """
        if self.weights is None:
            return f'and {self.folder} is not on this machine'
        if not self.weights:
            return f'and {self.folder} has no safetensors to read them from (save_pretrained makes them)'
        return f'and {self.folder} {"lacks them, too" if found is None else f"has {found.shape} for {shape}"}'


@dataclass
class MetaModel:
    """The trained model on the meta device, and the base models of its parts.

    Attributes:
        described_by: The config that it was built from, for messages.
        stored: The checkpoint's tensors, by each of their names.
        path: The option ``module``; it chooses the model where the checkpoint has several.
    """

    described_by: str
    stored: Mapping[str, StoredTensor]
    trust_remote_code: bool
    path: str | None = None
    module: nn.Module = field(default_factory=nn.Module)
    bases: list[Base] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the checkpoint's tensors, by each of their names."""
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def base_of(self, tensor: torch.Tensor) -> Base | None:
        """The base that has a tensor of the meta model; None if training made it."""
        return next((base for base in self.bases if id(tensor) in base.names), None)

    def find_prefix(self, model: nn.Module, where: str) -> str:
        """The prefix of a model's tensors in the checkpoint; see :func:`.placing.find_prefix`."""
        weights = [base.weights or {} for base in self.bases]
        in_files = [tensor.name for each in weights for tensor in each.values()]
        return find_prefix(model, in_files, self.stored, self.path, where)

    def config_in(self, folder: str, why: str) -> PretrainedConfig:
        """The config of the model in a folder, or of its name in the local hub cache."""
        return transformers_model.load_config(folder, trust_remote_code=self.trust_remote_code, why=why)

    def built(
        self,
        folder: str,
        config: PretrainedConfig,
        auto_class: str | None = None,
        of_base: PretrainedConfig | None = None,
    ) -> PreTrainedModel:
        """Build a model from its config, edited to fit the checkpoint, and record its base.

        Args:
            folder: That of the base, or its name in the local hub cache.
            auto_class: The name of the model's class; None: the one that the config names.
            of_base: The base's own config, where training has another.
        """
        trust = self.trust_remote_code
        of_base = copy.deepcopy(of_base or config)
        model = transformers_model.build(config, auto_class, trust_remote_code=trust)
        if transformers_model.fit_config(config, model, self.shapes):
            model = transformers_model.build(config, auto_class, trust_remote_code=trust)
        if getattr(config, 'auto_map', None) and not trust:
            self.notes.append(f'{folder} has custom code, which was not run; --trust-remote-code allows it')
        names, where = {id(tensor): names for tensor, names in names_by_identity(model)}, base_folder(folder)
        found = BaseWeights() if where is None else weights_of_base(type(model), of_base, where)
        if found.loaded is not None:
            transformers_model.take_dtypes_of_parts(model.config, found.loaded.config)
        conversions = getattr(found.loaded, '_weight_conversions', None)
        if conversions is None and all(found.tensors.keys() & set(each) for each in names.values()):
            conversions = []  # it could not be loaded, but has the same names: from_pretrained would convert nothing
        if conversions is not None:  # save_pretrained reverts them, and without any sorts the names
            model._weight_conversions = conversions
        self.bases.append(Base(folder, model, names, None if where is None else found.tensors))
        self.notes += found.notes
        return model

    def built_again(
        self, note: str, folder: str, config: PretrainedConfig, auto_class: str | None, of_base: PretrainedConfig
    ) -> PreTrainedModel:
        """Build the only model again, since the checkpoint is of another one; see :meth:`built`."""
        self.bases, self.notes = [], [note]
        return self.built(folder, config, auto_class, of_base)


def build_meta_model(
    config: RunConfig | None,
    checkpoint: Path,
    stored: Mapping[str, StoredTensor],
    *,
    base: str | None,
    module: str | None = None,
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build the model of a checkpoint.

    Args:
        checkpoint: The tag folder or file. ``config.json`` is looked for beside it and in the hook's folders.
        stored: The checkpoint's tensors, by each of their names.
        module: The option ``module``; it chooses the model where the checkpoint has several.
        base: Folder or hub name given by the user; takes precedence over the config and the checkpoint.

    Raises:
        ConfigError, BaseModelError: No usable config was found.
        DamagedError: The config describes a model that cannot be built.
    """
    meta_model = MetaModel('', stored, trust_remote_code, module)
    folder = hugging_face_folder(checkpoint)
    with quiet():
        if config is not None and config.model is not None and _is_xtuners(config.model):
            _build_xtuners(meta_model, config.model, config.where, base)
        elif base is not None or folder is not None:
            _build_of_transformers(meta_model, checkpoint, folder, base)
        else:
            found = 'no config was found' if config is None else f'{config.where} has no supported model'
            raise ConfigError(
                f"{checkpoint}: {found}, and there is no config.json beside it. Name the run's config with "
                f'--config, or a folder with the config.json of the model with --base'
            )
    return meta_model


def _build_xtuners(meta_model: MetaModel, model: Mapping[str, Any], where: str, base: str | None) -> None:
    kind = model['type'].rpartition('.')[2]
    meta_model.described_by = f'{kind} of {where}'
    module = meta_model.module
    for name in _MODELS:
        if isinstance(model.get(name), Mapping):
            child = _child_of_xtuners(meta_model, model, name, where, base if name != 'visual_encoder' else None)
            if kind == 'RewardModel' and name == 'llm':
                child = child.model  # xtuner keeps the backbone only (model/reward.py)
            module.add_module(name, child)
    for option, name in _ADAPTERS.items():
        if isinstance(model.get(option), Mapping) and hasattr(module, name):
            lora = transformers_model.lora_config_of(model[option], where)
            setattr(module, name, transformers_model.adapt(getattr(module, name), lora))
    _add_the_rest(module, model, meta_model.stored)
    _freeze(module, model)


def _child_of_xtuners(
    meta_model: MetaModel, model: Mapping[str, Any], name: str, where: str, base: str | None
) -> nn.Module:
    options, what = model[name], f'model.{name}.pretrained_model_name_or_path'
    folder = base or str(required(options.get('pretrained_model_name_or_path'), what, where))
    parts = str(required(options.get('type'), f'model.{name}.type', where)).split('.')
    auto_class = parts[-2] if parts[-1] == 'from_pretrained' and len(parts) > 1 else parts[-1]
    config = meta_model.config_in(folder, '--base' if base else f'{what} of {where}')
    transformers_model.apply_options(config, options)
    if name != 'visual_encoder':
        _enlarge_context(config, model.get('max_position_embeddings'))
    return meta_model.built(folder, config, auto_class)


def _build_of_transformers(meta_model: MetaModel, checkpoint: Path, folder: Path | None, given: str | None) -> None:
    """The config of the model, or of its adapter, is in ``folder`` beside the checkpoint, or in the given one."""
    base = given or str(folder)
    of_given = base_file(given or '', ADAPTER_CONFIG)
    adapter = of_given or base_file(str(folder or ''), ADAPTER_CONFIG)
    if adapter is None:
        meta_model.described_by = base
        config = of_base = meta_model.config_in(base, 'the model')
        if (trained := config_of_trainer(checkpoint)) is not None:
            config = meta_model.config_in(str(trained), f'{trained}/config.json')
            forget_use_cache(config, base)
            config._name_or_path = base
        model: nn.Module = _built_as_trained(meta_model, base, config, of_base)
        _take_generation_config(model, checkpoint)
    else:
        lora = transformers_model.adapter_config_in(adapter.parent)
        if given is None or of_given is not None:
            base = lora.base_model_name_or_path
        if not base:
            raise BaseModelError(f'{adapter} has no base_model_name_or_path; set it to the base model')
        meta_model.described_by = f'{adapter} and {base}'
        config = meta_model.config_in(base, 'the model')
        model = meta_model.built(base, config, transformers_model.class_for_adapter(lora, config))
        _take_generation_config(model, checkpoint)
        model = transformers_model.adapt(model, lora)
    meta_model.module = place(model, meta_model.find_prefix(model, base))


def _built_as_trained(
    meta_model: MetaModel, base: str, config: PretrainedConfig, of_base: PretrainedConfig
) -> PreTrainedModel:
    """Build the class that config.json names, or the one that has the checkpoint's tensors, with another head."""
    kind = None
    if getattr(config, 'architectures', None) is None:  # transformers 4.57 writes Qwen2-VL's into a part
        kind = find_class(config, meta_model.stored, meta_model.path, base)
    for_other_class = copy.deepcopy(config)
    model = meta_model.built(base, config, kind, of_base)
    try:
        inside = below(meta_model.find_prefix(model, base), meta_model.stored)
    except BaseModelError:  # no tensor has a name of this class
        inside = {}
    if inside and transformers_model.untie_embeddings(config, model, inside):
        return meta_model.built_again(
            'input and output embeddings differ in the checkpoint: tie_word_embeddings is set to false',
            base,
            config,
            kind,
            of_base,
        )
    if inside and not has_other_tensors(model, inside):
        return model
    other = find_class(for_other_class, meta_model.stored, meta_model.path, base)
    if other is None or other == type(model).__name__:
        return model
    return meta_model.built_again(
        f'the checkpoint is of a {other}, and {base} of a {type(model).__name__}', base, for_other_class, other, of_base
    )


def _take_generation_config(model: nn.Module, checkpoint: Path) -> None:
    """Give the model the generation config beside the checkpoint, if there is one."""
    folder = folder_beside(checkpoint, 'generation_config.json')
    if folder is not None and model.can_generate():
        model.generation_config = transformers_model.generation_config_in(str(folder))


def _is_xtuners(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get('llm'), Mapping) and 'pretrained_model_name_or_path' in model['llm']


def _enlarge_context(config: PretrainedConfig, wanted: Any) -> None:
    """Same as ``_prepare_for_long_context_training`` in xtuner ``model/sft.py``."""
    now = getattr(config, 'max_position_embeddings', None)
    if type(wanted) is int and type(now) is int and hasattr(config, 'rope_scaling'):
        factor = float(-(-wanted // now)) if wanted > now else 1.0
        config.rope_scaling = {'type': 'linear', 'factor': factor}


def _add_the_rest(module: nn.Module, model: Mapping[str, Any], names: Collection[str]) -> None:
    children = {name.partition('.')[0] for name in names}
    if 'v_head' in children:
        hidden = text_config(module.llm.config).hidden_size
        module.v_head = nn.Linear(hidden, 1, bias=False, device='meta')
    if 'ref_llm' in children and not hasattr(module, 'ref_llm'):
        module.ref_llm = nn.Module()  # a copy of llm, not exported; its tensors are skipped by name
    if 'visual_encoder' in model:
        module.projector = _projector(module, model)


def _projector(module: nn.Module, model: Mapping[str, Any]) -> nn.Module:
    """XTuner's own class: its code is exported with the weights."""
    with transformers_model.refused_as(ConfigError, "a LLaVAModel needs xtuner's projector"), torch.device('meta'):
        from xtuner.model.modules.projector import ProjectorConfig, ProjectorModel

        config = ProjectorConfig(
            visual_hidden_size=module.visual_encoder.config.hidden_size,
            llm_hidden_size=module.llm.config.hidden_size,
            depth=model.get('projector_depth', 2),
        )
        return ProjectorModel(config)


def _freeze(module: nn.Module, model: Mapping[str, Any]) -> None:
    """Freeze parts as LLaVAModel does; adapters stay trainable."""
    for name in ('llm', 'visual_encoder'):
        if model.get(f'freeze_{name}') is True:
            for path, parameter in getattr(module, name).named_parameters():
                parameter.requires_grad_('lora_' in path)
