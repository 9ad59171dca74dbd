"""Replaces every file that the commands may open with a FIFO, a socket, a link to a device and the like.

``python -m tests.helpers.special_files FOLDER LIMIT_SECS [SCENARIO ...]`` prints a line of JSON for each case. Modules
are imported once; every case is a fork, which is killed if it takes too long.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

KINDS = ('fifo', 'socket', 'link to /dev/zero', 'link to a fifo', 'folder', 'link to nothing')
#: Files that the commands look for but that do not exist.
_LOOKED_FOR = (
    *('added_tokens.json', 'chat_template.jinja', 'chat_template.json', 'preprocessor_config.json', 'tokenizer.model'),
    *('special_tokens_map.json', 'vocab.json', 'merges.txt', 'adapter_config.json', 'xhf_manifest.json', 'notes.txt'),
)


def put(path: Path, kind: str) -> None:
    """Make one of :data:`KINDS` at ``path``, replacing what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == 'fifo':
        os.mkfifo(path)
    elif kind == 'socket':
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == 'link to /dev/zero':
        path.symlink_to('/dev/zero')
    elif kind == 'link to a fifo':
        pipe = path.parents[1] / 'pipe'
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        path.symlink_to(pipe)
    elif kind == 'folder':
        path.mkdir()
    else:
        path.symlink_to('/nowhere')


def run_forked(command: Callable[[list[str]], int], argv: list[str], log: Path, limit_secs: float) -> tuple[int, float]:
    """Run the command in a fork; returns its exit status (-1 if it had to be killed) and seconds."""
    started = time.monotonic()
    pid = os.fork()
    if not pid:
        status = 99
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            status = command(argv)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    while time.monotonic() < started + limit_secs:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - started
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1, time.monotonic() - started


def make_base(folder: Path) -> None:
    """Save a model with all possible small files."""
    from tests.helpers.model_folder import save_model

    save_model('qwen2', folder, max_shard_size='80KB')
    (folder / 'processor_config.json').write_text('{}')
    tokenizer = folder / 'tokenizer_config.json'
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), 'chat_template': '{{ messages }}'}))


def _config(root: Path) -> str:
    llm = {'type': 'transformers.AutoModelForCausalLM.from_pretrained', 'pretrained_model_name_or_path': f'{root}/base'}
    return f'model = dict(type="xtuner.model.SupervisedFinetune", llm={llm!r})\n'


def of_xtuner(root: Path) -> list[str]:
    """An MMEngine work_dir with a config and a ZeRO-3 checkpoint that lacks the model's embedding."""
    from safetensors.torch import load_file

    from tests.helpers.made_checkpoint import MadeCheckpoint

    make_base(root / 'base')
    weights = {f'llm.{n}': t for file in (root / 'base').glob('*.safetensors') for n, t in load_file(file).items()}
    MadeCheckpoint(weights, stage=3).write(root / 'work' / 'iter_5.pth')
    (root / 'work' / 'config.py').write_text(_config(root))
    (root / 'work' / 'last_checkpoint').write_text('iter_5.pth')
    return ['convert', f'{root}/work', f'{root}/out']


def of_lora(root: Path) -> list[str]:
    """Merging an adapter, which also reads the base model's weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    make_base(root / 'base')
    base = AutoModelForCausalLM.from_pretrained(root / 'base')
    model = get_peft_model(base, LoraConfig(r=2, target_modules=['q_proj'], task_type='CAUSAL_LM'))
    model.save_pretrained(root / 'work' / 'checkpoint-5')
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if '.lora_' in name}
    tag = root / 'work' / 'checkpoint-5' / 'global_step5'
    tag.mkdir()
    content = {'module': state, 'buffer_names': [], 'global_steps': 5, 'ds_config': {}, 'ds_version': '0.19.6'}
    torch.save(content, tag / 'mp_rank_00_model_states.pt')
    (root / 'work' / 'checkpoint-5' / 'latest').write_text('global_step5')
    return ['convert', f'{root}/work/checkpoint-5', f'{root}/out', '--lora', 'merge']


def of_overwrite(root: Path) -> list[str]:
    """Replacing a folder of ours."""
    from tests.helpers.model_folder import write_manifest

    of_single_file(root)
    shutil.copytree(root / 'base', root / 'out')
    write_manifest(root / 'out')
    return [*of_single_file_command(root), '--overwrite']


def of_single_file(root: Path) -> list[str]:
    """A single .pth file, with --config and --base."""
    import torch
    from safetensors.torch import load_file

    make_base(root / 'base')
    weights = {n: t for file in (root / 'base').glob('*.safetensors') for n, t in load_file(file).items()}
    torch.save({'state_dict': weights, 'meta': {'iter': 7}}, root / 'iter_7.pth')
    (root / 'config.py').write_text('x = 1\n')
    return of_single_file_command(root)


def of_single_file_command(root: Path) -> list[str]:
    return ['convert', f'{root}/iter_7.pth', f'{root}/out', '--config', f'{root}/config.py', '--base', f'{root}/base']


def of_verify(root: Path) -> list[str]:
    """A folder of ours with shards, an index and a manifest."""
    from tests.helpers.model_folder import write_manifest

    make_base(root / 'model')
    write_manifest(root / 'model')
    return ['verify', f'{root}/model']


def of_verify_plain(root: Path) -> list[str]:
    """A folder without a manifest."""
    make_base(root / 'model')
    return ['verify', f'{root}/model']


def of_compare(root: Path) -> list[str]:
    """A folder, and the checkpoint that it was made from."""
    of_single_file(root)
    return ['verify', f'{root}/base', f'{root}/iter_7.pth']


SCENARIOS = {
    make.__name__.removeprefix('of_'): make
    for make in (of_xtuner, of_lora, of_single_file, of_overwrite, of_verify, of_verify_plain, of_compare)
}


def cases_of(root: Path) -> Iterator[tuple[Path, str]]:
    """Paths relative to ``root``, and kinds: all kinds for each existing file, and for files sought by a config.json.

    Sockets are tried only for the latter: code that would open a socket would open a FIFO, too.
    """
    found = sorted(path.relative_to(root) for path in root.rglob('*') if path.is_file())
    yield from ((place, kind) for place in found for kind in KINDS if kind != 'socket')
    for folder in sorted({place.parent for place in found if place.name == 'config.json'}):
        for name in _LOOKED_FOR:
            if folder / name not in found:
                yield from ((folder / name, kind) for kind in KINDS[:2])


def main(folder: Path, limit_secs: float, scenarios: list[str]) -> None:
    """Run all cases; each prints scenario, path, kind, exit status, seconds, leftovers and output."""
    import transformers.models.auto.modeling_auto
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import xhf_hooks.convert  # noqa: F401
    from xhf_hooks.cli import convert, verify
    from xhf_hooks.verify import folder as _  # noqa: F401

    commands = {'convert': convert.main, 'verify': verify.main}
    root = folder / 'case'  # the same for all cases, since files contain paths
    for scenario in scenarios:
        for old in (root, folder / 'whole'):
            shutil.rmtree(old, ignore_errors=True)
        command, *argv = SCENARIOS[scenario](root)
        shutil.copytree(root, folder / 'whole', symlinks=True)
        cases = [(Path(), ''), *cases_of(root)]
        if scenario == 'overwrite':  # of the replaced folder, only the manifest is read
            cases = [(place, kind) for place, kind in cases if not kind or place.name == 'xhf_manifest.json']
        for place, kind in cases:
            shutil.rmtree(root)
            shutil.copytree(folder / 'whole', root, symlinks=True)
            if kind:
                put(root / place, kind)
            status, seconds = run_forked(commands[command], argv, folder / 'log', limit_secs)
            said = (folder / 'log').read_text(errors='replace').splitlines()
            staging = [path.name for path in root.glob('.*staging*')]
            print(json.dumps([scenario, str(place), kind, status, round(seconds, 1), staging, said]), flush=True)


if __name__ == '__main__':
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:] or list(SCENARIOS))
