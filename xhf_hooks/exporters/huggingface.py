"""Exports a transformers ``PreTrainedModel``: the trained model, or a part of it such as ``llm``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.compat.transformers import keeps_fp32
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.ask_load import ask_load
from xhf_hooks.exporters.ask_save import ModelTensor, SaveAnswer, has_own_save
from xhf_hooks.exporters.assets.base_files import LocatedBase, is_remote_code
from xhf_hooks.exporters.base import Export, Exporter, ExportRequest, names_read_by, specs_below
from xhf_hooks.exporters.base_dtypes import base_dtypes
from xhf_hooks.exporters.base_tensors import entries_to_copy, warn_of_base
from xhf_hooks.exporters.class_arguments import warn_of_arguments
from xhf_hooks.exporters.find_model import find_pretrained, pretrained_in, require_not_quantized
from xhf_hooks.exporters.loading_check import loading_not_checked, needs_its_code, require_none
from xhf_hooks.exporters.lora_merge import Merge, merge_adapters
from xhf_hooks.exporters.on_meta import build_on_meta, copy_on_meta
from xhf_hooks.exporters.reference import TIE, Reference, find_reference
from xhf_hooks.exporters.surroundings import Surroundings, ask_surroundings
from xhf_hooks.exporters.traced import TracedTensor, computed, traced
from xhf_hooks.exporters.traced_entries import computing_nbytes, entries_of
from xhf_hooks.format.dtypes import TORCH_DTYPES, cast_float, dtype_code
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.model import (
    model_class,
    module_tensors,
    names_by_identity,
    output_embedding,
    token_embeddings,
)
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class HuggingFaceExport(Export):
    """What is written of a model of transformers.

    Attributes:
        reference: The model that ``from_pretrained`` will build, and the config to write.
        own: The tensors of the exported model by each of their names in it. Their sources are names in the trained
            model. Tied ones are one object.
        answer: What ``save_pretrained`` of its class writes. The sources of these tensors are names in ``own``.
        surroundings: What is saved around the exported model.
        base_model: The base.
        fingerprint: Of what it was made from (:meth:`HuggingFaceExporter.fingerprint`).
    """

    reference: Reference
    own: Mapping[str, TracedTensor]
    answer: SaveAnswer
    surroundings: Surroundings
    base_model: LocatedBase
    fingerprint: str

    @property
    def config(self) -> PretrainedConfig:
        """The config to write, which must not be edited."""
        return self.reference.config

    @cached_property
    def rows(self) -> tuple[int | None, int | None]:
        """Rows of the token embeddings and of the language-modelling head; None for what the model does not have."""
        head = output_embedding(self.reference.model)
        rows = max((weight.shape[0] for weight in token_embeddings(self.reference.model)), default=None)
        return rows, None if head is None else head.shape[0]

    @cached_property
    def warnings_of_base(self) -> list[str]:
        """Warnings about what the base has, and the save lacks or has in another form.

        Reading the headers of a large base takes a second. Runs on: the thread that trains, at first, since it may ask
        ``from_pretrained``.
        """
        told = self.reference.differences_without_arguments.get('missing', ())
        return warn_of_base([*self.own], self.entries, self.reference.model, self.base_model, told)


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
        # The dtype of the model as a whole, which config.json names; single tensors may have another one (below)
        model_dtype = request.dtype if base is None else base.of_model
        own = self.own_tensors(request.specs)
        reference = self.find_reference(own, replace(request, dtype=model_dtype))
        warnings = warn_of_arguments(self.written_class, reference.arguments, reference.differences_without_arguments)
        answer, of_generation = self._ask_save(own, reference, model_dtype)
        warnings += of_generation
        warnings += hf_assets.warn_of_own_save(self.model_to_ask(reference.model), answer)
        answer, of_older_readers = self.for_older_readers(answer, reference)
        warnings += of_older_readers
        entries = entries_of(answer.weights, own)
        if base is not None:
            entries = base.applied_to(entries, reference.model.base_model_prefix)
        elif model_dtype is not None:
            entries = self._cast(entries, model_dtype, own, reference)
        copied = []
        if request.carry_base is not None:
            copied = entries_to_copy([entry.hf_name for entry in entries], reference.model, self.base_model)
        surroundings = ask_surroundings(request, self._path, names_read_by(entries))
        return HuggingFaceExport(
            entries=(*entries, *copied, *surroundings.entries),
            combine_nbytes=computing_nbytes(entries, own.values()),
            n_parameters=reference.model.num_parameters() if _writes_n_parameters() else None,
            reference=reference,
            own=own,
            answer=answer,
            surroundings=surroundings,
            base_model=self.base_model,
            fingerprint=fingerprint,
            warnings=(*warnings, *surroundings.warnings),
        )

    def fingerprint(self) -> str:
        """What saves depend on besides tensors, as text: the configs, and what the class's own save may write."""
        generation = getattr(self._model, 'generation_config', None)
        attributes = _plain_attributes(self._model) if has_own_save(self._model) else {}
        return repr((self._model.config.to_dict(), None if generation is None else generation.to_dict(), attributes))

    def is_outdated(self, export: HuggingFaceExport) -> bool:
        return export.fingerprint != self.fingerprint()

    @property
    def written_class(self) -> type[PreTrainedModel]:
        """The class whose tensors are written, and that config.json names: that of the trained model, or another."""
        return model_class(self._model)

    def own_tensors(self, specs: Sequence[TensorSpec]) -> dict[str, TracedTensor]:
        """The exported model's tensors by each of their names in it, in the order of its state dict.

        Each is made of tensors of the source, and tied ones are one object.
        """
        found = specs_below(self._path, specs)
        order = {name: i for i, (name, _) in enumerate(module_tensors(self._model))}
        live = dict(sorted(found.items(), key=lambda item: order[item[0]]))
        own: Mapping[str, TensorSpec | Merge] = live
        if self._adapters:
            own = merge_adapters(self._model, self._adapters, live)
        sources = {spec.name: traced(spec.name, spec.shape, TORCH_DTYPES[spec.dtype]) for spec in found.values()}

        @cache  # tied names have the same merge
        def merged(merge: Merge) -> TracedTensor:
            shape, dtype = sources[merge.base].shape_and_dtype
            return computed(shape, dtype, merge, {read: sources[read] for read in merge.reads})

        return {n: sources[one.name] if isinstance(one, TensorSpec) else merged(one) for n, one in own.items()}

    def find_reference(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> Reference:
        """The model that ``from_pretrained`` will build, and the config of it.

        Args:
            request: Its ``dtype`` is resolved: never AS_IN_BASE.
        """
        return find_reference(
            self.written_class,
            self.written_config(own, request),
            own,
            lambda config, arguments: self.build_reference(config, own, arguments),
            may_untie=bool(self._adapters),
            where=self._path,
        )

    def written_config(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> PretrainedConfig:
        """The config to write, not yet corrected where it contradicts the weights.

        Args:
            request: Its ``dtype`` is resolved: never AS_IN_BASE.
        """
        # config.json has the dtype of the first float tensor. With adapters that may be peft's trained copy of a module
        # (`modules_to_save`), not the model's own first parameter, whose dtype `model.dtype` is
        dtypes = [one.shape_and_dtype[1] for one in own.values()] if self._adapters else []
        trained = next((one for one in dtypes if one.is_floating_point), self._model.dtype)
        return hf_assets.exported_config(self._model, request.dtype, self.base_model, trained)

    def build_reference(
        self, config: PretrainedConfig, own: Mapping[str, TracedTensor], arguments: Mapping[str, Any] | None = None
    ) -> PreTrainedModel:
        """The model that ``from_pretrained`` will build, on the meta device."""
        kind = self.written_class
        try:
            return build_on_meta(kind, config, arguments)
        except Exception:  # of any type, from custom code
            if kind is not model_class(self._model) or kind.__module__.partition('.')[0] == 'transformers':
                raise
            # Custom code may want more than a config. Loading cannot be tried then, and check_loading() says so
            return copy_on_meta(self._model, config, {name: one.shape_and_dtype[0] for name, one in own.items()})

    def model_to_ask(self, reference: PreTrainedModel) -> PreTrainedModel:
        """The model whose class is asked what it saves: the trained one; where another class is written, the reference.

        Args:
            reference: The model that ``from_pretrained`` will build.
        """
        return self._model if self.written_class is model_class(self._model) else reference

    def for_older_readers(self, answer: SaveAnswer, reference: Reference) -> tuple[SaveAnswer, list[str]]:
        """See :func:`.hf_assets.for_older_readers`."""
        model = self.model_to_ask(reference.model)
        return hf_assets.for_older_readers(model, answer, reference.config, self.base_model)

    def _ask_save(
        self, own: Mapping[str, TracedTensor], reference: Reference, dtype: str | None
    ) -> tuple[SaveAnswer, list[str]]:
        in_reference = {name: id(tensor) for name, tensor in module_tensors(reference.model)}
        tensors = {}
        for name, one in own.items():
            shape, trained = one.shape_and_dtype
            # Tied only if both the trained model and the reference tie them: else loading would not, and each name is
            # written. Each float has the dtype of config.json here; _cast() knows the exceptions
            tie_key = (id(one), in_reference.get(name))
            tensors[name] = ModelTensor(shape, TORCH_DTYPES[cast_float(dtype_code(trained), dtype)], tie_key)
        model = self.model_to_ask(reference.model)
        return hf_assets.ask_with_generation_config(model, self._model, tensors, reference.config, self.base_model)

    def _cast(
        self, entries: Sequence[ExportEntry], dtype: str, own: Mapping[str, TracedTensor], reference: Reference
    ) -> list[ExportEntry]:
        """The entries with this dtype, except those that ``from_pretrained`` with this dtype keeps in fp32.

        Such as DeepSeek-V3's ``e_score_correction_bias``. The rule differs between versions, and between parameters and
        buffers, so the installed one loads them, empty. Of the others most have this dtype already, as
        :meth:`_ask_save` gave it to them; a ``save_pretrained`` of the class's own may have cast some.
        """
        kept: set[str] = set()
        if dtype != 'F32' and keeps_fp32(reference.model):
            kind = self._class_that_loads
            try:
                by_name = {entry.hf_name: entry for entry in entries}
                wide = ask_load(kind, reference.config, by_name, TORCH_DTYPES[dtype], reference.arguments).fp32_names
            except Exception as error:  # of any type, from custom code
                expected = f'None, since {kind.__name__} keeps tensors in fp32, and it is unknown which: {error!r}'
                raise OptionError('dtype', expected, dtype) from error
            kept = {own[name].sources[0] for name in wide if name in own}
        return [
            replace(entry, dtype=cast_float(entry.dtype, dtype if kept.isdisjoint(entry.reads) else 'F32'))
            for entry in entries
        ]

    def check_loading(self, export: HuggingFaceExport, placements: Sequence[Placement]) -> list[str]:
        export.warnings_of_base  # noqa: B018  # found here, before a save in the background asks for them
        reference, own, written_names = export.reference, export.own, export.answer.written_names
        kind = self._class_that_loads
        other_files = {entry.file_set.whole_file for entry in export.entries if entry.file_set != FileSet()}
        copied = {entry.hf_name for entry in export.entries if entry.copied_from is not None}
        # The class does not load what is copied
        by_name = {one.hf_name: one for one in placements if one.file not in other_files and one.hf_name not in copied}
        try:
            loaded = ask_load(kind, reference.config, by_name, arguments=reference.arguments)
        except ModelError:
            raise
        except Exception as error:  # of any type, from custom code; or accelerate is missing, which loading needs
            return [loading_not_checked(kind, error)]
        problems = dict(loaded.problems)
        written = {id(own[name]) for name in written_names}
        for _, names in names_by_identity(loaded.model):
            known = [name for name in names if name in own]
            if len({id(own[name]) for name in known}) > 1:
                problems.setdefault('tied, but trained apart', []).append(' and '.join(known))
            elif written_names.isdisjoint(known) and any(id(own[name]) in written for name in known):
                # None of its names is in the files, and loading ties it to no tensor that is. A class may leave out
                # what it does not need: then nothing that is tied to it is written, either
                problems.setdefault('not tied to what is saved', []).append(known[0])
        if problems.get('tied, but trained apart'):
            require_none(problems, kind.__name__, f"set {TIE} to False in the model's config before training")
        require_none(problems, kind.__name__)
        comes_with_code = is_remote_code(self._model) or bool(getattr(export.config, 'auto_map', None))
        return [] if comes_with_code else needs_its_code(kind)

    @property
    def _class_that_loads(self) -> type[PreTrainedModel]:
        """The class by the name in config.json: of transformers, or the written one itself if it is custom code."""
        import transformers

        kind = self.written_class
        return kind if is_remote_code(self._model) else getattr(transformers, kind.__name__, kind)

    def write_hf_assets(
        self, export: HuggingFaceExport, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        warnings = hf_assets.compare_vocabulary(tokenizer, *export.rows, self)
        model = self.model_to_ask(export.reference.model)
        warnings += hf_assets.write(folder, model, export.answer, tokenizer, eos_token_ids, self.base_model)
        return warnings + export.warnings_of_base + export.surroundings.write(folder, self._path)


def _plain_attributes(model: nn.Module) -> dict[str, str]:
    """The model's own attributes that JSON can hold, such as a counter that its ``save_pretrained`` writes."""
    found = {}
    for name in vars(model).keys() - vars(nn.Module()).keys():
        with suppress(TypeError, ValueError):
            found[name] = json.dumps(vars(model)[name], sort_keys=True)
    return dict(sorted(found.items()))


@cache
def _writes_n_parameters() -> bool:
    """Whether ``save_pretrained`` of the installed transformers writes ``total_parameters``, as since 5."""
    from transformers import PreTrainedModel

    return 'total_parameters' in inspect.getsource(PreTrainedModel.save_pretrained)
