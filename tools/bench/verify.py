"""Verification side by side with only reading the same files, from the disk and from memory."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import add_billions, add_number
from bench.progress import Progress, end_of_progress, tell_on_stderr
from xhf_hooks.concurrency.thread_pool import default_workers

#: Billions of parameters to layers of a Llama with hidden size 2048.
LAYERS = {0.02: 0, 0.5: 8}
FROM_DISK, FROM_MEMORY = 'from the disk', 'from memory'
_BLOCK_NBYTES = 2**20
_START_SECS = 25.0  # for imports and making the folders

Way = tuple[str, Sequence[Path], Callable[[], Any]]


def add_options(parser: ArgumentParser) -> None:
    add_billions(parser, 0.5, LAYERS)
    add_number(parser, '--repeats', 5, 'measurements per table row')


def expected_secs(args: Namespace) -> float:
    """Estimated duration."""
    return _START_SECS + args.repeats * sum(_run_secs(args.billions, where) * 4 for where in (FROM_DISK, FROM_MEMORY))


def _run_secs(billions: float, where: str) -> float:
    """Approximate duration of reading and verifying in one way."""
    return (5.0 if where == FROM_DISK else 1.2) * billions


def measure(args: Namespace) -> dict[str, Any]:
    """Measure the ways in turns, in random order, each after reading the same files.

    Returns:
        Seconds of every run, ``{where: {way: [{'reading': s, 'verifying': s}]}}``, and bytes by way.
    """
    repeats = args.repeats
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        ways = _ways(args.billions, Path(folder))
        order = random.Random(0)
        planned = [
            _run_secs(args.billions, where) for where in (FROM_DISK, FROM_MEMORY) for _ in range(repeats * len(ways))
        ]
        progress = Progress(planned, tell_on_stderr)
        runs: dict[str, dict[str, list[dict[str, float]]]] = {
            where: {name: [] for name, _, _ in ways} for where in (FROM_DISK, FROM_MEMORY)
        }
        for where, found in runs.items():
            for _ in range(repeats):
                for name, folders, verify in order.sample(ways, len(ways)):
                    files = [file for each in folders for file in sorted(each.iterdir())]
                    seconds = {}
                    for what, action in (('reading', lambda files=files: read(files)), ('verifying', verify)):
                        (drop_from_memory if where == FROM_DISK else read)(files)
                        started = time.perf_counter()
                        action()
                        seconds[what] = time.perf_counter() - started
                    found[name].append(seconds)
                    progress.done(f'{name}, {where}', seconds['verifying'])
        end_of_progress()
        nbytes = {name: sum(f.stat().st_size for each in folders for f in each.iterdir()) for name, folders, _ in ways}
    return {'repeats': repeats, 'nbytes': nbytes, 'runs': runs}


def _ways(billions: float, parent: Path) -> list[Way]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from xhf_hooks import save_hf
    from xhf_hooks.convert import ConvertOptions
    from xhf_hooks.verify.compare import compare_models
    from xhf_hooks.verify.folder import verify_folder
    from xhf_hooks.verify.open_models import open_models

    sizes = dict(vocab_size=4000, hidden_size=2048, intermediate_size=5504, num_attention_heads=16)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS[billions], **sizes))
    f32, bf16, twin, foreign = (parent / name for name in ('f32', 'bf16', 'twin', 'foreign'))
    save_hf(model, f32)
    save_hf(model.bfloat16(), bf16)
    del model
    for copy in (twin, foreign):
        shutil.copytree(bf16, copy)
    (foreign / 'xhf_manifest.json').unlink()

    def compared(a: Path, b: Path) -> str:
        readers = open_models(a, b, ConvertOptions())
        try:
            return compare_models(*readers, workers=default_workers()).verdict
        finally:
            for reader in readers:
                reader.close()

    return [
        ('DIR, with a manifest', [bf16], lambda: _require(verify_folder(bf16, model=False).is_good)),
        ('DIR, without one', [foreign], lambda: _require(verify_folder(foreign, model=False).is_good)),
        ('A B, identical', [bf16, twin], lambda: _require(compared(bf16, twin) == 'identical')),
        ('A B, float32 and bfloat16', [f32, bf16], lambda: _require(compared(f32, bf16) == 'rounding')),
    ]


def _require(ok: bool) -> None:
    if not ok:
        raise RuntimeError('the folders are not what they were made to be')


def read(files: Sequence[Path]) -> None:
    """Read all files with as many threads as a verification."""
    fds = [os.open(file, os.O_RDONLY) for file in files]
    blocks = [(fd, start) for fd in fds for start in range(0, os.fstat(fd).st_size, _BLOCK_NBYTES)]
    workers = default_workers()

    def work(first: int) -> None:
        buffer = bytearray(_BLOCK_NBYTES)
        for fd, start in blocks[first::workers]:
            os.preadv(fd, [buffer], start)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in fds:
        os.close(fd)


def drop_from_memory(files: Sequence[Path]) -> None:
    """Drop files from the page cache, so that the next reader gets them from the disk."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
