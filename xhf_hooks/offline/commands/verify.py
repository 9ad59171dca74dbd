"""``xhf-verify``: checks that model folders are complete and unchanged, or compares two models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

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
)
from xhf_hooks.options import LORA_MODES
from xhf_hooks.system.versions import require_packages

if TYPE_CHECKING:
    from xhf_hooks.offline.verify.compare import Comparison
    from xhf_hooks.offline.verify.folder import FolderCheck

#: Exit statuses.
SAME = 0
DIFFERENT = 1
UNUSABLE = 2
_PROG = 'xhf-verify'
_EXAMPLES = {
    'work_dirs/run/*/hf_model': 'check that each of these folders is complete, consistent and unchanged',
    'hf_model --load': 'also show that transformers or peft loads all of it, without reading weights',
    '--compare OUT work_dirs/run/iter_500.pth': 'compare OUT with the model in this checkpoint',
    '--compare A B': 'compare two folders',
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog=_PROG,
        examples=_EXAMPLES,
        description='Show what each Hugging Face folder holds; check that it is complete, consistent and, if it has\n'
        'an xhf_manifest.json, unchanged. With --compare: compare two models. They are two Hugging Face\n'
        'folders, or one and a checkpoint that xhf-convert reads.',
        epilog='Exit status: 0 all good, or both load as the same model (identical or rounding only); 1 one is\n'
        'damaged, or weights or configs are different; 2 unusable input.',
    )
    parser.add_argument('paths', metavar='PATH', type=folder, nargs='+', help='a model folder, or a checkpoint')
    parser.add_argument('--compare', action='store_true', help='compare two models')
    add = parser.add_argument_group('without --compare').add_argument
    add('--load', action='store_true', help='also load each with transformers or peft, without weights')
    add('--no-read', action='store_true', help='check headers and sizes only, no checksums')
    add = parser.add_argument_group('both').add_argument
    add('--json', action='store_true', help='print the result as JSON')
    add('--workers', type=count, metavar='N', help='threads; default: number of cores + 1, at most 8')
    add('--trust-remote-code', action='store_true', help='allow custom code of the model to run')
    add('--base', type=base_model, metavar='DIR', help='the base model, of a checkpoint or, with --load, of an adapter')
    add = parser.add_argument_group('to compare a checkpoint, as in xhf-convert').add_argument
    add('--config', type=Path, metavar='CFG', help="the run's config")
    add('--module', metavar='PATH', help='path of the submodule to compare, such as llm')
    add('--lora', choices=LORA_MODES, help='for a LoRA run: compare the adapter, the merged model, or both')
    args = parser.parse_args(argv)
    if args.compare and len(args.paths) != 2:
        parser.error(f'--compare takes two paths, found {len(args.paths)}: {" ".join(map(str, args.paths))}')
    if args.compare and (args.load or args.no_read):
        parser.error('--load and --no-read are not for --compare')
    if not args.compare and (files := [path for path in args.paths if path.is_file() and path.suffix != '.pth']):
        parser.error(f'{files[0]} is a file; give its folder: {files[0].parent}')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    status = SAME
    results: list[FolderCheck | Comparison] = []
    try:
        args = parse_args(argv)  # on Windows, --base lacks a module
        require_packages('torch', 'transformers')
        for path in args.paths[:1] if args.compare else args.paths:
            try:
                with redirect_stdout(sys.stderr):  # standard output is for the results alone
                    is_good, result = _compare(args) if args.compare else _check(args, path)
            except Exception as error:  # of this path alone: the others are still checked
                explain(_PROG, error)
                status = UNUSABLE
                continue
            status = max(status, SAME if is_good else DIFFERENT)
            results.append(result)
            for line in [] if args.json else result.lines():
                say(line)
        if args.json and results:
            found = [result.as_json() for result in results]
            several = len(args.paths) > 1 and not args.compare
            print(in_words_of_command(json.dumps(found if several else found[0], indent=2)))
        return status
    except (Exception, KeyboardInterrupt) as error:
        explain(_PROG, error)
        return UNUSABLE


def _check(args: argparse.Namespace, path: Path) -> tuple[bool, FolderCheck]:
    from xhf_hooks.offline.verify.folder import verify_folder

    with progress('reading') as on_progress:
        report = verify_folder(path, workers=args.workers, read=not args.no_read, on_progress=on_progress)
    if args.load and report.is_good:
        from xhf_hooks.offline.verify.load import check_loading

        check_loading(report, base=args.base, trust_remote_code=args.trust_remote_code)
    elif args.load:
        complain(f'{_PROG}: {path} is damaged, so it was not loaded')
    return report.is_good, report


def _compare(args: argparse.Namespace) -> tuple[bool, Comparison]:
    from xhf_hooks.offline.convert.conversion import ConvertOptions
    from xhf_hooks.offline.verify import compare
    from xhf_hooks.offline.verify.models import open_models

    options = ConvertOptions(args.config, args.base, args.module, args.lora, trust_remote_code=args.trust_remote_code)
    with TemporaryDirectory(prefix='xhf_hooks_') as scratch, progress('comparing') as on_progress:
        first, second = args.paths
        a, b = open_models(first, second, options, Path(scratch))
        found = compare.compare_models(a, b, args.workers, on_progress)
    return found.is_same, found
