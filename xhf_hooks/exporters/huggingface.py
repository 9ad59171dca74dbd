"""Exports a transformers ``PreTrainedModel``: the trained model, or a part of it such as XTuner's ``llm``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.base_model.files import is_remote_code
from xhf_hooks.compat.transformers import (
    converts_weights,
    ignored_keys,
    keeps_fp32,
    record_conversions,
    recorded_conversions,
    text_config,
    tied_while_built,
)
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.base import Exporter, specs_below
from xhf_hooks.exporters.base_dtypes import base_dtypes
from xhf_hooks.exporters.base_tensors import entries_to_copy, warn_of_missing
from xhf_hooks.exporters.built_with import find_arguments, warn_of_arguments
from xhf_hooks.exporters.computed import ComputedTensor, computing_nbytes, with_computed
from xhf_hooks.exporters.find_model import find_pretrained, pretrained_in, require_not_quantized
from xhf_hooks.exporters.loading_check import (
    differences,
    load_and_find_fp32,
    load_empty,
    loading_not_checked,
    needs_its_code,
    require_none,
)
from xhf_hooks.exporters.lora_merge import merge_adapters
from xhf_hooks.exporters.on_meta import build_on_meta, copy_on_meta
from xhf_hooks.exporters.surroundings import entries_around, files_of, write_what_surrounds
from xhf_hooks.exporters.ties import TIE, are_embeddings_tied, ignored_names, matches, reads_tie, redundant_names
from xhf_hooks.exporters.weight_conversion import convert_specs
from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.model import (
    input_embedding,
    model_class,
    module_tensors,
    names_by_identity,
    output_embedding,
    token_embeddings,
)
from xhf_hooks.planning.types import ExportEntry, Placement, TensorSpec
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

    from xhf_hooks.exporters.loading_check import Problems


@EXPORTERS.register_module()
class HuggingFaceExporter(Exporter):
    """Writes the same names and bytes as ``save_pretrained``, without a state dict of the full model.

    Before anything is gathered, a reference model is built on the meta device from the config to be written, as
    ``from_pretrained`` will do. Its names and shapes must match the trained model.

    Args:
        adapters: PeftModels to merge, by path in the exported model; '' for the one around it.

    Raises:
        ModelError: There is not exactly one such model, or ``module`` is not one.
    """

    writes_whole_model = True

    def __init__(self, model: nn.Module, module: str | None, adapters: Mapping[str, PeftModel] | None = None) -> None:
        self._path, self._model = find_pretrained(model, module)
        self._adapters = adapters or {}
        self._computed: dict[str, ComputedTensor] = {}  # by the source name of the replaced tensor
        self._reference: PreTrainedModel | None = None
        # The trained tensors by each of their names in the exported module; the reference must have the same names
        self._names: dict[str, TensorSpec] = {}
        self._not_written: set[str] = set()  # of these names
        self._hf_names: list[str] = []  # those that are written
        self._copied: set[str] = set()  # those of them that are copied from the base
        self._missing: list[str] | None = None  # a warning about what the base has, and they lack
        # Weight files of modules around the exported model, such as a SentenceTransformer's Dense; it loads them itself
        self._around: set[str] = set()
        self._config_dtype: str | None = None
        self._vocab_size: int | None = None  # of resized embeddings
        self._is_tied: bool | None = None  # where the config says otherwise
        self._arguments: dict[str, Any] = {}  # of the class, besides its config
        self._without_arguments: Problems = {}  # what they change
        self._planned_config: dict[str, Any] = {}  # that of the live model, when entries() was called
        require_not_quantized(self._model)

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return bool(pretrained_in(model))

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        own = self._names = self._own_names(specs)
        base = base_dtypes(self.base_model) if dtype == AS_IN_BASE else None
        self._config_dtype = dtype if base is None else base.of_model
        self._vocab_size = self._is_tied = None  # `_config` puts them into the live model's config once they are found
        self._arguments, self._without_arguments = {}, {}
        hf_assets.require_json(self._model)
        self._planned_config = self._model.config.to_dict()
        self._reference = self._build_reference(self._config)
        embedding = input_embedding(self._reference)
        names = [name for name, tensor in module_tensors(self._reference) if tensor is embedding and name in own]
        rows = own[names[0]].shape[0] if names else None
        # Not compared with vocab_size: mllama's embedding has more rows than that
        if embedding is not None and rows not in (None, embedding.shape[0]):
            self._vocab_size = rows  # training resized it
            self._reference = self._build_reference(self._config)
        self._is_tied = self._misdescribed_tie(own)
        if self._is_tied is not None and not self._can_describe_tie(self._is_tied):
            self._is_tied = None
        elif self._is_tied is not None:
            self._reference = self._build_reference(self._config)
        self._find_arguments(own)
        self._compare_with_reference(own)
        self._not_written = set(redundant_names(self._reference, own))
        own = {name: spec for name, spec in own.items() if name not in self._not_written}
        entries = self._convert(own)
        if base is not None:
            entries = base.applied_to(entries, self._reference.base_model_prefix)
        elif dtype is not None:
            entries = self._cast(entries, dtype)
        entries = with_computed(entries, self._computed)
        self._hf_names, self._copied, self._missing = [entry.hf_name for entry in entries], set(), None
        self.combine_nbytes = computing_nbytes(entries, self._computed)
        self.n_parameters = self._reference.num_parameters() if _writes_n_parameters() else None
        if self.carry_base is not None:
            copied = entries_to_copy(self._hf_names, self._reference, self.base_model)
            self._copied, entries = {entry.hf_name for entry in copied}, [*entries, *copied]
            self._hf_names = [entry.hf_name for entry in entries]
        read = {name for entry in entries for name in entry.reads}
        around = entries_around(self.whole, self._path, specs, dtype, read)
        self._around, entries = files_of(around), [*entries, *around]
        read.update(name for entry in around for name in entry.reads)
        self.left_out = tuple(spec.name for spec in specs if spec.name not in read)
        return entries

    def _cast(self, entries: Sequence[ExportEntry], dtype: str) -> list[ExportEntry]:
        """The entries with a dtype, except those that ``from_pretrained`` with this dtype keeps in fp32.

        Such as DeepSeek-V3's ``e_score_correction_bias``. The rule differs between versions, and between parameters and
        buffers, so the installed one loads them, empty.
        """
        kept: set[str] = set()
        if dtype != 'F32' and keeps_fp32(self._reference):
            kind = self._class_that_loads()
            try:
                wide = load_and_find_fp32(kind, self._config, entries, TORCH_DTYPES[dtype], self._arguments)
            except Exception as error:  # of any type, from custom code
                expected = f'None, since {kind.__name__} keeps tensors in fp32, and it is unknown which: {error!r}'
                raise OptionError('dtype', expected, dtype) from error
            kept = {self._names[name].name for name in wide if name in self._names}
        result = []
        for entry in entries:
            if is_float(entry.dtype):
                entry = replace(entry, dtype=dtype if kept.isdisjoint(entry.reads) else 'F32')
            result.append(entry)
        return result

    def check_loading(self, placements: Sequence[Placement]) -> list[str]:
        config, kind = self._config, self._class_that_loads()
        placements = [one for one in placements if one.file not in self._around]
        placements = [one for one in placements if one.hf_name not in self._copied]  # which the class does not load
        try:
            loaded, problems = load_empty(kind, config, placements, arguments=self._arguments)
        except ModelError:
            raise
        except Exception as error:  # of any type, from custom code; or accelerate is missing, which loading needs
            return [loading_not_checked(kind, error)]
        restored: set[str] = set()
        # transformers 4 restores these ties while it builds the class, but not with the device map of this check
        if problems['missing'] and not converts_weights():
            restored = tied_while_built(build_on_meta(kind, config, self._arguments), self._not_written)
        problems['missing'] = [name for name in problems['missing'] if name not in restored]
        may_be_untied = ignored_names(self._reference) | restored  # names that the class never writes, or ties itself
        for _, names in names_by_identity(loaded):
            known = [name for name in names if name in self._names]
            if len({self._names[name].name for name in known}) > 1:
                problems.setdefault('tied, but trained apart', []).append(' and '.join(known))
            elif known and self._not_written.issuperset(known) and not may_be_untied.issuperset(known):
                # None of its names is in the files, and loading ties it to no tensor that is
                problems.setdefault('not tied to what is saved', []).append(known[0])
        if problems.get('tied, but trained apart'):
            require_none(problems, kind.__name__, f"set {TIE} to False in the model's config before training")
        require_none(problems, kind.__name__)
        comes_with_code = is_remote_code(self._model) or bool(getattr(config, 'auto_map', None))
        return [] if comes_with_code else needs_its_code(kind)

    def _class_that_loads(self) -> type[PreTrainedModel]:
        """The class that config.json names: of transformers, or that of the trained model if it is custom code."""
        import transformers

        of_model = model_class(self._reference)
        if is_remote_code(self._model):
            return of_model
        return getattr(transformers, of_model.__name__, of_model)

    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        warnings = self._write_hf_assets_of(self._model, folder, tokenizer, eos_token_ids)
        return warnings + write_what_surrounds(folder, self.whole, self._path, self._around)

    def _write_hf_assets_of(
        self, model: PreTrainedModel, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        rows = max((weight.shape[0] for weight in token_embeddings(self._reference)), default=None)
        head = output_embedding(self._reference)
        warnings = hf_assets.compare_vocabulary(tokenizer, rows, None if head is None else head.shape[0], self)
        warnings += warn_of_arguments(model_class(self._model), self._arguments, self._without_arguments)
        warnings += hf_assets.write(folder, model, self._config, tokenizer, eos_token_ids, self.base_model)
        if self._missing is None:  # reading the headers of a large base takes a second
            self._missing = warn_of_missing([*self._names], self._hf_names, self._reference, self.base_model)
        return warnings + self._missing

    def _own_names(self, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
        """The exported module's tensors in state-dict order, by each of their names relative to the module."""
        found = specs_below(self._path, specs)
        order = {name: i for i, (name, _) in enumerate(module_tensors(self._model))}
        own = dict(sorted(found.items(), key=lambda item: order[item[0]]))
        if self._adapters:
            own, self._computed = merge_adapters(self._model, self._adapters, own)
        return own

    @property
    def _config(self) -> PretrainedConfig:
        """The config to write: that of the live model as it is now, where it does not contradict the weights."""
        config = self._exported_config(self._names, self._config_dtype)
        if self._vocab_size is not None:
            text_config(config).vocab_size = self._vocab_size
        if self._is_tied is not None:
            for part in (config, text_config(config)):
                if getattr(part, TIE, self._is_tied) != self._is_tied:
                    setattr(part, TIE, self._is_tied)
        return config

    def _can_describe_tie(self, is_tied: bool) -> bool:
        """Whether ``tie_word_embeddings`` of the config may be set to ``is_tied`` without another effect.

        It may not if the class does more with that field (:func:`.reads_tie`), or if its config always says that there
        is a tie. Then the config stays wrong, and both names are stored. If it denies a tie, the folder has the tensor
        twice. If it claims one, transformers 5 sees that the values differ, and does not tie them.
        """
        if self._reference is not None and reads_tie(self._reference):
            return False
        config = self._config  # with the tie, since _is_tied is set
        try:
            read = type(config).from_dict(config.to_dict())
        except Exception:  # of any type, from custom code; check_loading() reports it
            return True
        return all(getattr(part, TIE, is_tied) == is_tied for part in (read, text_config(read)))

    def _misdescribed_tie(self, own: Mapping[str, TensorSpec]) -> bool | None:
        """Whether input and output embeddings are one tensor, if the config says otherwise; None if it is right."""
        ties = None if self._reference is None else are_embeddings_tied(self._reference, own)
        if ties is None:
            return None
        is_tied, is_tied_in_reference = ties
        # If a class ignores the field, model and reference are both untied, whatever the config claims, and the config
        # stays as it is. But newer peft sets the field to False when it merges an adapter, and so does this
        is_changed_by_peft = bool(self._adapters) and not is_tied
        return is_tied if is_tied != is_tied_in_reference or is_changed_by_peft else None

    def _exported_config(self, own: dict[str, TensorSpec], dtype: str | None) -> PretrainedConfig:
        # config.json has the dtype of the first float tensor. With adapters that may be peft's trained copy of a module
        # (`modules_to_save`), not the model's own first parameter, whose dtype `model.dtype` is
        codes = [spec.dtype for spec in own.values() if is_float(spec.dtype)] if self._adapters else []
        written = TORCH_DTYPES[codes[0]] if codes else self._model.dtype
        return hf_assets.exported_config(self._model, dtype, self.base_model, written)

    def _build_reference(self, config: PretrainedConfig) -> PreTrainedModel:
        """The model that ``from_pretrained`` will build, on the meta device."""
        kind = model_class(self._model)
        try:
            reference = build_on_meta(kind, config, self._arguments)
        except Exception:  # of any type, from custom code
            if kind.__module__.partition('.')[0] == 'transformers':
                raise
            # Custom code may want more than a config. Loading cannot be tried then, and check_loading() says so
            reference = copy_on_meta(self._model, config, {name: one.shape for name, one in self._names.items()})
        conversions = recorded_conversions(self._model)
        if conversions is not None and not any(map(_is_of_quantizer, conversions)):
            record_conversions(reference, conversions)
        return reference

    def _convert(self, own: dict[str, TensorSpec]) -> list[ExportEntry]:
        return convert_specs(self._reference, own)

    def is_outdated(self) -> bool:
        return self._planned_config != self._model.config.to_dict()

    def _find_arguments(self, own: dict[str, TensorSpec]) -> None:
        """If the config alone does not describe the trained model, look for more arguments that its class was given."""
        without, config = self._differences(own), self._config

        def differences_with(arguments: Mapping[str, Any]) -> Problems:
            self._arguments = dict(arguments)
            try:
                self._reference = self._build_reference(config)
            except Exception:  # of any type, from custom code
                return without
            return self._differences(own)

        if not any(without.values()):
            return
        found = find_arguments(model_class(self._model), differences_with)
        self._arguments = found or {}
        self._without_arguments = without
        self._reference = self._build_reference(config)

    def _compare_with_reference(self, own: dict[str, TensorSpec]) -> None:
        problems = self._differences(own)
        what = f'{type(self._reference).__name__}, from the model at {self._path or "the root"!r},'
        if any('lora_' in name for name in problems['unexpected']):
            require_none(problems, what, 'add LoRA weights with get_peft_model, which makes a PeftModel')
        require_none(problems, what)

    def _differences(self, own: dict[str, TensorSpec]) -> Problems:
        """How the trained model differs from the reference, apart from names that the class declares to be optional."""
        reference = self._reference
        problems = differences(
            {name: spec.shape for name, spec in own.items()},
            {name: tuple(tensor.shape) for name, tensor in module_tensors(reference)},
        )
        may_lack, may_have = ignored_keys(reference, 'load_missing'), ignored_keys(reference, 'load_unexpected')
        problems['missing'] = [name for name in problems['missing'] if not matches(may_lack, name)]
        problems['unexpected'] = [name for name in problems['unexpected'] if not matches(may_have, name)]
        return problems


def _writes_n_parameters() -> bool:
    """Whether ``save_pretrained`` of the installed transformers writes ``total_parameters``, as since 5."""
    from transformers import PreTrainedModel

    return 'total_parameters' in inspect.getsource(PreTrainedModel.save_pretrained)


def _is_of_quantizer(conversion: Any) -> bool:
    """Whether a quantizer has made this conversion when it loaded the model, such as dequantizing; it is gone since."""
    return any(hasattr(operation, 'hf_quantizer') for operation in getattr(conversion, 'operations', ()))
