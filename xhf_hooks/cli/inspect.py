"""``xhf inspect``: what is in a folder or checkpoint, a line for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from xhf_hooks.cli.output import CommandParser, explain, say
from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import size_text
from xhf_hooks.system.versions import refuse_outdated

GOOD, DAMAGED, UNREADABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None, prog: str = 'xhf inspect') -> int:
    """Run the command, named ``prog`` in messages. Returns the exit status."""
    parser = CommandParser(
        prog=prog,
        examples={'work_dirs/run': "the run's last checkpoint, and every folder that the hook saved"},
        description='Show what is in a folder or checkpoint: model, step, tensors, dtypes, sizes, and what wrote it.\n'
        'Reads no tensors and runs no code from it. To check that a folder is complete, use xhf verify.',
        epilog='Exit status: 0 good, 1 damaged, 2 something cannot be read.',
    )
    parser.add_argument('path', metavar='PATH', type=Path, help='a model folder, a checkpoint, or a work_dir')
    path = parser.parse_args(argv).path
    folders = [path] if _is_folder(path) else sorted((*path.glob('hf_model*'), *path.glob('*/hf_model*')))
    places = {folder: _show_folder for folder in folders if _is_folder(folder)}
    if not places or _is_checkpoint(path):
        places = {path: _show_checkpoint, **places}
    statuses = [GOOD]
    for place, show in places.items():
        try:
            refuse_outdated('torch', 'transformers')
            statuses.append(show(place))
        except (Exception, KeyboardInterrupt) as error:
            explain(prog, error)
            statuses.append(UNREADABLE)
    return max(statuses)


def _is_folder(path: Path) -> bool:
    """Whether it is a model folder. Trainer's checkpoints, with weights beside the optimizer state, are not."""
    return path.is_dir() and any(path.glob('*.safetensors')) and not _is_checkpoint(path)


def _is_checkpoint(path: Path) -> bool:
    return (path / 'latest').is_file() or (path / 'last_checkpoint').is_file()


def _show_folder(path: Path) -> int:
    """Show a model folder; returns whether its files and headers are good."""
    from xhf_hooks.convert.conversion import engine_of
    from xhf_hooks.verify.folder import verify_folder

    check = verify_folder(path, read=False)
    manifest = check.manifest
    model = 'adapter' if 'adapter_config.json' in check.files else 'model'
    with suppress(DamagedError):
        model = str(strict_json.read(path / 'config.json').get('architectures', [model])[0])
    dtypes = Counter(entry.dtype for header in check.headers.values() for entry in header.entries)
    step = 'no xhf_manifest.json' if manifest is None else f'{manifest.step.unit} {manifest.step.number}'
    facts = {} if manifest is None else manifest.facts
    parts = [model, step, facts.get('weights'), engine_of(facts)]
    parts += [f'{n} {dtype}' for dtype, n in dtypes.items()] + [size_text(check.nbytes)]
    say(f'{path}: {", ".join(filter(None, parts))}')
    for problem in check.problems():
        say(f'  damaged: {problem}')
    return GOOD if check.is_good else DAMAGED


def _show_checkpoint(path: Path) -> int:
    """Show a checkpoint as xhf-convert does."""
    from xhf_hooks.convert.conversion import lines_about

    for line in lines_about(path):
        say(line)
    return GOOD
