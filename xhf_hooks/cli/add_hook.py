"""``xhf add-hook``: adds HFCheckpointHook to a config of MMEngine or XTuner."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from xhf_hooks.cli.arguments import CommandParser
from xhf_hooks.cli.edit_config import bases_of, read_config_text, with_hook
from xhf_hooks.cli.ending import explain
from xhf_hooks.cli.output import say
from xhf_hooks.errors import ConfigError, TargetError, XhfError

DONE, FAILED, BAD_INPUT = 0, 1, 2
_EXAMPLES = {
    'config.py --dry-run': 'show the diff only',
    'config.py': 'show the diff, then change the file',
    'config.py -o config_hf.py': 'show the diff, then write a new file',
}


def parse_args(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(
        prog=prog,
        examples=_EXAMPLES,
        description='Add HFCheckpointHook to a config of MMEngine or XTuner. The config is parsed, never run, and\n'
        "otherwise unchanged. XTuner's hook of the same name is replaced. Shows a diff first.",
        epilog='Exit status: 0 done, or the config already has the hook; 1 failed; 2 bad input.',
    )
    parser.add_argument('config', metavar='CONFIG', type=Path, help='a Python config')
    parser.add_argument('-o', '--out', metavar='OUT', type=Path, help='the file to write; default: CONFIG')
    parser.add_argument('--dry-run', action='store_true', help='show the diff, write nothing')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, prog: str = 'xhf add-hook') -> int:
    """Run the command, named ``prog`` in messages. Returns the exit status."""
    args = parse_args(argv, prog)
    try:
        return _run(args)
    except (Exception, KeyboardInterrupt) as error:
        explain(prog, error)
        return BAD_INPUT if isinstance(error, XhfError) else FAILED


def _run(args: argparse.Namespace) -> int:
    before = read_config_text(args.config)
    after = with_hook(before, args.config)
    out = _target(args.config, args.out, before)
    names = (str(args.config), str(out if args.out else args.config))
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm=''):
        say(line)
    if before == after:
        say(f'{args.config}: already has the hook')
    if args.dry_run or (before == after and args.out is None):
        return DONE
    _write(out, after, like=args.config)
    say(f'wrote {out}')
    return DONE


def _target(config: Path, given: Path | None, text: str) -> Path:
    """The file to write.

    Raises:
        XhfError: The file exists, belongs to an installed package, or would not find its base configs.
    """
    if given is None:
        if not {'site-packages', 'dist-packages'}.isdisjoint(config.resolve().parts):
            raise TargetError(f'{config}: belongs to an installed package; name a file of your own with -o')
        return config.resolve()
    out = given / config.name if given.is_dir() else given
    if (out.exists() or out.is_symlink()) and not os.path.samefile(out, config):
        raise TargetError(f'{out}: exists; name another file with -o')
    bases = bases_of(text, config)
    if bases and out.resolve().parent != config.resolve().parent:
        raise ConfigError(f'{config}: inherits from {bases[0][:80]!r}; name a file in the same folder with -o')
    return out


def _write(out: Path, text: str, like: Path) -> None:
    """Write atomically."""
    new = out.with_name(f'.{out.name}.{os.getpid()}.new')
    try:
        with new.open('xb') as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(like, new)
        os.replace(new, out)
    finally:
        new.unlink(missing_ok=True)
