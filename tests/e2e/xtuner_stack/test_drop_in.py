"""A config of XTuner's with only the import changed; and a run without XTuner never imports it."""

import inspect
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import HOOKS

from tests.helpers.ranks.launch import run_program
from xhf_hooks import HFCheckpointHook

(XTUNER,) = find_spec('xtuner').submodule_search_locations
WITH_ITS_HOOK = [
    file for file in sorted(Path(XTUNER, 'configs').rglob('*.py')) if 'dict(type=HFCheckpointHook' in file.read_text()
]

if_xtuner_has_it = pytest.mark.skipif(
    find_spec('xtuner.engine.hooks.hf_checkpoint_hook') is None, reason='this XTuner has no HFCheckpointHook'
)


@if_xtuner_has_it
def test_xtuners_configs_with_its_hook(tmp_path):
    assert len(WITH_ITS_HOOK) == 3
    for file in WITH_ITS_HOOK:
        without, place = file.read_text().replace('    HFCheckpointHook,\n', ''), 'from xtuner.engine.runner'
        ours = without.replace(place, f'from xhf_hooks import HFCheckpointHook\n{place}')
        (tmp_path / file.name).write_text(ours)
        hooks = Config.fromfile(tmp_path / file.name).custom_hooks
        assert [type(HOOKS.build(h)) for h in hooks if 'CheckpointHook' in str(h['type'])] == [HFCheckpointHook]


@if_xtuner_has_it
@pytest.mark.parametrize('out_dir', [None, 'exports/mine'])
def test_its_arguments_mean_the_same(out_dir):
    from xtuner.engine.hooks import HFCheckpointHook as XTunersHook

    theirs, ours = XTunersHook(out_dir), HFCheckpointHook(out_dir)
    assert theirs.out_dir == out_dir and ours.options.out_dir == (out_dir and Path(out_dir))
    assert ours.priority == theirs.priority
    for name, parameter in list(inspect.signature(XTunersHook).parameters.items()):
        same = inspect.signature(HFCheckpointHook).parameters[name]
        assert (same.kind, same.default) == (parameter.kind, parameter.default)


def test_a_run_without_xtuner_does_not_import_it(tmp_path):
    """A plain MMEngine run that saves with the hook, chat template and all, where xtuner is installed."""
    code = f"""
import sys
from pathlib import Path
from tests.helpers.runs.toy_run import run_config, train
template = dict(INSTRUCTION='{{input}}')
train(run_config(Path({str(tmp_path)!r}), hook={{}}, stage=None, max_iters=2, prompt_template=template))
assert not [name for name in sys.modules if name.partition('.')[0] == 'xtuner']
"""
    (done,) = run_program(code)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob('*/hf_model/model.safetensors'))


def test_a_copied_config_with_two_more_lines(tmp_path, monkeypatch):
    """The first command of docs/xtuner.md (what `xtuner copy-cfg` runs), and the edit below it."""
    from xtuner.configs import cfgs_name_path

    names = ('llama3_8b_instruct_full_alpaca_e3', 'internlm2_7b_full_finetune_custom_dataset_e1')  # 0.1.15: no Llama 3
    name = next(name for name in names if name in cfgs_name_path)
    monkeypatch.setattr(sys, 'argv', ['copy_cfg', name, str(tmp_path)])
    runpy.run_module('xtuner.tools.copy_cfg', run_name='__main__')
    copied = tmp_path / f'{name}_copy.py'
    text = copied.read_text()
    assert text.count('\ncustom_hooks = [\n') == 1
    hook = 'from xhf_hooks import HFCheckpointHook\ncustom_hooks = [\n    dict(type=HFCheckpointHook),\n'
    copied.write_text(text.replace('custom_hooks = [\n', hook))
    assert type(HOOKS.build(Config.fromfile(copied).custom_hooks[0])) is HFCheckpointHook
