"""configs/xtuner: each builds its hook, differs from XTuner's own as it says, and leaves what its header shows.

Each is run: the header's command, with two processes, and `--cfg-options` for what a CPU and a tiny local model need.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import HOOKS

from tests.e2e.xtuner_stack.base_models import (
    FAMILIES,
    make_base_model,
    make_chats,
    make_clip,
    make_dataset,
    make_preferences,
)
from tests.e2e.xtuner_stack.launches import TORCHRUN, assert_ran, export_of, log_of, run, saves_in
from tests.helpers.compare import folder_tensors
from tests.helpers.ranks import REPO_ROOT
from xhf_hooks import HFCheckpointHook

FOLDER = REPO_ROOT / 'configs' / 'xtuner'
CONFIGS = sorted(FOLDER.glob('*.py'))
NAMES = [file.stem for file in CONFIGS]
TRUE_OF_ALL = {
    'env_cfg.dist_cfg.backend': 'gloo',
    'train_cfg.max_epochs': 1,
    'default_hooks.checkpoint.interval': 1,
    'optim_wrapper.accumulative_counts': 1,
    'optim_wrapper.optimizer.lr': 0.01,  # in bf16 the weights must move
    'param_scheduler.0.end': 0.5,  # of the one epoch
    'param_scheduler.1.begin': 0.5,
    'param_scheduler.1.end': 1,
    'train_dataloader.batch_size': 1,
    'train_dataloader.num_workers': 0,
    'custom_hooks.2.max_shard_size': '100KB',
}


class Header:
    """What the docstring of a config says."""

    def __init__(self, file: Path) -> None:
        text = ast.get_docstring(ast.parse(file.read_text()))
        (self.command,) = re.findall(r'^    (NPROC_PER_NODE=\d xtuner train .+)$', text, flags=re.MULTILINE)
        self.base = re.search(r"XTuner's own\n(\S+\.py):\n", text)[1]
        tree = text.split('at the end:\n\n')[1]
        self.in_export = re.findall(r'\S+', ' '.join(re.findall(r'^ {16}(.+)$', tree, flags=re.MULTILINE)))
        self.work_dir, self.export = re.match(r' {4}(\S+)/\n {8}<timestamp>/\n {12}(\S+)/\n', tree).groups()
        self.beside = re.findall(r'\S+', re.search(r'^ {8}(iter_.+)$', tree, flags=re.MULTILINE)[1])


def leaves(node: Any, path: str = '') -> Iterator[tuple[str, Any]]:
    """Dotted path and value of each leaf of a config."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        below = f'{path}.{key}' if path else str(key)
        yield from leaves(value, below) if isinstance(value, (dict, list)) else ((below, value),)


def cfg_options(file: Path, root: Path) -> dict[str, Any]:
    """What has to differ for tiny local models, a local dataset and a CPU.

    A variable of PART 1 cannot be set like this: it is parsed already where the config uses it.
    """
    families = {'qwen': 'qwen2', 'mistral': 'mistral', 'qlora': 'llama_by_64'}
    family = next((family for word, family in families.items() if word in file.stem), 'llama')
    data = 'pairs.json' if 'dpo' in file.stem else 'data.json'
    new = {
        'pretrained_pth': None,
        'max_length': 128 if family in ('qwen2', 'mistral') else 256,  # what does not fit has no labels, and is dropped
        'evaluation_images': str(root / 'dot.png'),
        'data_path': str(root / 'chats.json'),
        'image_folder': str(root),
        'per_device_batch_size': 1,
        'num_proc': 1,
    }
    options = dict(TRUE_OF_ALL)
    for path, value in leaves(Config.fromfile(file)._to_lazy_dict()):
        owner, _, key = path.rpartition('.')
        if not owner.startswith(('model', 'tokenizer', 'image_processor', 'train_dataloader', 'custom_hooks')):
            continue
        if key == 'pretrained_model_name_or_path':
            options[path] = str(root / ('clip' if 'clip' in value else family))
        elif path == 'train_dataloader.dataset.dataset.path':
            options |= {path: 'json', f'{owner}.data_files': str(root / data)}
        elif key in new:
            options[path] = new[key]
        elif key in ('torch_dtype', 'bnb_4bit_compute_dtype') and value is torch.float16:
            options[path] = options['optim_wrapper.dtype'] = 'bfloat16'  # DeepSpeed has no float16 on a CPU
    options |= {'custom_hooks.1.evaluation_inputs': 'Hi', 'custom_hooks.1.max_new_tokens': 1}
    if 'train_dataloader.dataset.dataset.path' in options and 'dpo' not in file.stem:
        options['train_dataloader.dataset.max_dataset_length'] = 16
        options['train_dataloader.dataset.map_num_proc'] = 1  # XTuner's default is 32 processes
    return options


@pytest.mark.parametrize('file', CONFIGS, ids=lambda file: file.stem)
def test_builds_its_hook(file):
    config = Config.fromfile(file)
    assert type(HOOKS.build(config.custom_hooks[-1])) is HFCheckpointHook


@pytest.mark.parametrize('file', CONFIGS, ids=lambda file: file.stem)
def test_the_header_names_the_file(file):
    header = Header(file)
    words = shlex.split(header.command)
    assert words[1:4] == ['xtuner', 'train', str(file.relative_to(REPO_ROOT))]
    assert words[4] == '--deepspeed' and words[5].removeprefix('deepspeed_') == file.stem.rpartition('_')[2]
    assert header.work_dir == f'work_dirs/{file.stem}'


@pytest.mark.parametrize('file', CONFIGS, ids=lambda file: file.stem)
def test_differs_from_xtuners_own_as_it_says(file):
    (xtuner,) = find_spec('xtuner').submodule_search_locations
    base = (Path(xtuner) / 'configs' / Header(file).base).read_text()
    text = file.read_text()
    text = text.replace(re.search(r'""".+?"""\n\n', text, flags=re.DOTALL)[0], '', 1)
    lines = difflib.ndiff(base.splitlines(), text.splitlines())
    changed = [line for line in lines if line[0] in '+-' and line[2:].strip()]
    assert '+ from xhf_hooks import HFCheckpointHook' in changed
    assert '+     dict(type=HFCheckpointHook),' in changed
    n_more = {'model and its prompt template': 4, 'the reference model': 10, 'the base in bfloat16': 14}
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert len(changed) == 2 + sum(count for words, count in n_more.items() if words in text), '\n'.join(changed)


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp('configs')
    for family in FAMILIES:
        make_base_model(root / family, family)
    make_clip(root / 'clip')
    make_dataset(root / 'data.json')
    make_chats(root)
    make_preferences(root / 'pairs.json', n_pairs=4)
    (root / 'configs').symlink_to(REPO_ROOT / 'configs')
    return root


class ConfigRuns:
    """Runs the command of each header once, in a folder with its inputs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._outcomes: dict[str, tuple[int | None, str]] = {}

    def work_dir(self, name: str) -> Path:
        """Where the header says."""
        file = FOLDER / f'{name}.py'
        header = Header(file)
        if name not in self._outcomes:
            arguments = shlex.split(header.command)[3:]
            options = [f'{path}={value}' for path, value in cfg_options(file, self._root).items()]
            command = [*TORCHRUN, *arguments, '--launcher', 'pytorch', '--cfg-options', *options]
            self._outcomes[name] = run(command, self._root, name)
        assert_ran(self._outcomes[name], name)
        return self._root / header.work_dir


@pytest.fixture(scope='module')
def runs(inputs) -> ConfigRuns:
    return ConfigRuns(inputs)


@pytest.mark.parametrize('name', NAMES)
def test_leaves_the_tree_of_its_header(runs, name):
    file = FOLDER / f'{name}.py'
    work_dir, header = runs.work_dir(name), Header(file)
    found = sorted(path.name + '/' * path.is_dir() for path in export_of(work_dir).iterdir())
    if 'model.safetensors' in header.in_export:  # of a size that takes one file, while the test splits every model
        header.in_export += ['model-*.safetensors', 'model.safetensors.index.json']
        header.in_export.remove('model.safetensors')
    unexpected = [name for name in found if not any(fnmatch.fnmatch(name, pattern) for pattern in header.in_export)]
    missing = [pattern for pattern in header.in_export if not fnmatch.filter(found, pattern)]
    assert (unexpected, missing) == ([], [])
    for pattern in header.beside:
        assert list(work_dir.glob(pattern.replace('<N>', '*').rstrip('/'))), pattern


@pytest.mark.parametrize('name', NAMES)
def test_saves_what_was_trained(runs, name):
    """By what the last DeepSpeed checkpoint holds; the header's hook saved at each of XTuner's own checkpoints."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    work_dir = runs.work_dir(name)
    checkpoints = sorted(work_dir.glob('iter_*.pth'), key=lambda path: path.stat().st_mtime)
    assert saves_in(log_of(work_dir))[-1] == checkpoints[-1].stem
    trained = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=checkpoints[-1].name)
    saved = [tensors.values() for tensors in map(folder_tensors, weight_folders(export_of(work_dir)))]
    fingerprints = {fingerprint(tensor) for tensors in saved for tensor in tensors}
    names = [key for key in trained if not key.startswith(('ref_llm.', 'visual_encoder.'))]
    assert names
    lost = [key for key in names if fingerprint(trained[key].to(torch.bfloat16)) not in fingerprints]
    assert lost == []


def weight_folders(folder: Path) -> list[Path]:
    return sorted({path.parent for path in folder.rglob('*.safetensors')})


def fingerprint(tensor: torch.Tensor) -> bytes:
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
