"""``xhf add-hook`` on each config that comes with XTuner: two lines more, or one other import, and one hook of ours."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from mmengine.config import Config

from xhf_hooks import HFCheckpointHook
from xhf_hooks.cli.edit_config import read_config_text, with_hook
from xhf_hooks.errors import ConfigError

N_CONFIGS, N_OF_TRAINER = 587, 3
IMPORT = 'from xhf_hooks import HFCheckpointHook'
ITEM = 'dict(type=HFCheckpointHook)'
_LIST = 'custom_hooks = ['
#: Lines that go, lines that come, and in how many configs.
CHANGES = {
    ((), (IMPORT, f'    {ITEM},')): 556,
    (('    )',), (IMPORT, '    ),', f'    {ITEM},')): 5,
    ((f'{_LIST}dict(type=ThroughputHook)]',), (IMPORT, f'{_LIST}dict(type=ThroughputHook), {ITEM}]')): 13,
    ((f'{_LIST}]',), (IMPORT, f'{_LIST}{ITEM}]')): 7,
    (('    HFCheckpointHook,',), (IMPORT,)): 3,  # XTuner's own
}


@pytest.fixture(scope='module')
def configs() -> dict[str, Path]:
    (xtuner,) = find_spec('xtuner').submodule_search_locations
    root = Path(xtuner, 'configs')
    found = {str(file.relative_to(root)): file for file in sorted(root.rglob('*.py'))}
    return {name: file for name, file in found.items() if '\nmodel = dict(' in file.read_text()}


@pytest.fixture(scope='module')
def edited(configs) -> dict[str, tuple[str, str]]:
    """Each before and after; those of the Trainer are refused."""
    done, refused = {}, []
    for name, file in configs.items():
        text = read_config_text(file)
        try:
            done[name] = (text, with_hook(text, file))
        except ConfigError as error:
            assert 'HFCheckpointCallback' in str(error)
            refused.append(name)
    assert len(configs) == N_CONFIGS and len(refused) == N_OF_TRAINER
    assert all(name.endswith('_hf.py') for name in refused)
    return done


def test_copied_config_gets_the_hook(tmp_path):
    """The first two commands of docs/xtuner.md."""
    name = 'llama3_8b_instruct_full_alpaca_e3'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    for command in (['xtuner', 'copy-cfg', name, '.'], ['xhf', 'add-hook', f'{name}_copy.py']):
        subprocess.run(command, cwd=tmp_path, env=os.environ | {'PATH': path}, check=True)
    lines = (tmp_path / f'{name}_copy.py').read_text().splitlines()
    assert lines.count(IMPORT) == 1 and lines.count(f'    {ITEM},') == 1


def test_two_lines_change(edited):
    found: Counter[tuple[tuple[str, ...], ...]] = Counter()
    for before, after in edited.values():
        lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
        found[tuple(tuple(line[2:] for line in lines if line[0] == sign) for sign in '-+')] += 1
    assert found == CHANGES and found.total() == N_CONFIGS - N_OF_TRAINER


def test_mmengine_reads_each_with_one_hook_of_ours(edited, tmp_path):
    file, wrong = tmp_path / 'config.py', {}
    for name, (_, after) in edited.items():
        file.write_text(after)
        types = [hook['type'] for hook in Config.fromfile(file)._to_lazy_dict()['custom_hooks']]
        if [kind.build() for kind in types if 'HFCheckpointHook' in str(kind)] != [HFCheckpointHook]:
            wrong[name] = list(map(str, types))
    assert wrong == {}
