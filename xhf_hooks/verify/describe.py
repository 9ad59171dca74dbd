"""Describes the model folders and checkpoints at a path: model, step, tensors, sizes and writer.

Reads headers and metadata only. Executes nothing and opens regular files only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError, ConfigError, XhfError
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import DTYPES, read_header
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import read_headers, scan
from xhf_hooks.integrity.manifest import read_manifest
from xhf_hooks.meta_model.run_config import find_run_config
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint

_MOST_FOUND, _MOST_TEXT = 50, 120
_MODEL_FOLDERS = ('hf_model*', '*/hf_model*')
_WEIGHTS, _CONFIGS = '*.safetensors', ('config.json', 'adapter_config.json')


@dataclass(frozen=True)
class Tensor:
    """One tensor; ``dtype`` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class Described:
    """A model folder or a checkpoint.

    Attributes:
        kind: Such as ``'Hugging Face folder'``.
        model: The name in its config; None if unknown.
        step: Such as ``'iter 200'``; None if unknown.
        written_by: Engine, parallelism and package versions; None if unknown.
        weights: ``'live'`` or ``'averaged'``; None if unknown.
        nbytes: Size of all files.
        tensors: Its tensors; those of a checkpoint have the training dtype.
        problems: What is damaged; tensors of damaged files are left out.
    """

    path: Path
    kind: str
    model: str | None
    step: str | None
    written_by: str | None
    weights: str | None
    nbytes: int
    tensors: list[Tensor] = field(repr=False)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """The known fields as a table of two columns."""
        known = [
            ('kind', self.kind),
            ('model', self.model),
            ('step', self.step),
            ('weights', self.weights),
            ('written by', self.written_by),
            ('size', size_text(self.nbytes)),
            *(('tensors' if i == 0 else '', text) for i, text in enumerate(self._by_dtype())),
        ]
        told = [('damaged', problem) for problem in self.problems] + [('note', note) for note in self.notes]
        return [*((key, value) for key, value in known if value is not None), *told]

    def _by_dtype(self) -> list[str]:
        dtypes = sorted({tensor.dtype for tensor in self.tensors})
        lines = []
        for dtype in dtypes:
            found = [tensor for tensor in self.tensors if tensor.dtype == dtype]
            nbytes = sum(tensor.nbytes for tensor in found)
            elements = nbytes * 8 // DTYPES[dtype][0] if dtype in DTYPES else 0
            lines.append(f'{len(found)} {dtype}, {counted(elements, "element")}, {size_text(nbytes)}')
        return lines or ['none']

    def as_json(self) -> dict[str, Any]:
        """The description as JSON values."""
        return {**asdict(self), 'path': str(self.path)}


def describe(path: Path) -> tuple[list[Described], list[str]]:
    """Describe a model folder, a safetensors file, a checkpoint, or all of these in a work_dir.

    Returns:
        The descriptions, and one message for each item that could not be read.

    Raises:
        CheckpointError: Nothing was found, or more than :data:`_MOST_FOUND` folders.
    """
    if not path.exists():
        raise CheckpointError(f'{path}: no such file or folder')
    if path.is_dir() and _is_model_folder(path):
        return [_model_folder(path)], []
    if path.suffix == '.safetensors' and path.is_file():
        return [_weights_file(path)], []
    folders = _folders_in(path) if path.is_dir() else []
    found, errors = [], []
    if not folders or _has_checkpoint(path):
        try:
            found.append(_checkpoint(path))
        except XhfError as error:
            errors.append(error)
    for folder in folders:
        try:
            found.append(_model_folder(folder))
        except XhfError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found, [str(error) for error in errors]


def _folders_in(work_dir: Path) -> list[Path]:
    found = [folder for pattern in _MODEL_FOLDERS for folder in sorted(work_dir.glob(pattern))]
    if len(found) > _MOST_FOUND:
        raise CheckpointError(f'{work_dir}: holds {len(found)} model folders; give one of them')
    return [folder for folder in found if folder.is_dir() and _is_model_folder(folder)]


def _has_checkpoint(folder: Path) -> bool:
    return (folder / 'last_checkpoint').exists() or (folder / 'latest').exists() or any(folder.glob('*.pth'))


def _is_model_folder(folder: Path) -> bool:
    """Whether it is a model folder. Trainer's checkpoints, with weights beside the optimizer state, are not."""
    has_weights = any(folder.glob(_WEIGHTS))
    is_checkpoint = (folder / 'latest').is_file() or (folder / 'last_checkpoint').is_file()
    return has_weights and not is_checkpoint


def _model_folder(folder: Path) -> Described:
    content, findings = scan(folder), Findings()
    for name, kind in content.special.items():
        raise CheckpointError(f'{folder / name}: {kind}, not a regular file')
    headers = [(f.prefix, header) for f in read_headers(content, findings) for header in f.loaded().values()]
    manifest = read_manifest(folder)
    facts = {} if manifest is None else manifest.facts
    return Described(
        folder,
        'Hugging Face adapter' if (folder / 'adapter_config.json').is_file() else 'Hugging Face folder',
        next(filter(None, (_model_of(folder / name) for name in _CONFIGS)), None),
        None if manifest is None else manifest.label,
        _programs(facts),
        _text(facts.get('weights')),
        sum(nbytes for nbytes in content.files.values() if nbytes > 0),
        [Tensor(prefix + e.name, e.dtype, e.shape, e.end - e.start) for prefix, h in headers for e in h.entries],
        [] if manifest else ['no xhf_manifest.json: not written by this package, or changed since'],
        findings.texts('problem'),
    )


def _weights_file(file: Path) -> Described:
    header = read_header(file)
    tensors = [Tensor(e.name, e.dtype, e.shape, e.end - e.start) for e in header.entries]
    return Described(file, 'safetensors file', None, None, None, None, header.nbytes, tensors)


def _checkpoint(path: Path) -> Described:
    source = CheckpointSource(find_checkpoint(path), optimizer_restarted=True)
    facts = source.facts
    step = [f'{unit} {n}' for unit, n in (('iter', source.iteration), ('epoch', source.epoch)) if n is not None]
    weights = 'averaged and live' if source.averages else None
    return Described(
        source.found.path,
        f'checkpoint ({facts["layout"]})',
        _model_of_run(source),
        ', '.join(step) or None,
        _programs(facts),
        weights,
        source.found.nbytes,
        [Tensor(spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in source.specs()],
        [*source.warnings, *source.unproven],
    )


def _model_of_run(source: CheckpointSource) -> str | None:
    """The model type in the run's config, else the name in a config.json beside the checkpoint."""
    try:
        config = find_run_config(None, source.config_text, source.found.path)
    except ConfigError:
        config = None
    if config is not None and config.model is not None:
        return _text(config.model['type'])
    folders = (source.found.path, source.found.path.parent)
    return next(filter(None, (_model_of(folder / name) for folder in folders for name in _CONFIGS)), None)


def _model_of(file: Path) -> str | None:
    """The model name in a config.json."""
    try:
        config = strict_json.read(file)
    except XhfError:
        return None
    names = config.get('architectures')
    first = names[0] if isinstance(names, list) and names else config.get('base_model_name_or_path')
    return _text(first) or _text(config.get('model_type'))


def _programs(facts: dict[str, Any]) -> str | None:
    """Engine and parallelism, then package versions."""
    packages = facts.get('packages')
    parts = [f'{name} {version}' for name, version in packages.items()] if isinstance(packages, dict) else []
    engine = _text(facts.get('engine'))
    if engine is not None:
        version, stage, ranks = (facts.get(key) for key in ('deepspeed', 'zero_stage', 'world_size'))
        engine += f' {version}' if isinstance(version, str) else ''
        engine += f' ZeRO-{stage}' if strict_json.is_count(stage) else ''
        engine += f', {counted(ranks, "rank")}' if strict_json.is_count(ranks) else ''
        parts.insert(0, engine)
    return _joined(parts)


def _joined(parts: Iterable[str]) -> str | None:
    return '; '.join(part[:_MOST_TEXT] for part in parts) or None


def _text(value: Any) -> str | None:
    return value[:_MOST_TEXT] if isinstance(value, str) and value else None
