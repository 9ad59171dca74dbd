"""Runs the commands with limited memory: ``python -m tests.helpers.limited_memory FOLDER`` prints a line per run.

Modules are imported once, without a limit; each run is a fork that may use a given number of MB more.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

import xhf_hooks.convert  # noqa: F401
from tests.helpers.special_files import run_forked
from xhf_hooks.cli import convert, verify
from xhf_hooks.verify import folder as verify_folder  # noqa: F401

#: From too little to open the checkpoint, over too little for its threads, to plenty.
MORE_MB = (0, 3, 30, 130, 160, 200, 250, 300, 400, 600, 10_000)
_SIZES = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=20_000, num_attention_heads=8)


def size_of_this_process() -> int:
    """Address space of this process, in bytes."""
    return int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()


def make_model(folder: Path) -> None:
    """Make ``iter_7.pth`` and the folder ``model``, of 125 MB."""
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=8, **_SIZES))
    model.save_pretrained(folder / 'model')
    torch.save({'state_dict': model.state_dict(), 'meta': {'iter': 7}}, folder / 'iter_7.pth')


def main(folder: Path) -> None:
    make_model(folder)
    to_convert = [str(folder / 'iter_7.pth'), str(folder / 'out'), '--base', str(folder / 'model')]
    runs = {'convert': (convert.main, [*to_convert, '--overwrite', '--workers', '4'])}
    runs['verify'] = verify.main, [str(folder / 'model')]
    runs['compare'] = verify.main, [str(folder / 'model'), str(folder / 'iter_7.pth')]
    for name, (command, argv) in runs.items():
        for more_mb in MORE_MB:

            def limited(argv: list[str], command=command, more_mb=more_mb) -> int:
                most = size_of_this_process() + more_mb * 10**6
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                return command(argv)

            status, _ = run_forked(limited, argv, folder / 'log', 120)
            said = (folder / 'log').read_text(errors='replace').splitlines()
            left = [path.name for path in folder.iterdir() if path.name.startswith('.')]
            print(json.dumps([name, more_mb, status, left, said]), flush=True)


if __name__ == '__main__':
    main(Path(sys.argv[1]))
