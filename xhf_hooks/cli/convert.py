"""``xhf-convert``: the checkpoint of a finished run becomes a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xhf_hooks.cli.arguments import CommandParser, count
from xhf_hooks.cli.collector import without_collector
from xhf_hooks.cli.ending import explain
from xhf_hooks.cli.output import (
    complain,
    descriptors_silenced,
    lacks_memory,
    libraries_print_lines,
    say,
)
from xhf_hooks.cli.progress import Progress
from xhf_hooks.config.checks import DTYPE_CODES, parse_size
from xhf_hooks.config.options import LLAVA_FORMATS, LORA_MODES
from xhf_hooks.errors import ChangedError, IncompleteError, TargetError, XhfError
from xhf_hooks.format.text import size_text, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xhf_hooks.convert import Conversion
    from xhf_hooks.planning.types import CommittedCheckpoint

DONE, FAILED, BAD_INPUT = 0, 1, 2
_DTYPES = {'keep': None, **DTYPE_CODES}
_MOST_NAMES = 20  # of files that were written, in a line
_MOST_WORKERS = 16  # by default: more than a disk can feed, and each holds some MB


_EXAMPLES = {
    'work_dirs/run OUT --dry-run': 'what is in the last checkpoint of this run, and what would be written',
    'work_dirs/run/iter_500.pth OUT --verify': 'convert this one, and read everything back before OUT gets its name',
    'checkpoint-500 OUT --dtype float32': 'of transformers.Trainer: the exact master weights',
    'DIR OUT --base meta-llama/Llama-3.1-8B': 'where nothing beside the weights says which model they are of',
}


def parse_args(argv: Sequence[str] | None, prog: str = 'xhf-convert') -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog=prog,
        examples=_EXAMPLES,
        description='Turn the checkpoint of a finished run into a Hugging Face folder. Nothing in it is executed.',
        epilog='Exit status: 0 done, 1 failed, 2 bad input. What fails or is killed leaves no folder OUT.',
    )
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        type=Path,
        help='iter_500.pth (a folder or a file), a work_dir, a checkpoint-500 of transformers.Trainer, a folder of '
        'accelerator.save_state, or any folder that DeepSpeed saved into',
    )
    parser.add_argument('out', metavar='OUT', type=Path, help='the folder to make')
    _add_options(parser)
    return parser.parse_args(argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('which model it is').add_argument
    add('--config', type=Path, metavar='CFG', help="the run's config; default: the checkpoint's own, or one beside it")
    add('--base', metavar='DIR', help='the model that training started from; default: what the config says')
    add('--module', metavar='PATH', help='dotted path of the model to export in the trained model')
    add('--trust-remote-code', action='store_true', help="run the base model's own code, if it has some")
    add = parser.add_argument_group('which weights').add_argument
    add(
        '--dtype',
        choices=list(_DTYPES),
        default='keep',
        help='keep: the training dtype, as the hook saves it. float32: the exact master weights, where there are any. '
        "Default: 'keep'",
    )
    add(
        '--no-ema',
        action='store_false',
        dest='ema',
        help='of a run with EMAHook, the live weights; default: the averaged ones, as CheckpointHook means them',
    )
    add(
        '--lora',
        choices=LORA_MODES,
        help="for a LoRA run; default: as the hook's, 'adapter' for most",
    )
    add(
        '--llava-format',
        choices=LLAVA_FORMATS,
        help="for XTuner's LLaVAModel; default: 'xtuner'",
    )
    add(
        '--optimizer-restarted',
        action='store_true',
        help="of a ZeRO-3 run that was resumed without its optimizer's state: that has made fewer steps than the run",
    )
    add = parser.add_argument_group('how it is written').add_argument
    add('--dry-run', action='store_true', help='say what was found and what would be written')
    add('--verify', action='store_true', help='read everything back and compare, before OUT gets its name')
    add('--overwrite', action='store_true', help='replace OUT, if this package wrote it')
    add('--max-shard-size', type=_nbytes, default='5GB', metavar='SIZE', help="as in save_pretrained; default: '5GB'")
    add('--workers', type=count, metavar='N', help='threads that read and write; default: one for each core')


def main(argv: Sequence[str] | None = None, prog: str = 'xhf-convert') -> int:
    """Run the command.

    Args:
        prog: What it was called as, for messages.

    Returns:
        Its exit status.
    """
    args = parse_args(argv, prog)
    try:
        with _ended_by_sigterm(), libraries_print_lines():
            return _run(args, prog)
    except (Exception, KeyboardInterrupt) as error:
        explain(prog, error, left='; nothing was left at OUT', memory='. --workers 1 takes least')
        is_bad_input = isinstance(error, XhfError) and not isinstance(error, (IncompleteError, ChangedError))
        return BAD_INPUT if is_bad_input and not lacks_memory(error) else FAILED


def _run(args: argparse.Namespace, prog: str) -> int:
    _require_new(args.out, args.overwrite)
    with without_collector(freeze=True):
        from xhf_hooks.convert import Conversion, ConvertOptions  # torch and transformers: after what needs neither

        options = ConvertOptions(
            config=args.config,
            base=args.base,
            module=args.module,
            lora=args.lora,
            llava_format=args.llava_format,
            ema=args.ema,
            dtype=_DTYPES[args.dtype],
            max_shard_nbytes=args.max_shard_size,
            workers=args.workers or min(_MOST_WORKERS, _cores()),
            verify=args.verify,
            trust_remote_code=args.trust_remote_code,
            optimizer_restarted=args.optimizer_restarted,
        )
        conversion = Conversion(args.checkpoint, options)
    for line in conversion.description():
        say(line)
    _warn(conversion.warnings, prog)
    if args.dry_run:
        say(f'would write to {args.out}')
        return DONE
    with descriptors_silenced():
        conversion.load_tokenizer()
    with Progress('converting') as progress:
        committed = conversion.run(args.out, progress)
    _warn(committed.warnings, prog)
    _summarize(conversion, committed)
    return DONE


def _summarize(conversion: Conversion, committed: CommittedCheckpoint) -> None:
    cost = committed.cost
    files = sorted(path.name for path in committed.path.iterdir())
    say(f'wrote {committed.path}: {some(files, _MOST_NAMES)}')
    say(
        f'{size_text(cost.nbytes)} in {cost.seconds:.2f} s, {cost.gbytes_per_sec:.2f} GB/s '
        f'({size_text(conversion.read_nbytes)} read), {cost.peak_extra_nbytes / 1e6:.0f} MB of memory'
    )


def _warn(warnings: Sequence[str], prog: str) -> None:
    for warning in warnings:
        complain(f'{prog}: note: {warning}')


def _require_new(out: Path, overwrite: bool) -> None:
    if not overwrite and (out.is_symlink() or out.exists()) and not (out.is_dir() and not any(out.iterdir())):
        raise TargetError(f'{out} exists; name another folder, or add --overwrite')


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, and staging is cleared."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _nbytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a size such as '5GB' or a number of bytes, not {text!r}") from None
