"""The trained model on the meta device, and the base models that lend it what the checkpoint lacks."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.compat.transformers import (
    conversions_of_text_model,
    dtype_field,
    ignored_keys,
    record_conversions,
    recorded_conversions,
)
from xhf_hooks.exporters.assets.base_files import find_base_folder
from xhf_hooks.model import names_by_identity
from xhf_hooks.offline.model import transformers_model
from xhf_hooks.offline.model.base_weights import BaseWeights, weights_of_base
from xhf_hooks.offline.model.find_class import find_class, find_prefix
from xhf_hooks.offline.model.starting_weights import StartingWeights
from xhf_hooks.sources.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Base:
    """A base model.

    Attributes:
        folder: Where it is, as it was given.
        model: As it was built. Since then, peft may have adapted it.
        names: Names in it, by ``id`` of the meta model's tensor.
        weights: Its weights by these names, none if it has no files of them; None if it is not on this machine.
        is_save_of_run: Whether it is a save of this run by the hook. Such a save lends no weights: those that an
            adapter adapts are merged with it there, and the folder may be of another run in the same work_dir.
    """

    folder: str
    model: PreTrainedModel
    names: Mapping[int, list[str]]
    weights: Mapping[str, StoredTensor] | None
    is_save_of_run: bool = False

    def tensor(self, tensor: torch.Tensor) -> StoredTensor | None:
        """What it lends for one of its tensors; None if it lends nothing."""
        weights = {} if self.is_save_of_run or self.weights is None else self.weights
        return next((weights[name] for name in self.names[id(tensor)] if name in weights), None)

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        """Whether the run is known to have frozen one of its tensors: by peft, or by its config.

        Buffers count as frozen if parameters are.
        """
        has_frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        return has_frozen and not tensor.requires_grad

    def may_lack(self, tensor: torch.Tensor) -> bool:
        """Whether transformers loads the model without this one of its tensors."""
        patterns = ignored_keys(self.model, 'load_missing')
        return any(re.search(pattern, name) for pattern in patterns for name in self.names[id(tensor)])

    def why_not_lent(self, found: StoredTensor | None, shape: tuple[int, ...]) -> str:
        """Why it cannot lend a tensor of this shape, to continue a message.

        Args:
            found: What it has of that name.
        """
        if self.is_save_of_run:
            return f'and {self.folder}, a save of this run, lends no weights, since adapters may be merged in it'
        if self.weights is None:
            return f'and {self.folder} is not on this machine'
        if not self.weights:
            return f'and {self.folder} has no files of weights to read them from'
        if found is None:
            return f'and {self.folder} lacks them, too'
        problem = f'and {self.folder} has {found.shape} for {shape}'
        if len(shape) > 1 and found.shape[1:] == shape[1:] and found.shape[0] < shape[0]:
            problem += ': if training added rows, nobody saved them (Trainer saves frozen embeddings nowhere at ZeRO-3)'
        return problem


@dataclass
class MetaModel:
    """The trained model on the meta device, and the base models of its parts.

    Attributes:
        stored: The checkpoint's tensors, by each of their names.
        path: The option ``module``; it chooses the model where the checkpoint has several.
        architecture: The option of that name: the class that was trained. It takes precedence over config.json.
        trained: Names of the parameters that the checkpoint records as trained, all of which it has; None if it records
            none.
        described_by: The config that it was built from, for messages.
        has_config_of_base: Whether its config is the base's, since the run has left none of its own.
        over_base: What the run loaded over the weights of its base.
    """

    stored: Mapping[str, StoredTensor]
    trust_remote_code: bool
    path: str | None
    architecture: str | None
    trained: frozenset[str] | None
    notes: list[str]
    described_by: str = ''
    module: nn.Module = field(default_factory=nn.Module)
    bases: list[Base] = field(default_factory=list)
    has_config_of_base: bool = False
    over_base: StartingWeights = field(default_factory=StartingWeights)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the checkpoint's tensors, by each of their names."""
        return {name: tensor.shape for name, tensor in self.stored.items()}

    @property
    def base_folders(self) -> str:
        """The folders of the bases, for messages."""
        return ' and '.join(base.folder for base in self.bases)

    def base_of(self, tensor: torch.Tensor) -> Base | None:
        """The base that has a tensor of the meta model; None if training made it."""
        return next((base for base in self.bases if id(tensor) in base.names), None)

    def find_prefix(self, model: nn.Module, where: str) -> str:
        """The prefix of a model's tensors in the checkpoint; see :func:`.find_class.find_prefix`."""
        return find_prefix(model, self._names_in_files(), self.stored, self.path, where)

    def find_class(
        self, config: PretrainedConfig, of_base: PreTrainedModel | None, where: str
    ) -> type[PreTrainedModel] | None:
        """The class that was trained, if it is another one than the base's; see :func:`.find_class.find_class`."""
        return find_class(config, self.stored, self.path, where, of_base, self._names_in_files())

    def _names_in_files(self) -> list[str]:
        weights = [base.weights or {} for base in self.bases]
        return [tensor.name for each in weights for tensor in each.values()]

    def config_in(self, folder: str, why: str, remedy: str = transformers_model.NAME_BASE) -> PretrainedConfig:
        """The config of the model in a folder, or of its name in the local hub cache."""
        trust = self.trust_remote_code
        config = transformers_model.load_config(folder, trust_remote_code=trust, why=why, remedy=remedy)
        named = transformers_model.first_architecture(getattr(config, 'architectures', None))
        plain = transformers_model.without_wrapper(named)
        if plain != named:
            config.architectures = [plain]
            note = f'{folder}/config.json names the class {named}, as FSDP calls a {plain}'
            self.notes += [note] if note not in self.notes else []
        return config

    def built(
        self,
        folder: str,
        config: PretrainedConfig,
        auto_class: str | None = None,
        of_base: PretrainedConfig | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        is_save_of_run: bool = False,
    ) -> PreTrainedModel:
        """Build a model from its config, edited to fit the checkpoint, and record its base.

        Args:
            folder: That of the base, or its name in the local hub cache.
            auto_class: The name of the model's class; None: the one that the config names.
            of_base: The base's own config, where training has another.
            arguments: Keyword arguments of the model class besides the config.
            is_save_of_run: See :class:`Base`.
        """
        trust = self.trust_remote_code
        named = transformers_model.first_architecture(getattr(config, 'architectures', None))
        kind = transformers_model.class_named(auto_class or named)
        config, of_base = (transformers_model.config_of_class(kind, one) for one in (config, of_base or config))
        of_base = copy.deepcopy(of_base)
        model = transformers_model.build_fitting(
            config, auto_class, self.shapes, trust_remote_code=trust, arguments=arguments
        )
        if getattr(config, 'auto_map', None) and not trust:
            self.notes.append(f'{folder} has custom code, which was not run; --trust-remote-code allows it')
        names, where = {id(tensor): names for tensor, names in names_by_identity(model)}, find_base_folder(folder)
        found = BaseWeights() if where is None else weights_of_base(type(model), of_base, where)
        if found.loaded is not None:
            _take_dtypes_of_parts(model.config, found.loaded.config)
        conversions = recorded_conversions(found.loaded)
        if conversions is None and all(found.tensors.keys() & set(each) for each in names.values()):
            conversions = []  # it could not be loaded, but has the same names: from_pretrained would convert nothing
        if conversions is None and not found.tensors:
            conversions = conversions_of_text_model(model)
            if conversions is not None:
                self.notes.append(
                    f'{folder} has no weights of a base, so the names in OUT are those of a vision-language base, of '
                    f'which AutoModelForCausalLM makes a {type(model).__name__}; give --base if it was another one'
                )
        if conversions is not None:  # save_pretrained reverts them, and without any sorts the names
            record_conversions(model, conversions)
        weights = None if where is None else found.tensors
        self.bases.append(Base(folder, model, names, weights, is_save_of_run))
        self.notes += found.notes
        return model

    def forget_built(self, notes: Sequence[str]) -> None:
        """Forget the only model, which is to be built otherwise.

        Args:
            notes: Those that hold for the next one.
        """
        self.bases, self.notes = [], [*notes]


def _take_dtypes_of_parts(config: PretrainedConfig, loaded: PretrainedConfig) -> None:
    """Give parts of a composite config without a dtype the one that ``from_pretrained`` gives them."""
    option = dtype_field(config)
    for name, part in vars(config).items():
        if hasattr(part, 'model_type') and getattr(part, option, None) is None:
            setattr(part, option, getattr(vars(loaded).get(name), option, None))
