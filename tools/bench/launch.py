"""Starts the benchmark's processes in the virtual environment of this Python, activated or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.progress import tell_on_stderr

_LARGE = dict(hidden_size=2048, intermediate_size=5504, num_attention_heads=16, num_key_value_heads=16)
_SMALL = dict(hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=8)
#: Billions of parameters to the config of a Llama of that size. Sizes differ only in layers, so the largest tensor is
#: the same; the smallest is for trying out. Not in the worker, which imports DeepSpeed: that prints a warning to
#: standard output, which is only for the table.
MODELS: dict[float, dict[str, int]] = {
    0.05: dict(num_hidden_layers=6, **_SMALL),
    0.2: dict(num_hidden_layers=1, **_LARGE),
    0.5: dict(num_hidden_layers=8, **_LARGE),
    0.8: dict(num_hidden_layers=14, **_LARGE),
    1.5: dict(num_hidden_layers=27, **_LARGE),
    1.6: dict(num_hidden_layers=30, **_LARGE),
}
WORKER = Path(__file__).with_name('worker.py')
_TOOLS = Path(__file__).resolve().parents[1]
_POLL_SECS = 0.3


def torchrun(n_processes: int) -> list[str]:
    """The torchrun command, up to the script."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--local-addr', 'localhost']
    return [*command, '--nproc_per_node', str(n_processes)]


def environment(**variables: str) -> dict[str, str]:
    """No GPU, and the settings of ``use_env`` in env.sh: DeepSpeed compiles with the ninja beside this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [os.environ.get('PATH')])])
    # This package, for scripts in it, and what it shares with tests/helpers
    packages = [str(_TOOLS), str(_TOOLS.parent), variables.pop('PYTHONPATH', os.environ.get('PYTHONPATH', ''))]
    variables['PYTHONPATH'] = os.pathsep.join(filter(None, packages))
    extensions = {'TORCH_EXTENSIONS_DIR': str(Path(sys.prefix, 'torch_extensions'))}
    ours = {'PATH': path, 'DS_ACCELERATOR': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
    return extensions | os.environ | ours | variables


def run_worker(n_ranks: int, job: dict[str, Any], out: Path, **variables: str) -> dict[str, Any]:
    """Launch worker.py for ``job`` and show its progress. Its files are below ``out``.

    Args:
        variables: Added to its environment.

    Returns:
        What it measured.
    """
    with tempfile.TemporaryDirectory(dir=out) as name:
        folder = Path(name)
        (folder / 'job.json').write_text(json.dumps(job))
        progress = folder / 'progress'
        progress.touch()
        command = [*torchrun(n_ranks), str(WORKER), str(folder)]
        with (folder / 'output').open('w') as output, progress.open() as lines:
            process = subprocess.Popen(command, env=environment(**variables), stdout=output, stderr=output)
            try:
                while process.poll() is None:
                    for line in lines:
                        tell_on_stderr(line.rstrip('\n'))
                    try:
                        process.wait(_POLL_SECS)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                process.terminate()  # does nothing if it has ended
                process.wait()
        if process.returncode:
            sys.exit(f'{" ".join(command)} failed:\n{(folder / "output").read_text()[-12000:]}')
        return json.loads((folder / 'result.json').read_text())
