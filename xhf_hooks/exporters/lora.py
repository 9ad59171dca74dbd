"""Exports models with LoRA adapters: as an adapter, merged, or both."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.base import CompositeExporter, Exporter, specs_below, unchanged_entries
from xhf_hooks.exporters.find_model import (
    adapters_in,
    base_path,
    find_adapter,
    find_pretrained,
    frozen_adapters,
    trained_adapter,
)
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.exporters.rehearsal import load_empty_adapter, not_rehearsed, require_none
from xhf_hooks.exporters.transformers_4.tokenizer import write_tokenizer
from xhf_hooks.format.text import counted
from xhf_hooks.model import model_class, module_tensors, token_embeddings, without_wrappers
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

#: Folder of the adapter beside a merged model. In the same folder, it would make from_pretrained load the base model.
ADAPTER_FOLDER = 'adapter'
#: peft's SAFETENSORS_WEIGHTS_NAME; peft reads no other file.
ADAPTER_FILES = FileSet(stem='adapter_model', may_split=False)


@EXPORTERS.register_module()
class LoraExporter(CompositeExporter):
    """Exports a ``PeftModel``: the trained model, or a part of it such as XTuner's ``llm``.

    Writes the adapter, the merged model, or the merged model with the adapter in a subfolder.

    Raises:
        ModelError: There is not exactly one trainable LoRA adapter, or it cannot be merged.
    """

    options: tuple[str, ...] = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'adapter') -> None:
        path, peft_model = find_adapter(model, module)
        self.parts = {}
        if lora in ('merge', 'both'):
            self.parts[''] = self._merged(model, base_path(path), peft_model)
        if lora in ('adapter', 'both'):
            self.parts[ADAPTER_FOLDER if self.parts else ''] = self._adapter(path, peft_model, alone=not self.parts)
        self._model = self.parts['']._model
        self.notes = tuple(frozen_adapters(peft_model))

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return find_adapter(model, module) is not None

    def _merged(self, model: nn.Module, path: str, peft_model: PeftModel) -> Exporter:
        return MergedExporter(model, path, {'': peft_model})

    def _adapter(self, path: str, peft_model: PeftModel, *, alone: bool) -> Exporter:
        return AdapterExporter(path, peft_model, alone=alone)


class AdapterExporter(Exporter):
    """``adapter_config.json``, ``adapter_model.safetensors`` and the model card of the adapter.

    peft's ``get_peft_model_state_dict`` selects and renames the tensors (``modules_to_save``, trained biases, resized
    embeddings). It uses names only, so it works on specs.

    Args:
        path: Path of the PeftModel in the trained model.
        alone: No merged model is written beside it; :meth:`entries` then raises a ModelError if a trained tensor
            would be lost.
    """

    def __init__(self, path: str, peft_model: PeftModel, *, alone: bool) -> None:
        self._path, self._peft_model, self._alone = path, peft_model, alone
        self._adapter = trained_adapter(peft_model)
        self._model = peft_model.get_base_model()
        self._embedding_rows: int | None = None  # known after entries()

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        from peft import get_peft_model_state_dict

        # peft uses module paths, and FSDP1 adds components to them
        live = {without_wrappers(name): name for name, _ in module_tensors(self._peft_model, as_wrapped=True)}
        own = specs_below(self._path, specs)
        by_path = {live[name]: spec for name, spec in own.items()}
        found = get_peft_model_state_dict(self._peft_model, state_dict=by_path, adapter_name=self._adapter)
        found = {without_wrappers(name): spec for name, spec in found.items()}
        read = {spec.name for spec in found.values()}
        tensors, embeddings = module_tensors(self._peft_model), set(map(id, token_embeddings(self._model)))
        rows = (own[name].shape[0] for name, tensor in tensors if id(tensor) in embeddings and name in own)
        self._embedding_rows = max(rows, default=None)
        trained = {name for name, tensor in tensors if tensor.requires_grad}
        lost = {spec.name for name, spec in own.items() if name in trained} - read
        if self._alone and lost:
            raise ModelError(
                f'{counted(len(lost), "trained tensor")} outside of the adapter would be lost: {sorted(lost)[:5]}. '
                f"Name their modules in the LoraConfig's modules_to_save, freeze them, or set lora to 'merge'"
            )
        self.left_out = tuple(spec.name for spec in specs if spec.name not in read)
        return unchanged_entries(found, dtype, ADAPTER_FILES)

    def rehearse(self, placements: Sequence[Placement]) -> list[str]:
        try:
            base = self._build_base()
            problems = load_empty_adapter(base, self._config, placements)
        except Exception as error:  # the base may be custom code
            return [not_rehearsed(model_class(self._model), error)]
        require_none(problems, f'peft, with this adapter of a {type(base).__name__},')
        return []

    def _build_base(self) -> PreTrainedModel:
        """The model onto which the adapter is loaded, on the meta device."""
        return build_on_meta(model_class(self._model), self._model.config)

    @property
    def _config(self) -> PeftConfig:
        """The config to write: that of the live adapter as it is now."""
        config = copy.copy(self._peft_model.peft_config[self._adapter])  # a deep copy could change the order of sets
        config.inference_mode = True
        return config

    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        self._peft_model.create_or_update_model_card(str(folder))
        config = self._config
        if config.base_model_name_or_path is None:  # as in peft's save_pretrained
            config.base_model_name_or_path = self._model.__dict__.get('name_or_path') or None
        auto_mapping = None
        if config.task_type is None:  # then AutoPeftModel reads the class from here
            kind = model_class(self._model)
            auto_mapping = {'base_model_class': kind.__name__, 'parent_library': kind.__module__}
        config.save_pretrained(folder, auto_mapping_dict=auto_mapping)
        hf_assets.require_vocabulary(tokenizer, self._embedding_rows, self)
        warnings = [] if tokenizer is None else write_tokenizer(folder, tokenizer, self.base_dir)
        warnings += hf_assets.lost_tokens(tokenizer, self._embedding_rows, self.base_dir)
        if not config.base_model_name_or_path:
            warnings.append(
                'adapter_config.json has no base_model_name_or_path: the model was not loaded from a folder or hub name'
            )
        return warnings


class MergedExporter(HuggingFaceExporter):
    """Writes the same files as ``merge_and_unload`` and ``save_pretrained``.

    Args:
        path: Path of the model without its adapters.
        adapters: PeftModels by path below ``path``; '' for the one that holds the whole model.
    """

    def __init__(self, model: nn.Module, path: str, adapters: Mapping[str, PeftModel]) -> None:
        super().__init__(model, path)
        if adapters and getattr(self._model.config, 'moe_implementation', None) == 'shard':
            raise ModelError(
                "merging an adapter into XTuner's sharded experts is not supported; set lora to 'adapter', or train "
                "with moe_implementation='origin'"
            )
        self._adapters = {below: trained_adapter(peft_model) for below, peft_model in adapters.items()}

    def _own_names(self, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
        """The names of the merged model: without adapters, and with replacements instead of replaced modules."""
        own = super()._own_names(specs)
        if not self._adapters:
            return own
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import other

        # The base of ModulesToSaveWrapper, which is alone before peft 0.15
        auxiliary = getattr(other, 'AuxiliaryTrainingWrapper', other.ModulesToSaveWrapper)
        self._computed = {}
        kept_below = {path: base_path(path) for path in self._adapters if path}  # by path of the wrapper
        merged: set[str] = set()
        for wrapped_path, module in self._model.named_modules(remove_duplicate=False):
            path = without_wrappers(wrapped_path)
            if isinstance(module, LoraLayer):
                kept_below[path] = f'{path}.base_layer'
                if self._adapter_at(path) in module.r:  # else it has only a frozen one
                    merged.add(self._note_merge(path, module, own))
            elif isinstance(module, other.ModulesToSaveWrapper):
                adapter = self._adapter_at(path)
                is_trained = adapter in module.modules_to_save
                kept_below[path] = f'{path}.modules_to_save.{adapter}' if is_trained else f'{path}.original_module'
            elif isinstance(module, (BaseTunerLayer, auxiliary)):
                raise _unknown(path, module)
        for name, spec in own.items():
            if spec.name in self._computed and name not in merged:
                raise _tied(name)
        return dict(_stripped(own, kept_below))

    def _adapter_at(self, path: str) -> str:
        return next(name for above, name in self._adapters.items() if not above or path.startswith(f'{above}.'))

    @property
    def _is_merged(self) -> bool:
        return bool(self._adapters)

    def _note_merge(self, path: str, layer: LoraLayer, own: dict[str, TensorSpec]) -> str:
        """Record the merge of an adapted layer; returns the relative name of the merged weight."""
        from peft.tuners.lora import layer as kinds

        adapter = self._adapter_at(path)
        with_dora, variant = layer.use_dora[adapter], getattr(layer, 'lora_variant', {}).get(adapter)
        # Old versions of peft have fewer
        names = ('Linear', 'Embedding', 'Conv1d', 'Conv2d', 'Conv3d', 'ParamWrapper')
        is_known = type(layer) in [getattr(kinds, name, None) for name in names] and (with_dora or variant is None)
        grouped = getattr(layer.get_base_layer(), 'groups', 1) > 1  # which peft cannot merge
        weight, inner = path, layer
        while hasattr(inner, 'base_layer'):  # of several parameters of one module each has its ParamWrapper
            weight, inner = f'{weight}.base_layer', inner.base_layer
        weight = f'{weight}.{getattr(layer, "parameter_name", "weight")}'
        if not is_known or grouped or getattr(layer, 'lora_bias', {}).get(adapter) or weight not in own:
            raise _unknown(path, layer)
        if layer.merged:
            raise ModelError(f'{path}: the adapter is already merged into the live model; call unmerge_adapter()')
        is_embedding = isinstance(layer, kinds.Embedding)
        part = '{}.lora_embedding_{}.{}' if is_embedding else '{}.lora_{}.{}.weight'
        of_experts = getattr(layer, 'num_experts', 1) > 1
        if of_experts:
            transposed = not getattr(layer, '_did_swap_in_out_features', False)  # peft 0.17 and 0.18 never swap
        else:
            transposed = is_embedding or bool(getattr(layer, 'fan_in_fan_out', False))
        merge = WeightMerge(
            base=own[weight].name,
            lora_a=own[part.format(path, 'A', adapter)].name,
            lora_b=own[part.format(path, 'B', adapter)].name,
            magnitude=own[f'{path}.lora_magnitude_vector.{adapter}.weight'].name if with_dora else None,
            scaling=layer.scaling[adapter],
            transposed=transposed,
            of_experts=of_experts,
        )
        if self._computed.setdefault(merge.base, merge) != merge:
            raise _tied(weight)
        return weight


@dataclass(frozen=True)
class WeightMerge:
    """Computes ``W + scaling * B A`` of one weight in fp32 (or wider), without rounding. Only reads the live model.

    The operations are those of peft's ``get_delta_weight``, ``merge`` and DoRA variants (``tuners/lora/layer.py``,
    ``variants.py``, ``dora.py``), so that fp32 linear layers equal peft's bit for bit. For 16-bit models peft rounds
    product, sum and norm; here the result is rounded once, on write.

    Attributes:
        base, lora_a, lora_b, magnitude: Source names. Shapes ``(out, in, ...)``, ``(rank, in, ...)``,
            ``(out, rank, ...)`` and, with DoRA, ``out`` elements.
        transposed: The weight is stored as ``(in, out)``: embeddings, and GPT-2's Conv1D.
        of_experts: peft's ``ParamWrapper`` of a weight ``(experts, out, in)``, or ``(experts, in, out)`` if transposed.
            The others are ``(experts * rank, in)`` and ``(out, rank * experts)``.
    """

    base: str
    lora_a: str
    lora_b: str
    magnitude: str | None
    scaling: float
    transposed: bool
    of_experts: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.base, self.lora_a, self.lora_b, self.magnitude)))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors[self.base]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = (tensors[name].to(dtype).flatten(1) for name in (self.lora_a, self.lora_b))
        if self.of_experts:
            a, b = a.reshape(len(weight), -1, a.shape[1]), b.reshape(len(b), -1, len(weight))
            merged = torch.einsum(f'ore,eri->{"eio" if self.transposed else "eoi"}', b, a).mul_(self.scaling)
            return merged.add_(weight)
        merged = (b @ a).mul_(self.scaling)  # in place from here on, to save memory
        merged += weight.T if self.transposed else weight.reshape(merged.shape)
        if self.magnitude is not None:
            factor = tensors[self.magnitude].to(dtype).flatten() / torch.linalg.norm(merged, dim=1)
            merged *= factor.unsqueeze(1)
        return (merged.T if self.transposed else merged).reshape(weight.shape)


def _stripped(own: Mapping[str, TensorSpec], kept_below: Mapping[str, str]) -> Iterator[tuple[str, TensorSpec]]:
    """Rename the kept tensors of each wrapper to the wrapper's path, and drop the others."""
    for name, spec in own.items():
        parts = name.split('.')
        above = ['.'.join(parts[:end]) for end in range(1, len(parts))]
        wrappers = [path for path in above if path in kept_below]
        if all(name.startswith(f'{kept_below[path]}.') for path in wrappers):
            for path in reversed(wrappers):  # innermost first, so that outer prefixes still match
                name = path + name.removeprefix(kept_below[path])
            yield name, spec


def _tied(name: str) -> ModelError:
    return ModelError(
        f'{name} is tied to a layer with another adapter or none, and merging would change both; set lora to '
        f"'adapter', or remove the tied layer from target_modules"
    )


def _unknown(path: str, found: object) -> ModelError:
    return ModelError(
        f'{path}: merging {type(found).__module__}.{type(found).__name__} is not supported as configured (supported: '
        f'lora.Linear, Embedding, ParamWrapper and ConvNd without groups, with or without DoRA but without lora_bias, '
        f"and modules_to_save); set lora to 'adapter'"
    )


@EXPORTERS.register_module()
class NestedLoraExporter(MergedExporter):
    """Exports a ``PreTrainedModel`` with adapters on some parts, such as XTuner's ``InternVL_V1_5``, merged and whole.

    The parts cannot be loaded separately, and other trained weights (InternVL's ``mlp1``) must be saved with them.
    XTuner's ``configs/internvl/v1_5/convert_to_official.py`` does the same.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'merge') -> None:
        path, pretrained = find_pretrained(model, module)
        adapters = adapters_in(pretrained)
        if lora != 'merge':
            expected = f"None or 'merge', because {type(pretrained).__name__} has adapters on {sorted(adapters)}, which"
            raise OptionError('lora', f'{expected} cannot be loaded separately', lora)
        super().__init__(model, path, adapters)
        self.notes = tuple(note for peft_model in adapters.values() for note in frozen_adapters(peft_model))

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        try:
            _, pretrained = find_pretrained(model, module)
        except ModelError:
            return False
        return bool(adapters_in(pretrained))
