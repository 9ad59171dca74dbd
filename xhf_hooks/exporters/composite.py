"""Combines several exporters, each with a folder in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.exporters.base import Exporter
from xhf_hooks.planning.types import ExportEntry, TensorSpec

if TYPE_CHECKING:
    from xhf_hooks.exporters.lora.adapter import AdapterExporter


class CompositeExporter(Exporter):
    """Base class of exporters with several parts. Subclasses set both attributes in the constructor.

    Attributes:
        parts: Exporters by folder, relative to the checkpoint (``''`` is the checkpoint itself).
        tokenizer_folder: Folder of the part that gets the tokenizer; None if no part gets it.
    """

    parts: dict[str, Exporter | AdapterExporter]
    tokenizer_folder: str | None = ''

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        entries = []
        for folder, part in self.parts.items():
            for entry in part.entries(specs, dtype):
                entries.append(replace(entry, file_set=replace(entry.file_set, folder=folder)))
        self.combine_nbytes = max(part.combine_nbytes for part in self.parts.values())
        left_out = [set(part.left_out) for part in self.parts.values()]
        self.left_out = tuple(spec.name for spec in specs if all(spec.name in names for names in left_out))
        return entries

    @property
    def n_parameters(self) -> Mapping[str, Any]:
        return {folder: part.n_parameters for folder, part in self.parts.items()}

    def base_tokenizer(self) -> Any | None:
        return next(iter(self.parts.values())).base_tokenizer()

    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        warnings = []
        for name, part in self.parts.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            own_tokenizer = tokenizer if name == self.tokenizer_folder else None
            warnings += part.write_hf_assets(folder / name, own_tokenizer, eos_token_ids)
        return warnings
