"""A conversion side by side with its peers, each in a separate process, start-up included.

Needs an environment that has xtuner (``source tools/env.sh; use_env .venv-xtuner-0.1``). DeepSpeed saves a checkpoint
with two ranks; then the ways convert it in turns, in random order, from the page cache. Memory is the peak of a
process's anonymous memory (RssAnon), sampled every 5 ms; the dry run shows the cost of imports and planning alone.
"""

from __future__ import annotations

import os
import re
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
        for start in range(0, each, len(block)):
            file.readinto(block[: each - start])
with open(out, 'wb', buffering=0) as file:
    for start in range(0, int(n_written), len(block)):
        file.write(block[: int(n_written) - start])
"""

CONFIG = """
tokenizer = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path={base!r})
llm = dict(
    type='transformers.AutoModelForCausalLM.from_pretrained', pretrained_model_name_or_path={base!r}, torch_dtype='auto'
)
model = dict(type='xtuner.model.SupervisedFinetune', llm=llm)
"""


#: Needed to import xtuner beside a CPU build of torch.
STAND_INS = ROOT / 'tests' / 'e2e' / 'xtuner_stack'


def make_checkpoint(billions: float, folder: Path) -> dict[str, Any]:
    """Make the checkpoint, a config, and a base model of zeros (which XTuner loads); returns their figures."""
    from tests.helpers.models.model_folder import save_tokenizer

    job = {'what': 'checkpoint', 'billions': billions, 'optimizer': OPTIMIZERS[billions], 'folder': str(folder)}
    made = run_worker(2, job, folder, STAND_INS)
    base, numel = folder / 'base', made['parameters']
    (folder / 'config.py').write_text(CONFIG.format(base=str(base)))
    save_tokenizer(base, 8)
    header, entries = build_header([(name, 'BF16', tuple(shape)) for name, shape in made['shapes'].items()])
    with (base / 'model.safetensors').open('wb') as weights:
        weights.write(header)
        weights.truncate(entries[-1].end)  # zeros, as a hole in the file
    nbytes = sum(file.stat().st_size for file in (folder / 'iter_1.pth').iterdir())
    return {'parameters': numel, 'checkpoint_nbytes': nbytes, 'read_nbytes': 4 * numel, 'written_nbytes': 2 * numel}


def ways(folder: Path, size: Mapping[str, Any]) -> dict[str, list[str]]:
    """Name to command; each writes to ``folder/out``."""
    checkpoint, config, out = str(folder / 'iter_1.pth'), str(folder / 'config.py'), str(folder / 'out')
    optim_files = sorted(map(str, Path(checkpoint).glob('*_optim_states.pt')))
    ours = ['tools/convert.py', checkpoint, out, '--config', config]
    commands = {
        FLOOR: ['-c', COPY, out, str(size['read_nbytes']), str(size['written_nbytes']), *optim_files],
        DRY: [*ours, '--dry-run'],
        OURS: ours,
        ZERO_TO_FP32: [f'{folder}/zero_to_fp32.py', str(folder), out, '-t', 'iter_1.pth', '--safe_serialization'],
        XTUNER: ['-m', 'xtuner.tools.model_converters.pth_to_hf', config, checkpoint, out],
    }
    return {way: [sys.executable, *command] for way, command in commands.items()}


def measure_command(command: list[str], out: Path) -> dict[str, float]:
    """Seconds and peak anonymous memory of one process."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    os.sync()
    started = time.perf_counter()
    peak = 0
    with (out.parent / 'output').open('wb') as output:
        process = subprocess.Popen(command, env=environment(STAND_INS), cwd=ROOT, stdout=output, stderr=output)
        while process.poll() is None:
            anonymous = re.search(r'RssAnon:\s*(\d+) kB', Path(f'/proc/{process.pid}/status').read_text())
            peak = max(peak, int(anonymous[1]) * 1024 if anonymous else 0)  # none after its end
            time.sleep(0.005)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f'{" ".join(command)} failed:\n{(out.parent / "output").read_text()[-3000:]}')
    return {'seconds': seconds, 'peak_mb': peak / 1e6}


def measure(args: Namespace, _: int, billions: float) -> dict[str, Any]:
    """Make a checkpoint of this size, and measure all ways."""
    with tempfile.TemporaryDirectory(dir=args.out) as name:
        folder = Path(name)
        size = make_checkpoint(billions, folder)
        commands = ways(folder, size)

        def one(way: str) -> dict[str, float]:
            for file in (folder / 'iter_1.pth').iterdir():  # whatever the previous way evicted from memory
                subprocess.run(['cat', str(file)], stdout=subprocess.DEVNULL, check=True)
            return measure_command(commands[way], folder / 'out')

        return {**size, 'runs': in_turns(list(commands), args.repeats, one, tell_on_stderr)}
