"""Starts the processes of a benchmark in the virtual environment of this Python, activated or not; takes turns."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Figures = dict[str, float]
_WIDE = dict(hidden_size=2048, intermediate_size=5504, num_attention_heads=16, num_key_value_heads=16)
_NARROW = dict(hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=8)
_TINY = dict(hidden_size=64, intermediate_size=172, num_attention_heads=4, num_key_value_heads=4)
_WIDE_LAYERS = {0.2: 1, 0.5: 8, 0.8: 14, 1.5: 27, 1.6: 30}
#: Billions of parameters to the config of a Llama of that size. Sizes differ only in layers, so the largest tensor is
#: the same; the smallest is for trying out. Not in the worker, which imports DeepSpeed: that prints a warning to
#: standard output, which is only for the table.
MODELS: dict[float, dict[str, int]] = {
    0.01: dict(num_hidden_layers=112, **_TINY),  # a thousand small tensors
    0.05: dict(num_hidden_layers=6, **_NARROW),
    **{billions: dict(num_hidden_layers=n_layers, **_WIDE) for billions, n_layers in _WIDE_LAYERS.items()},
}
ROOT = Path(__file__).resolve().parents[2]
tell_on_stderr = partial(print, file=sys.stderr, flush=True)


def environment(*packages: Path) -> dict[str, str]:
    """No GPU, and the settings of ``use_env`` in env.sh: DeepSpeed compiles with the ninja beside this Python.

    Args:
        packages: Folders of packages, beside this one and tests/helpers.
    """
    given = filter(None, [os.environ.get('PYTHONPATH')])
    ours = {
        'PATH': os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', os.defpath)]),
        'PYTHONPATH': os.pathsep.join([*map(str, packages), str(ROOT / 'tools'), str(ROOT), *given]),
        'DS_ACCELERATOR': 'cpu',
        'CUDA_VISIBLE_DEVICES': '',
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
    }
    return {'TORCH_EXTENSIONS_DIR': str(Path(sys.prefix, 'torch_extensions'))} | os.environ | ours


def run_worker(n_ranks: int, job: dict[str, Any], out: Path, *packages: Path) -> dict[str, Any]:
    """Launch worker.py for ``job`` and show its progress. Its files are below ``out``; returns what it measured."""
    with tempfile.TemporaryDirectory(dir=out) as name:
        folder = Path(name)
        (folder / 'job.json').write_text(json.dumps(job))
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--local-addr', 'localhost']
        command += ['--nproc_per_node', str(n_ranks), str(Path(__file__).with_name('worker.py')), str(folder)]
        progress = folder / 'progress'
        progress.touch()
        with (folder / 'output').open('w') as output, progress.open() as lines:
            process = subprocess.Popen(command, env=environment(*packages), stdout=output, stderr=output)
            try:
                while process.poll() is None:
                    for line in lines:
                        tell_on_stderr(line.rstrip('\n'))
                    time.sleep(0.3)
            finally:
                process.terminate()  # does nothing if it has ended
                process.wait()
        if process.returncode:
            sys.exit(f'{" ".join(command)} failed:\n{(folder / "output").read_text()[-12000:]}')
        return json.loads((folder / 'result.json').read_text())


def in_turns(
    ways: Sequence[str], repeats: int, measure: Callable[[str], Figures], tell: Callable[[str], None]
) -> dict[str, list[Figures]]:
    """Measure each way several times, in random order, so that no way always follows the same other one.

    ``tell`` is called after each run with one line of text.
    """
    order = random.Random(0)
    turns = [way for _ in range(repeats) for way in order.sample(list(ways), len(ways))]
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    began = time.perf_counter()
    for n_done, way in enumerate(turns, 1):
        found = measure(way)
        runs[way].append(found)
        left = (time.perf_counter() - began) / n_done * (len(turns) - n_done)
        seconds = found.get('seconds', found.get('save_secs', 0.0))
        tell(f'[{n_done}/{len(turns)}] {way}: {seconds:.2f} s; about {left / 60:.0f} min left')
    return runs
