"""``xhf-verify``: checks that a model folder is complete and unchanged, or compares two models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from xhf_hooks.cli.output import CommandParser, base_model, complain, count, explain, folder, progress, say
from xhf_hooks.options import LORA_MODES
from xhf_hooks.system.versions import require_packages

if TYPE_CHECKING:
    from xhf_hooks.verify.compare import Comparison
    from xhf_hooks.verify.folder import FolderCheck

#: Exit statuses.
SAME = 0
DIFFERENT = 1
UNUSABLE = 2
_PROG = 'xhf-verify'
_EXAMPLES = {
    'hf_model': 'check that this folder is complete, consistent and unchanged',
    'hf_model --load': 'also show that transformers or peft loads all of it, without reading weights',
    'OUT work_dirs/run/iter_500.pth': 'compare OUT with the model in this checkpoint',
    'A B': 'compare two folders',
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog=_PROG,
        examples=_EXAMPLES,
        description='One path: show what a Hugging Face folder holds; check that it is complete, consistent and, if\n'
        'it has an xhf_manifest.json, unchanged. Two paths: compare two models: two Hugging Face folders, or\n'
        'one and a checkpoint that xhf-convert reads.',
        epilog='Exit status: 0 good, or the same model (identical or rounding only); 1 damaged or different;\n'
        '2 unusable input.',
    )
    parser.add_argument(
        'paths',
        metavar='PATH',
        type=folder,
        nargs='+',
        help='a model folder; a second one, or a checkpoint, to compare it with',
    )
    add = parser.add_argument_group('one path').add_argument
    add('--load', action='store_true', help='also load A with transformers or peft, without weights')
    add('--no-read', action='store_true', help='check headers and sizes only, no checksums')
    add = parser.add_argument_group('both').add_argument
    add('--json', action='store_true', help='print the result as JSON')
    add('--workers', type=count, metavar='N', help='threads; default: number of cores + 1, at most 8')
    add('--trust-remote-code', action='store_true', help='allow custom code of the model to run')
    add('--base', type=base_model, metavar='DIR', help='the base model, of a checkpoint or, with --load, of an adapter')
    add = parser.add_argument_group('if A or B is a checkpoint, as in xhf-convert').add_argument
    add('--config', type=Path, metavar='CFG', help="the run's config")
    add('--module', metavar='PATH', help='path of the submodule to compare, such as llm')
    add('--lora', choices=LORA_MODES, help='for a LoRA run: compare the adapter, the merged model, or both')
    args = parser.parse_args(argv)
    if len(args.paths) > 2:
        parser.error(f'expected one path or two, found {len(args.paths)}: {" ".join(map(str, args.paths))}')
    args.a = args.paths[0]
    args.b = args.paths[1] if len(args.paths) == 2 else None
    if args.b is None and args.a.is_file() and args.a.suffix != '.pth':
        parser.error(f'{args.a} is a file; give its folder: {args.a.parent}')
    if args.b is not None and (args.load or args.no_read):
        parser.error('--load and --no-read are for one path')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        args = parse_args(argv)  # on Windows, --base lacks a module
        require_packages('torch', 'transformers')
        with redirect_stdout(sys.stderr):  # standard output is for the result alone
            is_good, result = _check(args) if args.b is None else _compare(args)
        if args.json:
            print(json.dumps(result.as_json(), indent=2))
        else:
            for line in result.lines():
                say(line)
        return SAME if is_good else DIFFERENT
    except (Exception, KeyboardInterrupt) as error:
        explain(_PROG, error)
        return UNUSABLE


def _check(args: argparse.Namespace) -> tuple[bool, FolderCheck]:
    from xhf_hooks.verify.folder import verify_folder

    with progress('reading') as on_progress:
        report = verify_folder(args.a, workers=args.workers, read=not args.no_read, on_progress=on_progress)
    if args.load and report.is_good:
        from xhf_hooks.verify.load import check_loading

        check_loading(report, base=args.base, trust_remote_code=args.trust_remote_code)
    elif args.load:
        complain(f'{_PROG}: the folder is damaged, so it was not loaded')
    return report.is_good, report


def _compare(args: argparse.Namespace) -> tuple[bool, Comparison]:
    from xhf_hooks.convert import ConvertOptions
    from xhf_hooks.verify import compare
    from xhf_hooks.verify.models import open_models

    options = ConvertOptions(args.config, args.base, args.module, args.lora, trust_remote_code=args.trust_remote_code)
    with TemporaryDirectory(prefix='xhf_hooks_') as scratch, progress('comparing') as on_progress:
        a, b = open_models(args.a, args.b, options, Path(scratch))
        found = compare.compare_models(a, b, args.workers, on_progress)
    return found.verdict != compare.DIFFERENT, found
