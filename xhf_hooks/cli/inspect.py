"""``xhf inspect``: what is in a folder or checkpoint, in a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.cli.output import CommandParser, complain, explain, say
from xhf_hooks.errors import CheckpointError, DamagedError, XhfError
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import DTYPES
from xhf_hooks.format.text import counted, size_text
from xhf_hooks.installed import require_usable

DONE, PARTLY, UNUSABLE = 0, 1, 2
_Rows = Iterator[tuple[str, str | None]]


def main(argv: Sequence[str] | None = None, prog: str = 'xhf inspect') -> int:
    """Run the command, named ``prog`` in messages. Returns the exit status."""
    parser = CommandParser(
        prog=prog,
        examples={'work_dirs/run': "the run's last checkpoint, and every folder that the hook saved"},
        description='Show what is in a folder or checkpoint: model, step, tensors, dtypes, sizes, and what wrote it.\n'
        'Reads no tensors and runs no code from it. To check that a folder is complete, use xhf verify.',
        epilog='Exit status: 0 everything was read; 1 part of it is damaged or unreadable; 2 unusable input.',
    )
    parser.add_argument('path', metavar='PATH', type=Path, help='a model folder, a checkpoint, or a work_dir')
    path = parser.parse_args(argv).path
    try:
        require_usable('torch', 'transformers')
        return _show_all(path, prog)
    except (Exception, KeyboardInterrupt) as error:
        explain(prog, error)
        return UNUSABLE


def _show_all(path: Path, prog: str) -> int:
    if not path.exists():
        raise CheckpointError(f'{path}: no such file or folder')
    folders = [path] if _is_folder(path) else sorted((*path.glob('hf_model*'), *path.glob('*/hf_model*')))
    folders = [folder for folder in folders if _is_folder(folder)]
    tables = [(folder, _folder) for folder in folders]
    if not folders or (path not in folders and (_is_checkpoint(path) or any(path.glob('*.pth')))):
        tables.insert(0, (path, _checkpoint))
    errors, n_shown, status = [], 0, DONE
    for place, describe in tables:
        try:
            rows = list(describe(place))
        except XhfError as fault:
            errors.append(fault)
            continue
        say('') if n_shown else None
        n_shown += 1
        for key, value in rows:
            if value is not None:
                say(value if key == 'path' else f'  {key:<12}{value}')
            status = PARTLY if key == 'damaged' else status
    if not n_shown:
        raise errors[0]
    for error in errors:
        complain(f'{prog}: {error}')
    return PARTLY if errors else status


def _is_folder(path: Path) -> bool:
    """Whether it is a model folder. Trainer's checkpoints, with weights beside the optimizer state, are not."""
    return path.is_dir() and any(path.glob('*.safetensors')) and not _is_checkpoint(path)


def _is_checkpoint(path: Path) -> bool:
    return (path / 'latest').is_file() or (path / 'last_checkpoint').is_file()


def _folder(path: Path) -> _Rows:
    from xhf_hooks.integrity.check import FolderCheck
    from xhf_hooks.integrity.manifest import read_manifest

    manifest = read_manifest(path)
    check = FolderCheck(path, manifest)
    check.check_structure()
    is_adapter = 'adapter_config.json' in check.files
    yield 'path', str(path)
    yield 'kind', 'Hugging Face adapter' if is_adapter else 'Hugging Face folder'
    yield 'model', _model_of(path / 'config.json') or _model_of(path / 'adapter_config.json')
    yield 'step', None if manifest is None else manifest.label
    yield from _facts({} if manifest is None else manifest.facts)
    yield 'size', size_text(check.report.nbytes)
    entries = [entry for header in check.headers.values() for entry in header.entries]
    yield from _tensors((entry.dtype, entry.end - entry.start) for entry in entries)
    for problem in check.report.problems():
        yield 'damaged', problem
    if manifest is None:
        yield 'note', 'no xhf_manifest.json: not written by this package, or changed since'


def _checkpoint(path: Path) -> _Rows:
    from xhf_hooks.meta_model import find_run_config
    from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint

    source = CheckpointSource(find_checkpoint(path), optimizer_restarted=True)
    config = find_run_config(None, source.config_text, source.found.path)
    place = source.found.path
    step = [f'{unit} {n}' for unit, n in (('iter', source.iteration), ('epoch', source.epoch)) if n is not None]
    yield 'path', str(place)
    yield 'kind', f'checkpoint ({source.facts["layout"]})'
    if config is not None and config.model is not None:
        yield 'model', config.model['type']
    else:
        yield 'model', _model_of(place / 'config.json') or _model_of(place.parent / 'config.json')
    yield 'step', ', '.join(step) or None
    yield from _facts({**source.facts, 'weights': 'averaged and live' if source.averages else None})
    yield 'size', size_text(source.found.nbytes)
    yield from _tensors((spec.dtype, spec.nbytes) for spec in source.specs())
    for note in (*source.warnings, *source.unproven):
        yield 'note', note


def _facts(facts: Mapping[str, Any]) -> _Rows:
    """Live or averaged weights; the engine, ranks and package versions that wrote it."""
    engine = [f'{facts["engine"]}'] if facts.get('engine') else []
    engine += [f'ZeRO-{facts["zero_stage"]}'] if facts.get('zero_stage') is not None else []
    ranks = [counted(facts['world_size'], 'rank')] if strict_json.is_count(facts.get('world_size')) else []
    packages = facts.get('packages')
    versions = [f'{name} {version}' for name, version in packages.items()] if isinstance(packages, dict) else []
    writer = [', '.join((' '.join(engine), *ranks)), *versions] if engine else versions
    yield 'weights', facts.get('weights')
    yield 'written by', '; '.join(writer) or None


def _tensors(tensors: Iterable[tuple[str, int]]) -> _Rows:
    """A row for each dtype, from the dtypes and sizes of all tensors."""
    found = list(tensors)
    for number, dtype in enumerate(sorted({dtype for dtype, _ in found})):
        sizes = [nbytes for other, nbytes in found if other == dtype]
        elements = counted(sum(sizes) * 8 // DTYPES[dtype][0], 'element')
        yield '' if number else 'tensors', f'{len(sizes)} {dtype}, {elements}, {size_text(sum(sizes))}'


def _model_of(file: Path) -> str | None:
    """The model name in a config.json."""
    try:
        config = strict_json.read(file)
    except DamagedError:
        return None
    names = config.get('architectures')
    found = names[0] if isinstance(names, list) and names else config.get('base_model_name_or_path')
    return found if isinstance(found, str) else None
