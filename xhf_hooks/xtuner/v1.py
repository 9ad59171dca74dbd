"""Exports models of XTuner V1 (``xtuner.v1``), by V1's own account of which names their tensors have in a folder.

That account is ``load_spec_mapping`` of ``xtuner/v1/model/base.py``: by the name of a tensor, the names of the parts
that it is cut into along dimension 0. What is done to a part then is ``param_to_safetensor``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.ask_load import ask_load
from xhf_hooks.exporters.assets.base_files import LocatedBase, base_of
from xhf_hooks.exporters.assets.write_tokenizer import write_tokenizer
from xhf_hooks.exporters.base import Export, Exporter, ExportRequest, specs_below
from xhf_hooks.exporters.hf_assets import compare_vocabulary
from xhf_hooks.exporters.loading_check import loading_not_checked, require_none
from xhf_hooks.exporters.traced import TracedTensor, traced
from xhf_hooks.exporters.traced_entries import computing_nbytes, entries_of
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.index import WEIGHTS_NAME
from xhf_hooks.format.text import some
from xhf_hooks.model import without_wrappers
from xhf_hooks.planning.types import Placement, TensorSpec

#: What V1 copies from the folder that the model was loaded from, and what describes that folder's own weights.
_OF_OTHER_WEIGHTS = ('*.index.json', 'xhf_manifest.json', '*.safetensors')


@dataclass(frozen=True, kw_only=True)
class XtunerV1Export(Export):
    """What is written of a model of XTuner V1.

    Attributes:
        embedding_rows: Rows of the input embedding; None if there is none.
    """

    embedding_rows: int | None


class XtunerV1Exporter(Exporter[XtunerV1Export]):
    """Writes the tensors and files that V1's own ``save_hf`` writes, in one set of files with an index.

    A model that consists of several, such as Qwen3-VL's, is saved as V1 does: each part has its own names.

    Raises:
        ModelError: The model is in a form that cannot be saved right.
    """

    writes_whole_model = False  # carry_base has nothing to add: V1 saves what it loads

    def __init__(self, model: Any, module: str | None) -> None:
        self._v1 = model
        self._parts = _parts_of(model)
        for path, part in self._parts.items():
            _require_savable(path, part)

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        base_class = _base_class()
        return module is None and base_class is not None and isinstance(model, base_class)

    @property
    def base_model(self) -> LocatedBase:
        return base_of(self._v1, str(self._v1._hf_path or ''))

    def export(self, request: ExportRequest) -> XtunerV1Export:
        if request.dtype not in (None, 'BF16'):
            expected = "None or 'bfloat16', as XTuner V1 saves; fp32_keys_pattern of its hf_save_cfg names what is fp32"
            raise OptionError('dtype', expected, request.dtype)
        own: dict[str, TracedTensor] = {}
        made: dict[str, TracedTensor] = {}
        for path, part in self._parts.items():
            below = specs_below(path, request.specs)
            for name, one in _made_by(part, below, own).items():
                made.setdefault(name, one)  # of tensors with one name, V1 writes the first: tied ones
        entries = entries_of({WEIGHTS_NAME: made}, own)
        embeddings = [one for one in entries if one.hf_name.endswith('embed_tokens.weight')]
        return XtunerV1Export(
            entries=tuple(entries),
            combine_nbytes=computing_nbytes(entries, made.values()),
            embedding_rows=embeddings[0].shape[0] if embeddings else None,
        )

    def check_loading(self, export: XtunerV1Export, placements: Sequence[Placement]) -> list[str]:
        import transformers

        with tempfile.TemporaryDirectory(prefix='xhf_hooks_') as name:
            self._write_files(Path(name))
            try:
                config = transformers.AutoConfig.from_pretrained(name)
            except Exception as error:  # of any type: a class that transformers does not have, or custom code
                return [loading_not_checked(type(self._v1), error)]
        kind = getattr(transformers, next(iter(config.architectures or ()), ''), None)
        if kind is None:
            return [f'could not check in advance that saves will load: transformers has no {config.architectures}']
        try:
            loaded = ask_load(kind, config, {one.hf_name: one for one in placements})
        except ModelError:
            raise
        except Exception as error:  # of any type
            return [loading_not_checked(kind, error)]
        require_none(loaded.problems, kind.__name__)
        return []

    def write_hf_assets(
        self, export: XtunerV1Export, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        self._write_files(folder)
        if tokenizer is None:
            return []
        warnings = compare_vocabulary(tokenizer, export.embedding_rows, None, self)
        return warnings + write_tokenizer(folder, tokenizer, self.base_model)

    def _write_files(self, folder: Path) -> None:
        """The files that V1 writes beside the weights: those of the config, or of the folder that it has loaded."""
        if self._v1.config.hf_config is not None:
            self._v1.config.save_hf(folder)
            return
        source = self._v1._hf_path
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_OF_OTHER_WEIGHTS), dirs_exist_ok=True)


def _base_class() -> Any:
    """The class of all of V1's models; None if it was not imported, since then there is no such model."""
    return getattr(sys.modules.get('xtuner.v1.model.base'), 'BaseModel', None)


def _parts_of(model: Any) -> dict[str, Any]:
    """The models of V1, by path, that have names of their own in a folder: the model itself, or those in it."""
    if type(model).to_hf_key_list is not _base_class().to_hf_key_list:
        return {'': model}
    children = model.named_children()
    return {path: part for path, part in children if isinstance(part, _base_class())}


def _require_savable(path: str, part: Any) -> None:
    """Refuse what V1 may train, and no exporter saves right.

    Raises:
        ModelError: It names the setting and what to do.
    """
    where = f'{path} ({type(part).__name__})' if path else type(part).__name__
    float8 = getattr(part.config, 'float8_cfg', None)
    if float8 is not None and float8.enable_float8:
        raise ModelError(
            f'{where} is trained in FP8 (float8_cfg), whose weights are padded: save it with save_hf of XTuner V1'
        )
    if type(part).save_hf is not _base_class().save_hf:
        raise ModelError(f'{where} has a save_hf of its own: save it with that, or register an exporter')
    for name, spec in part.load_spec_mapping.items():
        if any(shard.interleave_factor > 1 for shard in getattr(spec, 'shards', ())):
            raise ModelError(
                f'{where}: {name} is split by expert tensor parallelism, each expert over several ranks: save it with '
                f'save_hf of XTuner V1, or train with expert parallelism (ep_size) and FSDP alone'
            )


def _made_by(part: Any, specs: Mapping[str, TensorSpec], own: dict[str, TracedTensor]) -> dict[str, TracedTensor]:
    """What V1 writes of a part, by name in the folder, in its order: as its ``_split_hf_tensors_for_save`` does.

    Args:
        specs: The part's tensors by name in it.
        own: Gets the tensors of the source that are read, by their names there.

    Raises:
        ModelError: V1 knows of a tensor that the part does not have, or the other way round.
    """
    mapping = part.load_spec_mapping
    if mapping.keys() != specs.keys():
        differing = sorted(mapping.keys() ^ specs.keys())
        raise ModelError(
            f'{type(part).__name__}: expected the tensors of its load_spec_mapping, found {some(differing)} in one of '
            f'the two. XTuner V1 makes that in __init__ and fully_shard: what is added to the model later is not in it'
        )
    buffers = {without_wrappers(name) for name, _ in part.named_buffers()}
    made: dict[str, TracedTensor] = {}
    for name, load_spec in mapping.items():
        spec = specs[name]
        tensor = own.setdefault(spec.name, traced(spec.name, spec.shape, TORCH_DTYPES[spec.dtype]))
        keys = _hf_names(part, load_spec)
        if tensor.dtype.is_floating_point and name not in buffers:
            tensor = tensor.to(part._get_save_dtype(keys[0], TORCH_DTYPES['BF16']))
        for key, piece in zip(keys, tensor.chunk(len(keys)), strict=True):
            made.setdefault(key, part.param_to_safetensor(piece, key))
    return made


def _hf_names(part: Any, load_spec: Any) -> list[str]:
    """The names in the folder of a tensor's parts."""
    if hasattr(load_spec, 'global_hf_keys'):
        return load_spec.global_hf_keys
    # V1.0.1: with expert parallelism, those of this rank's experts
    names = part.to_hf_key_list(load_spec.name)
    if len(names) == len(load_spec.hf_keys):
        return load_spec.hf_keys
    if part.config.hf_key_mapping:
        raise ModelError(f'{load_spec.name}: hf_key_mapping with expert parallelism needs a newer XTuner than V1.0.1')
    return names
