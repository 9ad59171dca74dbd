"""Fuzzer cases: a number determines the checkpoint or model folder, the file, how it is spoiled, and the options."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.fuzz_templates import CHECKPOINTS, MODELS, make_checkpoint, make_model
from tests.helpers.mutate import mutated_bytes, mutated_json
from tests.helpers.mutate_config import mutated_config, mutated_text
from tests.helpers.mutate_names import mutate_names
from tests.helpers.mutate_pickle import mutated_pickle
from tests.helpers.mutate_zip import mutated_zip, with_pickle

TOOLS = ('convert', 'verify')
ORIGINAL = 'original'


@dataclass(frozen=True)
class Case:
    """One spoiled checkpoint or model folder.

    Attributes:
        template: The template that it was copied from.
        kind: How it was spoiled.
        what: The same as a description, with the file.
        argv: Arguments of the command, which runs in the folder.
    """

    tool: str
    number: int
    template: str
    kind: str
    what: str
    argv: tuple[str, ...]


def make_templates(tool: str, root: Path) -> None:
    """Make all templates of a tool's cases."""
    for name in CHECKPOINTS if tool == 'convert' else MODELS:
        (root / name).mkdir(parents=True)
        (make_checkpoint if tool == 'convert' else make_model)(name, root / name)


def make_case(tool: str, seed: int, number: int, root: Path, folder: Path) -> Case:
    """Copy a template to ``folder`` and spoil it."""
    rng = random.Random(f'{tool} {seed} {number}')
    if tool == 'convert':
        return _convert_case(rng, number, root, folder)
    return _verify_case(rng, number, root, folder)


# --- xhf-convert ---

_CONVERT_OPTIONS = ([], [], [], [], ['--dtype', 'float32'], ['--verify'], ['--dry-run'], ['--max-shard-size', '20KB'])


def _convert_case(rng: random.Random, number: int, root: Path, folder: Path) -> Case:
    template = rng.choice(list(CHECKPOINTS))
    kind = rng.choices(['pickle', 'zip', 'bytes', 'config', 'text', 'names'], [35, 20, 8, 17, 5, 15])[0]
    if kind == 'text' and template != 'file':
        kind = 'config'
    shutil.copytree(root / template, folder, dirs_exist_ok=True)
    given, options = CHECKPOINTS[template], list(rng.choice(_CONVERT_OPTIONS))
    of_torch = sorted(path for path in folder.rglob('*') if path.suffix in ('.pt', '.pth'))
    sub = rng.randrange(2**32)
    if kind == 'names':
        what = mutate_names(folder / Path(given).parts[0], sub)
    elif kind == 'text':
        what, options = _spoil_text(folder, rng, sub, options)
    else:
        if kind == 'config':
            file = rng.choice(_jsons(folder))
        elif kind == 'bytes':
            file = rng.choice([*of_torch, *of_torch, *_texts(folder)])
        else:
            file = rng.choice(of_torch)
        edit = _CONVERT_EDITS[kind]
        file.write_bytes(edit(file.read_bytes(), sub))
        what = f'{kind} of {file.relative_to(folder)}'
    return Case('convert', number, template, kind, what, (given, 'out', '--workers', '2', *options))


_CONVERT_EDITS: dict[str, Callable[[bytes, int], bytes]] = {
    'pickle': lambda data, sub: with_pickle(data, lambda pickled: mutated_pickle(pickled, sub)),
    'zip': mutated_zip,
    'bytes': mutated_bytes,
    'config': mutated_config,
}


def _spoil_text(folder: Path, rng: random.Random, sub: int, options: list[str]) -> tuple[str, list[str]]:
    """Spoil the run's config, in the checkpoint or beside it."""
    script = folder / 'work_dir' / 'run.py'
    old = script.read_text()
    new = mutated_text(old, sub)
    data = new.encode('utf-8', 'surrogatepass')
    if rng.random() < 0.5:
        script.write_bytes(data)
        return f'text of {script.name}', [*options, '--config', 'work_dir/run.py']
    checkpoint = folder / 'work_dir' / 'iter_5.pth'
    pickled_old, pickled_new = (struct.pack('<I', len(text)) + text for text in (old.encode(), data))
    checkpoint.write_bytes(
        with_pickle(checkpoint.read_bytes(), lambda pickled: pickled.replace(pickled_old, pickled_new))
    )
    return 'text of the config in the checkpoint', options


# --- xhf-verify ---

_VERIFY_OPTIONS = ([], [], [], ['--json'], ['--json'], ['--no-read'], ['--no-model'], [ORIGINAL])


def _verify_case(rng: random.Random, number: int, root: Path, folder: Path) -> Case:
    template = rng.choice(MODELS)
    kind = rng.choices(['header', 'bytes', 'config', 'names'], [20, 15, 30, 30])[0]
    shutil.copytree(root / template, folder, dirs_exist_ok=True)
    model, options, sub = folder / 'model', list(rng.choice(_VERIFY_OPTIONS)), rng.randrange(2**32)
    if options == [ORIGINAL]:
        shutil.copytree(model, folder / ORIGINAL)
    shards = sorted(model.glob('*.safetensors'))
    if kind == 'names':
        what = mutate_names(model, sub)
    else:
        file = rng.choice(shards if kind == 'header' else _jsons(model) if kind == 'config' else _files(model))
        _VERIFY_EDITS[kind](file, sub)
        what = f'{kind} of {file.name}'
    return Case('verify', number, template, kind, what, ('model', *options, '--workers', '2'))


def _spoil_header(file: Path, sub: int) -> None:
    header, body = _split(file.read_bytes())
    file.write_bytes(_joined(mutated_json(header, sub), body))


_VERIFY_EDITS: dict[str, Callable[[Path, int], Any]] = {
    'header': _spoil_header,
    'bytes': lambda file, sub: file.write_bytes(mutated_bytes(file.read_bytes(), sub)),
    'config': lambda file, sub: file.write_bytes(mutated_config(file.read_bytes(), sub)),
}


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack('<Q', data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode('utf-8', 'surrogatepass')
    return struct.pack('<Q', len(text)) + text + body


def _jsons(folder: Path) -> list[Path]:
    return sorted(folder.rglob('*.json'))


def _texts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob('*') if path.suffix == '.json' or path.name == 'latest')


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob('*') if path.is_file())
