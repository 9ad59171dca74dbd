"""``xhf-convert``: converts the checkpoint of a finished run into a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

from xhf_hooks.errors import IncompleteError, TargetError, XhfError
from xhf_hooks.format.safetensors import AS_IN_BASE
from xhf_hooks.format.text import size_text, some
from xhf_hooks.offline.commands.output import (
    CommandParser,
    base_model,
    complain,
    count,
    explain,
    folder,
    in_words_of_command,
    progress,
    say,
    size,
)
from xhf_hooks.options import CARRY_BASE, DTYPE_CODES, LLAVA_FORMATS, LORA_MODES, VERIFY_LEVELS
from xhf_hooks.system.threads import count_usable_cores
from xhf_hooks.system.versions import require_packages

#: Exit statuses.
DONE = 0
FAILED = 1
BAD_INPUT = 2
_PROG = 'xhf-convert'
_DTYPES = {'keep': None, **DTYPE_CODES, AS_IN_BASE: AS_IN_BASE}
_MOST_NAMES = 20  # number of written files to name in one line
_MOST_WORKERS = 16  # by default; each needs a few MB, and more are not faster

_EXAMPLES = {
    'work_dirs/run OUT --dry-run': 'show the last checkpoint of this run and what would be written',
    'work_dirs/run/iter_500.pth OUT --verify full': 'convert this checkpoint; read everything back before the commit',
    'DIR OUT --base meta-llama/Llama-3.1-8B': 'convert a checkpoint that has no config of its model',
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog=_PROG,
        usage='%(prog)s CHECKPOINT OUT [options]',
        examples=_EXAMPLES,
        description='Convert the checkpoint of a finished run into a Hugging Face folder. Runs no code from it.',
        epilog='Exit status: 0 done, 1 failed, 2 bad input. A conversion that fails or is killed leaves OUT as it was.',
    )
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        type=Path,
        help='a work_dir, iter_500.pth, checkpoint-500, a folder of save_state or of DeepSpeed, or a file of weights',
    )
    parser.add_argument('out', metavar='OUT', type=folder, help='the folder to write')
    _add_options(parser)
    return parser.parse_args(argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    # The help fits two screens of 24 lines, at 80 columns
    add = parser.add_argument_group('which model').add_argument
    add('--config', type=Path, metavar='CFG', help="the run's config; default: in or beside the checkpoint")
    add(
        '--base',
        type=base_model,
        metavar='DIR',
        help='the base, or adapter_config.json: folder or Hub name',
    )
    add('--module', metavar='PATH', help='path of the submodule to export, such as llm or actor')
    add('--architecture', metavar='NAME', help='class that was trained, where several fit the tensors')
    add('--trust-remote-code', action='store_true', help='allow custom code of the base model to run')
    add = parser.add_argument_group('which weights').add_argument
    add(
        '--dtype',
        choices=list(_DTYPES),
        default='keep',
        help='keep (default): as in training. float32: the fp32 master weights, where they exist. base: as in the base',
    )
    add('--no-ema', action='store_false', dest='ema', help='for a run with EMAHook: not the averaged weights')
    add(
        '--lora',
        choices=LORA_MODES,
        metavar='MODE',  # with the choices, the help would take another line
        help=f'of a LoRA run: {LORA_MODES[0]} (usual default), {" or ".join(LORA_MODES[1:])}',
    )
    add(
        '--carry-base',
        choices=CARRY_BASE,
        help="all: copy tensors that only the base's files have",
    )
    add(
        '--llava-format',
        choices=LLAVA_FORMATS,
        metavar='NAME',  # with the choices, the help would take another line
        help=f'of a LLaVAModel: {" (default) or ".join(LLAVA_FORMATS)}',
    )
    add = parser.add_argument_group('output').add_argument
    add('--dry-run', action='store_true', help='show what would be written; write nothing')
    add(
        '--verify',
        choices=VERIFY_LEVELS,
        default='sizes',
        metavar='LEVEL',  # with the choices, the help would take two more lines
        help="'sizes' (default), or 'full': read every byte back",
    )
    add('--no-model-card', action='store_false', dest='model_card', help='do not write README.md')
    add('--json', action='store_true', help='print JSON, and all else on standard error')
    add('--overwrite', action='store_true', help='replace OUT if this package wrote it')
    add(
        '--max-shard-size',
        dest='max_shard_nbytes',
        type=size,
        default='5GB',
        metavar='N',  # as SIZE, it would take another line
        help="largest size of a weight file; default: '5GB'",
    )
    workers = min(_MOST_WORKERS, count_usable_cores())
    add('--workers', type=count, metavar='N', default=workers, help='threads; default: %(default)s')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        args = parse_args(argv)  # on Windows, --base lacks a module
        require_packages('torch', 'transformers')
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: staging is removed
        if not args.json:
            _run(args)
            return DONE
        with redirect_stdout(sys.stderr):
            result = _run(args)
        print(in_words_of_command(json.dumps(result, indent=2)))
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        explain(_PROG, error, left='; OUT was not written')
        is_bad_input = isinstance(error, XhfError) and not isinstance(error, IncompleteError)
        return BAD_INPUT if is_bad_input else FAILED


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Convert, or say what would be converted; returns the result for ``--json``."""
    exists = not args.overwrite and _exists(args.out)
    if exists and not args.dry_run:
        raise TargetError(f'{args.out} exists; name another folder, or add --overwrite')
    from xhf_hooks.offline.checkpoint.source import CheckpointSource
    from xhf_hooks.offline.convert.conversion import ConvertOptions, describe_checkpoint
    from xhf_hooks.offline.convert.plan_conversion import plan_conversion  # imports torch and transformers

    given = {option.name: getattr(args, option.name) for option in fields(ConvertOptions)}
    options = ConvertOptions(**{**given, 'dtype': _DTYPES[args.dtype]})
    checkpoint = CheckpointSource.open(args.checkpoint, ema=args.ema)
    for line in describe_checkpoint(checkpoint):
        say(line)
    conversion = plan_conversion(checkpoint, options)
    for line in conversion.description():
        say(line)
    _warn(conversion.warnings)
    if args.dry_run:
        remedy = ', which exists: name another folder, or add --overwrite' if exists else ''
        say(f'would write to {args.out}{remedy}')
        return {
            'out': str(args.out),
            'written': False,
            'exists': exists,
            'step': conversion.step.label,
            'nbytes': conversion.outputs.plan.nbytes,
            'notes': list(conversion.warnings),
        }
    with progress('converting') as on_progress:
        committed = conversion.run(args.out, on_progress, overwrite=args.overwrite)
    _warn(committed.warnings)
    cost, files = committed.cost, sorted(path.name for path in Path(committed.path).iterdir())
    say(f'wrote {committed.path}: {some(files, _MOST_NAMES)}')
    say(
        f'{size_text(cost.nbytes)} in {cost.seconds:.2f} s, {cost.gbytes_per_sec:.2f} GB/s '
        f'({size_text(conversion.outputs.read_nbytes)} read), peak extra memory {cost.peak_extra_nbytes / 1e6:.0f} MB'
    )
    if args.verify == 'full':
        say('verified: all weights were read back and are unchanged')
    return {
        'out': str(committed.path),
        'written': True,
        'verified': args.verify == 'full',
        'step': committed.step.label,
        'files': files,
        'nbytes': cost.nbytes,
        'seconds': round(cost.seconds, 3),
        'notes': [*conversion.warnings, *committed.warnings],
    }


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        complain(f'{_PROG}: note: {warning}')


def _exists(out: Path) -> bool:
    """Whether there is anything but an empty folder."""
    return (out.is_symlink() or out.exists()) and not (out.is_dir() and not any(out.iterdir()))
