"""Exports a transformers ``PreTrainedModel``: the trained model, or a part of it such as XTuner's ``llm``."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.base_model.files import LocatedBase, is_remote_code
from xhf_hooks.compat.transformers import (
    ignored_keys,
    keeps_fp32,
    text_config,
)
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.ask_load import ask_load
from xhf_hooks.exporters.ask_save import ModelTensor, SaveAnswer, has_own_save
from xhf_hooks.exporters.base import Export, Exporter, ExportRequest, specs_below
from xhf_hooks.exporters.base_dtypes import base_dtypes
from xhf_hooks.exporters.base_tensors import entries_to_copy, warn_of_base
from xhf_hooks.exporters.built_with import find_arguments, warn_of_arguments
from xhf_hooks.exporters.find_model import find_pretrained, pretrained_in, require_not_quantized
from xhf_hooks.exporters.loading_check import (
    Problems,
    differences,
    loading_not_checked,
    needs_its_code,
    require_none,
)
from xhf_hooks.exporters.lora_merge import Merge, merge_adapters
from xhf_hooks.exporters.made_entries import computing_nbytes, entries_of
from xhf_hooks.exporters.on_meta import build_on_meta, copy_on_meta
from xhf_hooks.exporters.surroundings import Surroundings, ask_surroundings
from xhf_hooks.exporters.ties import TIE, are_embeddings_tied, matches, reads_tie
from xhf_hooks.exporters.traced import TracedTensor, computed, traced
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
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class HuggingFaceExport(Export):
    """What is written of a model of transformers.

    Attributes:
        reference: The model that ``from_pretrained`` will build from the config, on the meta device.
        config: The config to write: the live model's, where it does not contradict the weights.
        own: The tensors of the exported model by each of their names in it, made of tensors of the source.
        answer: What ``save_pretrained`` of its class writes.
        not_written: The names of ``own`` that are not in the files, since they are tied to others or the class leaves
            them out.
        not_written_or_tied: Of these, the names that the class leaves out: no tensor that is tied to them is written.
        copied: Names in the files of what is copied from the base.
        surroundings: What is saved around the exported model.
        arguments: Keyword arguments of its class, besides its config.
        differences_without_arguments: How the model differs from what the class builds without them.
        base_model: The base.
        fingerprint: Of what it was made from (:meth:`HuggingFaceExporter.fingerprint`).
        generation_warnings: About the generation config.
    """

    reference: PreTrainedModel
    config: PretrainedConfig
    own: Mapping[str, TracedTensor]
    answer: SaveAnswer
    not_written: frozenset[str]
    not_written_or_tied: frozenset[str]
    copied: frozenset[str]
    surroundings: Surroundings
    arguments: Mapping[str, Any]
    differences_without_arguments: Problems
    base_model: LocatedBase
    fingerprint: str
    generation_warnings: tuple[str, ...] = ()

    @cached_property
    def warnings_of_base(self) -> list[str]:
        """Warnings about what the base has, and the save lacks or has in another form.

        Reading the headers of a large base takes a second. Runs on: the thread that trains, at first, since it may ask
        ``from_pretrained``.
        """
        told = self.differences_without_arguments.get('missing', ())
        return warn_of_base([*self.own], self.entries, self.reference, self.base_model, told)


@dataclass(frozen=True)
class Built:
    """A config that does not contradict the weights, and the model that ``from_pretrained`` builds of it.

    Attributes:
        arguments: Of the class, besides the config.
        differences_without_arguments: How the trained model differs from what the class builds without them.
    """

    config: PretrainedConfig
    reference: PreTrainedModel
    arguments: Mapping[str, Any]
    differences_without_arguments: Problems


@EXPORTERS.register_module()
class HuggingFaceExporter(Exporter[HuggingFaceExport]):
    """Writes the same names and bytes as ``save_pretrained``, without a state dict of the full model.

    The class's own ``save_pretrained`` says what that is (:mod:`.ask_save`). A reference model is built on the meta
    device from the config to be written, as ``from_pretrained`` will do. Its names and shapes must match the trained
    model.

    Args:
        adapters: PeftModels to merge, by path in the exported model; '' for the one around it.

    Raises:
        ModelError: There is no such model, or several without an ``llm`` among them; ``module`` is none; or it is
            quantized.
    """

    writes_whole_model = True

    def __init__(self, model: nn.Module, module: str | None, adapters: Mapping[str, PeftModel] | None = None) -> None:
        self._path, self._model = find_pretrained(model, module)
        self._adapters = adapters or {}
        require_not_quantized(self._model)

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return bool(pretrained_in(model))

    def export(self, request: ExportRequest) -> HuggingFaceExport:
        hf_assets.require_json(self._model)
        fingerprint = self.fingerprint()
        base = base_dtypes(self.base_model) if request.dtype == AS_IN_BASE else None
        dtype = request.dtype if base is None else base.of_model
        own, replaced = self.own_tensors(request.specs)
        built = self._build(own, replace(request, dtype=dtype))
        answer, warnings = self._ask(own, built, dtype)
        entries = entries_of(answer.weights, own)
        if base is not None:
            entries = base.applied_to(entries, built.reference.base_model_prefix)
        elif dtype is not None:
            entries = self._cast(entries, dtype, own, built)
        combine_nbytes = computing_nbytes(entries, replaced)
        copied = []
        if request.carry_base is not None:
            copied = entries_to_copy([entry.hf_name for entry in entries], built.reference, self.base_model)
        read_names = {name for entry in entries for name in entry.reads}
        surroundings = ask_surroundings(request, self._path, read_names)
        read_names.update(name for entry in surroundings.entries for name in entry.reads)
        written_names = {
            name for tensors in answer.weights.values() for one in tensors.values() for name in one.sources
        }
        written_tensors = {id(own[name]) for name in written_names}
        return HuggingFaceExport(
            entries=(*entries, *copied, *surroundings.entries),
            left_out=tuple(spec.name for spec in request.specs if spec.name not in read_names),
            combine_nbytes=combine_nbytes,
            n_parameters=built.reference.num_parameters() if _writes_n_parameters() else None,
            reference=built.reference,
            config=built.config,
            own=own,
            answer=answer,
            not_written=frozenset(own) - written_names,
            not_written_or_tied=frozenset(name for name, one in own.items() if id(one) not in written_tensors),
            copied=frozenset(entry.hf_name for entry in copied),
            surroundings=surroundings,
            arguments=built.arguments,
            differences_without_arguments=built.differences_without_arguments,
            base_model=self.base_model,
            fingerprint=fingerprint,
            generation_warnings=tuple(warnings),
        )

    def fingerprint(self) -> str:
        """What saves depend on besides tensors, as text: the configs, and what the class's own save may write."""
        generation = getattr(self._model, 'generation_config', None)
        own = _plain_attributes(self._model) if has_own_save(self._model) else {}
        return repr((self._model.config.to_dict(), None if generation is None else generation.to_dict(), own))

    def is_outdated(self, export: HuggingFaceExport) -> bool:
        return export.fingerprint != self.fingerprint()

    def own_tensors(self, specs: Sequence[TensorSpec]) -> tuple[dict[str, TracedTensor], set[str]]:
        """The exported model's tensors by each of their names in it, in the order of its state dict.

        Each is made of tensors of the source, and tied ones are one object. Also the names of those tensors of the
        source in whose place something is computed, such as a merged weight.
        """
        found = specs_below(self._path, specs)
        order = {name: i for i, (name, _) in enumerate(module_tensors(self._model))}
        own = dict(sorted(found.items(), key=lambda item: order[item[0]]))
        merges: Mapping[str, Merge] = {}
        if self._adapters:
            own, merges = merge_adapters(self._model, self._adapters, own)
        sources = {spec.name: traced(spec.name, spec.shape, TORCH_DTYPES[spec.dtype]) for spec in found.values()}
        merged: dict[Merge, TracedTensor] = {}
        for merge in merges.values():
            if merge not in merged:  # tied names have the same one
                shape, dtype = sources[merge.base].description
                merged[merge] = computed(shape, dtype, merge, {read: sources[read] for read in merge.reads})
        tensors = {name: merged[merges[name]] if name in merges else sources[spec.name] for name, spec in own.items()}
        return tensors, {merge.base for merge in merged}

    def _build(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> Built:
        """Build the reference; if it differs, correct the config or find arguments of the class, and build again."""
        config = self.written_config(own, request)
        reference = self.build_reference(config, own)
        rows = _resized_rows(reference, own)
        is_tied = self._misdescribed_tie(reference, own)
        if is_tied is not None and not _can_describe_tie(_corrected(config, rows, is_tied), is_tied, reference):
            is_tied = None
        if rows is not None or is_tied is not None:
            config = _corrected(config, rows, is_tied)
            reference = self.build_reference(config, own)
        without = _differences(reference, own)
        arguments: Mapping[str, Any] = {}
        if any(without.values()):

            def differences_with(arguments: Mapping[str, Any]) -> Problems:
                try:
                    return _differences(self.build_reference(config, own, arguments), own)
                except Exception:  # of any type, from custom code
                    return without

            arguments = find_arguments(model_class(self._model), differences_with) or {}
            if arguments:
                reference = self.build_reference(config, own, arguments)
            else:
                self._refuse(without, reference)
        return Built(config, reference, arguments, without if arguments else {})

    def _refuse(self, problems: Problems, reference: PreTrainedModel) -> None:
        what = f'{type(reference).__name__}, from the model at {self._path or "the root"!r},'
        if any('lora_' in name for name in problems['unexpected']):
            remedy = (
                'train the PeftModel that get_peft_model makes, of which the adapter or the merged model is saved. '
                'add_adapter and inject_adapter_in_model put LoRA into the model itself; with add_adapter, '
                'save_pretrained of transformers writes the adapter alone'
            )
            require_none(problems, what, remedy)
        require_none(problems, what)

    def written_config(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> PretrainedConfig:
        """The config to write, not yet corrected where it contradicts the weights.

        Args:
            request: Its ``dtype`` is resolved: never AS_IN_BASE.
        """
        # config.json has the dtype of the first float tensor. With adapters that may be peft's trained copy of a module
        # (`modules_to_save`), not the model's own first parameter, whose dtype `model.dtype` is
        dtypes = [one.description[1] for one in own.values()] if self._adapters else []
        trained = next((one for one in dtypes if one.is_floating_point), self._model.dtype)
        return hf_assets.exported_config(self._model, request.dtype, self.base_model, trained)

    def build_reference(
        self, config: PretrainedConfig, own: Mapping[str, TracedTensor], arguments: Mapping[str, Any] | None = None
    ) -> PreTrainedModel:
        """The model that ``from_pretrained`` will build, on the meta device."""
        kind = model_class(self._model)
        try:
            return build_on_meta(kind, config, arguments)
        except Exception:  # of any type, from custom code
            if kind.__module__.partition('.')[0] == 'transformers':
                raise
            # Custom code may want more than a config. Loading cannot be tried then, and check_loading() says so
            return copy_on_meta(self._model, config, {name: one.description[0] for name, one in own.items()})

    def model_to_ask(self, reference: PreTrainedModel) -> PreTrainedModel:
        """The model whose class is asked what it saves."""
        return self._model

    def _ask(self, own: Mapping[str, TracedTensor], built: Built, dtype: str | None) -> tuple[SaveAnswer, list[str]]:
        in_reference = {name: id(tensor) for name, tensor in module_tensors(built.reference)}
        cast = None if dtype is None else TORCH_DTYPES[dtype]
        tensors = {}
        for name, one in own.items():
            shape, trained = one.description
            written = cast if cast is not None and trained.is_floating_point else trained
            # Tied only if both the trained model and the reference tie them: else loading would not, and each name is
            # written. Each float has the dtype of config.json here; _cast() knows the exceptions
            tensors[name] = ModelTensor(shape, written, (id(one), in_reference.get(name)))
        model = self.model_to_ask(built.reference)
        return hf_assets.ask_with_generation_config(model, self._model, tensors, built.config, self.base_model)

    def _cast(
        self, entries: Sequence[ExportEntry], dtype: str, own: Mapping[str, TracedTensor], built: Built
    ) -> list[ExportEntry]:
        """The entries with a dtype, except those that ``from_pretrained`` with this dtype keeps in fp32.

        Such as DeepSeek-V3's ``e_score_correction_bias``. The rule differs between versions, and between parameters and
        buffers, so the installed one loads them, empty.
        """
        kept: set[str] = set()
        if dtype != 'F32' and keeps_fp32(built.reference):
            kind = self._class_that_loads(built.reference)
            try:
                by_name = {entry.hf_name: entry for entry in entries}
                wide = ask_load(kind, built.config, by_name, TORCH_DTYPES[dtype], built.arguments).fp32_names
            except Exception as error:  # of any type, from custom code
                expected = f'None, since {kind.__name__} keeps tensors in fp32, and it is unknown which: {error!r}'
                raise OptionError('dtype', expected, dtype) from error
            kept = {own[name].sources[0] for name in wide if name in own}
        result = []
        for entry in entries:
            if is_float(entry.dtype):
                entry = replace(entry, dtype=dtype if kept.isdisjoint(entry.reads) else 'F32')
            result.append(entry)
        return result

    def check_loading(self, export: HuggingFaceExport, placements: Sequence[Placement]) -> list[str]:
        export.warnings_of_base  # noqa: B018  # found here, before a save in the background asks for them
        kind = self._class_that_loads(export.reference)
        other_files = {entry.file_set.whole_file for entry in export.entries if entry.file_set != FileSet()}
        # The class does not load what is copied
        own = [one for one in placements if one.file not in other_files and one.hf_name not in export.copied]
        by_name = {one.hf_name: one for one in own}
        try:
            loaded = ask_load(kind, export.config, by_name, arguments=export.arguments)
        except ModelError:
            raise
        except Exception as error:  # of any type, from custom code; or accelerate is missing, which loading needs
            return [loading_not_checked(kind, error)]
        problems = dict(loaded.problems)
        for _, names in names_by_identity(loaded.model):
            known = [name for name in names if name in export.own]
            if len({id(export.own[name]) for name in known}) > 1:
                problems.setdefault('tied, but trained apart', []).append(' and '.join(known))
            elif known and export.not_written.issuperset(known) and not export.not_written_or_tied.issuperset(known):
                # None of its names is in the files, and loading ties it to no tensor that is
                problems.setdefault('not tied to what is saved', []).append(known[0])
        if problems.get('tied, but trained apart'):
            require_none(problems, kind.__name__, f"set {TIE} to False in the model's config before training")
        require_none(problems, kind.__name__)
        comes_with_code = is_remote_code(self._model) or bool(getattr(export.config, 'auto_map', None))
        return [] if comes_with_code else needs_its_code(kind)

    def _class_that_loads(self, reference: PreTrainedModel) -> type[PreTrainedModel]:
        """The class that config.json names: of transformers, or that of the trained model if it is custom code."""
        import transformers

        of_model = model_class(reference)
        if is_remote_code(self._model):
            return of_model
        return getattr(transformers, of_model.__name__, of_model)

    def write_hf_assets(
        self, export: HuggingFaceExport, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        rows = max((weight.shape[0] for weight in token_embeddings(export.reference)), default=None)
        head = output_embedding(export.reference)
        warnings = hf_assets.compare_vocabulary(tokenizer, rows, None if head is None else head.shape[0], self)
        warnings += warn_of_arguments(model_class(self._model), export.arguments, export.differences_without_arguments)
        warnings += export.generation_warnings
        model = self.model_to_ask(export.reference)
        warnings += hf_assets.write(
            folder, model, export.config, export.answer, tokenizer, eos_token_ids, self.base_model
        )
        return warnings + export.warnings_of_base + export.surroundings.write(folder, self._path)

    def _misdescribed_tie(self, reference: PreTrainedModel, own: Mapping[str, TracedTensor]) -> bool | None:
        """Whether input and output embeddings are one tensor, if the config has to say so; None if it may stay."""
        ties = are_embeddings_tied(reference, own)
        if ties is None:
            return None
        is_tied, is_tied_in_reference = ties
        # If a class ignores the field, model and reference are both untied, whatever the config claims, and the config
        # stays as it is. But newer peft sets the field to False when it merges an adapter, and so does this
        is_changed_by_peft = bool(self._adapters) and not is_tied
        return is_tied if is_tied != is_tied_in_reference or is_changed_by_peft else None


def _plain_attributes(model: nn.Module) -> dict[str, str]:
    """The model's own attributes that JSON can hold, such as a counter that its ``save_pretrained`` writes."""
    found = {}
    for name in vars(model).keys() - vars(nn.Module()).keys():
        with suppress(TypeError, ValueError):
            found[name] = json.dumps(vars(model)[name], sort_keys=True)
    return dict(sorted(found.items()))


def _resized_rows(reference: PreTrainedModel, own: Mapping[str, TracedTensor]) -> int | None:
    """The number of rows of the input embedding, if training resized it.

    It is not compared with ``vocab_size``: mllama's embedding has more rows than that.
    """
    embedding = input_embedding(reference)
    names = [name for name, tensor in module_tensors(reference) if tensor is embedding and name in own]
    rows = own[names[0]].description[0][0] if names else None
    return None if embedding is None or rows == embedding.shape[0] else rows


def _corrected(config: PretrainedConfig, rows: int | None, is_tied: bool | None) -> PretrainedConfig:
    """A copy of the config with these rows of embeddings, and this tie of them; None leaves either as it is."""
    config = copy.deepcopy(config)
    if rows is not None:
        text_config(config).vocab_size = rows
    if is_tied is not None:
        for part in (config, text_config(config)):
            if getattr(part, TIE, is_tied) != is_tied:
                setattr(part, TIE, is_tied)
    return config


def _can_describe_tie(config: PretrainedConfig, is_tied: bool, reference: PreTrainedModel) -> bool:
    """Whether ``tie_word_embeddings`` of the config may be set to ``is_tied`` without another effect.

    It may not if the class does more with that field (:func:`.reads_tie`), or if its config always says that there
    is a tie. Then the config stays wrong, and both names are stored. If it denies a tie, the folder has the tensor
    twice. If it claims one, transformers 5 sees that the values differ, and does not tie them.

    Args:
        config: In which it is set.
    """
    if reads_tie(reference):
        return False
    try:
        read = type(config).from_dict(config.to_dict())
    except Exception:  # of any type, from custom code; check_loading() reports it
        return True
    return all(getattr(part, TIE, is_tied) == is_tied for part in (read, text_config(read)))


def _differences(reference: PreTrainedModel, own: Mapping[str, TracedTensor]) -> Problems:
    """How the trained model differs from the reference, apart from names that the class declares to be optional."""
    problems = differences(
        {name: one.description[0] for name, one in own.items()},
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
