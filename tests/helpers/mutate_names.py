"""Mutations of a folder's names, file types and links that keep all contents. Each has a number."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
from pathlib import Path


def mutate_names(folder: Path, number: int) -> str:
    """Rename one or two files, or put something else in their place.

    Returns:
        What was done.
    """
    rng = random.Random(number)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        files = sorted(path for path in folder.rglob('*') if path.is_file() and not path.is_symlink())
        if not files:
            break
        file = rng.choice(files)
        done.append(rng.choice(_EDITS)(file, files, rng))
    return '; '.join(done)


# --- edits; each returns a description ---


def _swap(file: Path, files: list[Path], rng: random.Random) -> str:
    """Swap the names of two files of one kind."""
    alike = [other for other in files if other.suffix == file.suffix and other != file]
    if not alike:
        return _remove(file, files, rng)
    other = rng.choice(alike)
    between = file.with_name('between')
    file.rename(between)
    other.rename(file)
    between.rename(other)
    return f'{file.name} and {other.name} exchanged'


def _overwrite(file: Path, files: list[Path], rng: random.Random) -> str:
    """Replace a file with a copy of another."""
    alike = [other for other in files if other.suffix == file.suffix and other != file]
    other = rng.choice(alike or files)
    if other != file:
        shutil.copy(other, file)
    return f'{file.name} is a copy of {other.name}'


def _remove(file: Path, files: list[Path], rng: random.Random) -> str:
    file.unlink()
    return f'{file.name} removed'


def _again(file: Path, files: list[Path], rng: random.Random) -> str:
    """Copy a file to a name with other digits."""
    name = _other_name(file.name, rng)
    copy = file.with_name(name)
    if not copy.exists():
        shutil.copy(file, copy)
    return f'{file.name} is there as {name[:80]!r}, too'


def _rename(file: Path, files: list[Path], rng: random.Random) -> str:
    name = _other_name(file.name, rng)
    target = file.with_name(name)
    if not target.is_dir():
        file.rename(target)
    return f'{file.name} is named {name[:80]!r}'


def _other_name(name: str, rng: random.Random) -> str:
    def digits(match: re.Match[str]) -> str:
        old = match[0]
        return rng.choice([f'0{old}', f'{int(old) + 1}', '0', '7', '99', '9' * 40, '\u0663', f'{old}0', '1' * 180])

    where = list(re.finditer(r'\d+', name))
    if where and rng.random() < 0.7:
        match = rng.choice(where)
        new = name[: match.start()] + digits(match) + name[match.end() :]
    else:
        new = rng.choice([f'{name}\n\x1b[2J', f'x{name}', f'{name}.tmp', name.upper(), f'bf16_{name}', f' {name}',
                          f'{name}~',
                          f'{name[:20]}\udcff', f'.{name}', 'latest', 'last_checkpoint', 'config.json',
                          'model.safetensors',
                          'adapter_config.json', 'rank0.pth', '__0_0.distcp', 'layer_01-model_states.pt'])  # fmt: skip
    return new[:200]


def _link(file: Path, files: list[Path], rng: random.Random) -> str:
    """Replace a file with a link: to where it was moved, another file, itself, nothing, or a device."""
    away = file.parent / f'.{file.name[:100]}.away'
    targets = [
        'away',
        'other',
        'itself',
        'none',
        'folder',
        '/dev/zero',
        '/dev/full',
        '/dev/tty',
        '/proc/self/mem',
        '/etc/hostname',
    ]
    kind = rng.choice(targets)
    file.rename(away)
    places = {'away': away.name, 'other': rng.choice(files), 'itself': file.name, 'none': 'none', 'folder': file.parent}
    file.symlink_to(places.get(kind, kind))
    return f'{file.name} is a link to {kind}'


def _special(file: Path, files: list[Path], rng: random.Random) -> str:
    """Replace a file with a FIFO, a socket or a folder."""
    kind = rng.choice(['FIFO', 'FIFO', 'link to a FIFO', 'socket', 'folder'])
    file.unlink()
    if kind == 'FIFO':
        os.mkfifo(file)
    elif kind == 'link to a FIFO':
        fifo = file.parent / '.fifo'
        if not fifo.exists():
            os.mkfifo(fifo)
        file.symlink_to(fifo.name)
    elif kind == 'folder':
        file.mkdir()
    else:
        here = os.getcwd()
        os.chdir(file.parent)  # a socket's path can have at most 107 bytes
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(file.name[:100])
        finally:
            os.chdir(here)
    return f'{file.name} is a {kind}'


def _size(file: Path, files: list[Path], rng: random.Random) -> str:
    """Empty a file, truncate it, or append a hole of up to a terabyte."""
    nbytes = rng.choice([0, 0, 1, file.stat().st_size // 2, file.stat().st_size + 1, 10**9, 10**12])
    os.truncate(file, nbytes)
    return f'{file.name} has {nbytes} bytes'


def _extra(file: Path, files: list[Path], rng: random.Random) -> str:
    """Add an unexpected file."""
    name = rng.choice(['FIFO', 'notes.txt', 'model.safetensors', 'config.json', 'tokenizer.json', 'latest',
                       'x.safetensors',
                       'model-00003-of-00003.safetensors', 'zero_to_fp32.py', 'bad\n\x1b[2J',
                       'pytorch_model.bin'])  # fmt: skip
    path = file.with_name(name)
    if not path.exists() and not path.is_symlink():
        if name == 'FIFO':
            os.mkfifo(path)
        else:
            path.write_bytes(rng.choice([b'', b'x', b'{}', b'\x08' + bytes(7) + b'{}      ']))
    return f'{name!r} beside {file.name}'


_EDITS = [
    _swap, _swap, _swap, _overwrite, _overwrite, _remove, _again, _again, _rename, _rename, _link, _special, _special,
    _size, _extra,
]  # fmt: skip
