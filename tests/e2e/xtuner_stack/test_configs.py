"""configs/xtuner: each builds its hook, and leaves what its header shows."""

import ast
import fnmatch
import re
import shlex

import pytest
from mmengine.config import Config
from mmengine.registry import HOOKS

from tests.e2e.xtuner_stack.launches import CONFIGS, RUNS, SHIPPED, export_of, missing_of
from xhf_hooks import HFCheckpointHook

#: XTuner 0.1.15 lacks, for example, xtuner.parallel.sequence and the template of Llama 3: docs/xtuner.md.
IMPORTED = [name for name in SHIPPED if not missing_of((CONFIGS / f'{name}.py').read_text())]


class Header:
    """What the docstring of a config says."""

    def __init__(self, name: str) -> None:
        self.text = ast.get_docstring(ast.parse((CONFIGS / f'{name}.py').read_text()))
        (command,) = re.findall(r'^    NPROC_PER_NODE=\d (xtuner train .+)$', self.text, flags=re.MULTILINE)
        self.command = shlex.split(command)
        tree = self.text.split('at the end:\n\n')[1]
        self.in_export = re.findall(r'\S+', ' '.join(re.findall(r'^ {16}(.+)$', tree, flags=re.MULTILINE)))
        self.work_dir = re.match(r' {4}(\S+)/\n {8}<timestamp>/\n {12}hf_model/\n', tree)[1]
        self.beside = re.findall(r'\S+', re.search(r'^ {8}(iter_.+)$', tree, flags=re.MULTILINE)[1])


@pytest.mark.parametrize('name', IMPORTED)
def test_builds_its_hook_and_its_header_names_it(name):
    config, header = Config.fromfile(CONFIGS / f'{name}.py'), Header(name)
    assert type(HOOKS.build(config.custom_hooks[-1])) is HFCheckpointHook
    stage = f'deepspeed_{name.rpartition("_")[2]}'
    assert header.command == ['xtuner', 'train', f'configs/xtuner/{name}.py', '--deepspeed', stage]
    assert header.work_dir == f'work_dirs/{name}'


@pytest.mark.parametrize('name', [name for name in SHIPPED if name in RUNS])
def test_leaves_the_tree_of_its_header(runs, name):
    work_dir, header = runs.work_dir(name), Header(name)
    found = sorted(path.name + '/' * path.is_dir() for path in export_of(work_dir).iterdir())
    if 'model.safetensors' in header.in_export:  # of a size that takes one file, while the test splits every model
        header.in_export += ['model-*.safetensors', 'model.safetensors.index.json']
        header.in_export.remove('model.safetensors')
    expected = [*header.in_export, 'chat_template.jinja']  # which transformers adds since 4.56
    unexpected = [name for name in found if not any(fnmatch.fnmatch(name, pattern) for pattern in expected)]
    missing = [pattern for pattern in header.in_export if not fnmatch.filter(found, pattern)]
    assert (unexpected, missing) == ([], [])
    for pattern in header.beside:
        assert list(work_dir.glob(pattern.replace('<N>', '*').rstrip('/'))), pattern
