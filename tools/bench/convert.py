"""A conversion side by side with its peers, each in a separate process, start-up included.

Needs the environment that has xtuner (``source tools/env.sh; use_env .venv-xtuner``). DeepSpeed saves a checkpoint with
two ranks; then the ways convert it in turns, in random order, from the page cache. Memory is the peak of a process's
anonymous memory (RssAnon), sampled every 5 ms; the dry run shows the cost of imports and planning alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.launch import ROOT, environment, in_turns, run_worker, tell_on_stderr
from xhf_hooks.format.safetensors import build_header

FLOOR = 'floor: copy what is read and written'
DRY = 'xhf-convert --dry-run: imports and plan'
OURS = 'xhf-convert'
ZERO_TO_FP32 = 'DeepSpeed: zero_to_fp32.py --safe_serialization'
XTUNER = 'XTuner: convert pth_to_hf'
_SAMPLE_SECS = 0.005
#: Billions of parameters to the optimizer. AdamW's states are two thirds of a checkpoint; no converter needs them, but
#: some read them. The largest size uses SGD, with fp32 master weights only: 24 GB are too few for AdamW.
OPTIMIZERS = {0.05: 'AdamW', 0.5: 'AdamW', 1.5: 'SGD'}

COPY = """
import sys
out, n_read, n_written, *files = sys.argv[1:]
block = memoryview(bytearray(16 * 2**20))
each = int(n_read) // len(files)
for name in files:
    with open(name, 'rb', buffering=0) as file:
        left = each
        while left > 0 and (n := file.readinto(block[:left])):
            left -= n
with open(out, 'wb', buffering=0) as file:
    for start in range(0, int(n_written), len(block)):
        file.write(block[: int(n_written) - start])
"""

CONFIG = """
tokenizer = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path={base!r})
model = dict(
    type='xtuner.model.SupervisedFinetune',
    llm=dict(
        type='transformers.AutoModelForCausalLM.from_pretrained',
        pretrained_model_name_or_path={base!r},
        torch_dtype='auto',
    ),
)
"""


def variables() -> dict[str, str]:
    """For every process: no network, and xtuner importable with a CPU build of torch."""
    stand_ins = str(ROOT / 'tests' / 'e2e' / 'xtuner_stack')
    return {
        'PYTHONPATH': os.pathsep.join(filter(None, [stand_ins, os.environ.get('PYTHONPATH')])),
        'HF_HUB_OFFLINE': '1',
    }


def make_checkpoint(billions: float, folder: Path) -> dict[str, Any]:
    """Make the checkpoint, a config, and a base model of zeros (which XTuner loads); returns their figures."""
    from tests.helpers.models.model_folder import save_tokenizer

    job = {'what': 'checkpoint', 'billions': billions, 'optimizer': OPTIMIZERS[billions], 'folder': str(folder)}
    made = run_worker(2, job, folder, **variables())
    base, numel = folder / 'base', made['parameters']
    (folder / 'config.py').write_text(CONFIG.format(base=str(base)))
    save_tokenizer(base, 8)
    _save_zeros(base / 'model.safetensors', made['shapes'])
    nbytes = sum(file.stat().st_size for file in (folder / 'iter_1.pth').iterdir())
    return {'parameters': numel, 'checkpoint_nbytes': nbytes, 'read_nbytes': 4 * numel, 'written_nbytes': 2 * numel}


def _save_zeros(file: Path, shapes: Mapping[str, list[int]]) -> None:
    """Save bf16 weights that are zero, as a hole in the file."""
    header, entries = build_header([(name, 'BF16', tuple(shape)) for name, shape in shapes.items()])
    with file.open('wb') as out:
        out.write(header)
        out.truncate(entries[-1].end)


def ours(folder: Path) -> list[str]:
    checkpoint, config = str(folder / 'iter_1.pth'), str(folder / 'config.py')
    return [sys.executable, 'tools/convert.py', checkpoint, str(folder / 'out'), '--config', config]


def ways(folder: Path, size: Mapping[str, Any]) -> dict[str, list[str]]:
    """Name to command; each writes to ``folder/out``."""
    checkpoint, out = folder / 'iter_1.pth', str(folder / 'out')
    optim_files = sorted(map(str, checkpoint.glob('*_optim_states.pt')))
    zero_to_fp32 = [sys.executable, str(folder / 'zero_to_fp32.py'), str(folder), out]
    xtuner = [sys.executable, '-m', 'xtuner.tools.model_converters.pth_to_hf', str(folder / 'config.py')]
    return {
        FLOOR: [sys.executable, '-c', COPY, out, str(size['read_nbytes']), str(size['written_nbytes']), *optim_files],
        DRY: [*ours(folder), '--dry-run'],
        OURS: ours(folder),
        ZERO_TO_FP32: [*zero_to_fp32, '-t', 'iter_1.pth', '--safe_serialization'],
        XTUNER: [*xtuner, str(checkpoint), out],
    }


def measure_command(command: list[str], out: Path) -> dict[str, float]:
    """Seconds and peak anonymous memory of one process."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    os.sync()
    started = time.perf_counter()
    peak = 0
    with (out.parent / 'output').open('wb') as output:
        process = subprocess.Popen(command, env=environment(**variables()), cwd=ROOT, stdout=output, stderr=output)
        while process.poll() is None:
            peak = max(peak, _anonymous_nbytes(process.pid))
            time.sleep(_SAMPLE_SECS)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f'{" ".join(command)} failed:\n{(out.parent / "output").read_text()[-3000:]}')
    return {'seconds': seconds, 'peak_mb': peak / 1e6}


def _anonymous_nbytes(pid: int) -> int:
    try:
        status = Path(f'/proc/{pid}/status').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith('RssAnon:')), 0)


def measure(args: Namespace, _: int, billions: float) -> dict[str, Any]:
    """Make a checkpoint of this size, and measure all ways."""
    with tempfile.TemporaryDirectory(dir=args.out) as name:
        folder = Path(name)
        size = make_checkpoint(billions, folder)
        commands = ways(folder, size)

        def one(way: str) -> dict[str, float]:
            _read(sorted((folder / 'iter_1.pth').iterdir()))  # whatever the previous way evicted from memory
            return measure_command(commands[way], folder / 'out')

        return {**size, 'runs': in_turns(list(commands), args.repeats, one, tell_on_stderr)}


def _read(files: list[Path]) -> None:
    """Bring files into the page cache."""
    for file in files:
        with file.open('rb') as opened:
            while opened.read(2**20):
                pass
