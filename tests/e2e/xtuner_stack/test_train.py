"""The hook in real runs of `xtuner train`: one import of XTuner's own config style changed, nothing else.

Variable-length attention is not among the runs: XTuner asks for flash_attn before it reads the model, and
transformers finds flash_attn only where there is a GPU. `--deepspeed deepspeed_zero3` is in test_configs.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.e2e.xtuner_stack.base_models import FAMILIES, make_base_model, make_dataset
from tests.e2e.xtuner_stack.launches import PARTITIONED, Launch, Runs, export_of, log_of, partitioning_config, saves_in
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.converted import assert_same_files, convert

LAST = 4
RESUMED_FROM = 2

BESIDE_XTUNERS = {'with_xtuner_hook': True}
LAUNCHES = {
    'zero1': Launch('llama', 'deepspeed_zero1'),
    'zero2': Launch('llama', 'deepspeed_zero2', BESIDE_XTUNERS),
    'zero3_offload': Launch('llama', 'deepspeed_zero3_offload'),
    'qwen2_zero3': Launch('qwen2', PARTITIONED, BESIDE_XTUNERS),
    'no_deepspeed': Launch('llama', None),
    'averaging': Launch('llama', None, {'with_ema': True}),
}
WITHOUT_DEEPSPEED = ('no_deepspeed', 'averaging')
RESUMED = 'qwen2_zero3'
RESULTS = [*LAUNCHES, 'resumed']


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('xtuner')
    for family in FAMILIES:
        make_base_model(root / family, family)
    make_dataset(root / 'data.json')
    (root / PARTITIONED).write_text(json.dumps(partitioning_config()))
    return Runs(root, {**LAUNCHES, 'resumed': Launch('qwen2', None, resumes=(RESUMED, RESUMED_FROM))})


def trained_weights(work_dir: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint, read by DeepSpeed's own converter where DeepSpeed wrote it, under Hugging Face names."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    checkpoint = work_dir / f'iter_{LAST}.pth'
    if checkpoint.is_dir():
        weights = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=checkpoint.name)
    else:
        weights = torch.load(checkpoint, weights_only=False)['state_dict']
    assert all(name.startswith('llm.') for name in weights)
    return {name.removeprefix('llm.'): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize('name', RESULTS)
def test_saves_on_the_schedule_of_checkpoint_hook(runs, name):
    work_dir = runs.work_dir(name)
    expected = [f'iter_{LAST}'] if name == 'resumed' else ['iter_2', f'iter_{LAST}']
    assert saves_in(log_of(work_dir)) == expected
    assert sorted(path.stem for path in work_dir.glob('iter_*.pth')) == expected
    assert json.loads((export_of(work_dir) / 'xhf_manifest.json').read_text())['iteration'] == LAST


@pytest.mark.parametrize('name', RESULTS)
def test_weights_are_those_of_the_checkpoint(runs, name):
    work_dir = runs.work_dir(name)
    expected, saved = trained_weights(work_dir), folder_tensors(export_of(work_dir))
    if name in ('qwen2_zero3', 'resumed'):  # tied
        assert torch.equal(expected.pop('lm_head.weight'), expected['model.embed_tokens.weight'])
    assert saved.keys() == expected.keys()
    dtype = torch.float32 if name in WITHOUT_DEEPSPEED else torch.bfloat16
    for key, tensor in saved.items():
        assert tensor.dtype == dtype, key
        assert torch.equal(tensor, expected[key].to(dtype)), key


@pytest.mark.parametrize(('name', 'n_whole'), [('zero3_offload', 19), ('qwen2_zero3', 0), ('resumed', 0)])
def test_zero3_partitioned_what_was_saved(runs, name, n_whole):
    """DeepSpeed's log says how many parameters it did not partition: of Llama's 21 all but the embeddings."""
    output = runs.work_dir(name).with_suffix('.output').read_text()
    assert re.findall(r'Total persistent parameters: \d+ in (\d+) params', output) == [str(n_whole)]


@pytest.mark.parametrize('name', [name for name in LAUNCHES if name not in WITHOUT_DEEPSPEED])
def test_training_moved_every_weight(runs, name):
    """Else equal weights would prove little."""
    work_dir = runs.work_dir(name)
    trained, base = folder_tensors(export_of(work_dir)), folder_tensors(work_dir.parent / LAUNCHES[name].family)
    assert [key for key, tensor in base.items() if torch.equal(trained[key], tensor.to(torch.bfloat16))] == []


@pytest.mark.parametrize('name', [name for name, launch in LAUNCHES.items() if launch.settings == BESIDE_XTUNERS])
def test_same_bytes_as_xtuners_own_hook(runs, name):
    work_dir = runs.work_dir(name)
    assert_same_folder_tensors(export_of(work_dir), work_dir / 'hf_model')


@pytest.mark.parametrize('name', RESULTS)
def test_loads_and_generates(runs, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = export_of(runs.work_dir(name))
    model = assert_loads_clean(folder, AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    prompt = tokenizer('The sum of 3 and 4 is', return_tensors='pt')
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape[1] == prompt['input_ids'].shape[1] + 5


def test_averaged_weights_are_not_the_live_ones(runs):
    """Those of the checkpoint's ``state_dict``, with which the export is compared above."""
    live = torch.load(runs.work_dir('averaging') / f'iter_{LAST}.pth', weights_only=False)['ema_state_dict']
    saved = folder_tensors(export_of(runs.work_dir('averaging')))
    assert sum(not torch.equal(tensor, live[f'module.llm.{name}']) for name, tensor in saved.items()) > 5


@pytest.mark.parametrize('name', RESULTS)
def test_config_says_to_use_the_cache(runs, name):
    config = json.loads((export_of(runs.work_dir(name)) / 'config.json').read_text())
    assert config['use_cache'] is True, 'XTuner sets it to False on the live config'


def test_resumed_run_saves_what_the_whole_run_saved(runs):
    assert_same_folder_tensors(export_of(runs.work_dir('resumed')), export_of(runs.work_dir(RESUMED)))


def test_hook_survives_the_dump_of_the_config(runs):
    """MMEngine writes the config of a run to its work_dir, classes as dotted names, to be run again."""
    from mmengine.config import Config
    from mmengine.registry import HOOKS

    from xhf_hooks import HFCheckpointHook

    dumped = Config.fromfile(runs.work_dir('zero1') / 'zero1.py')
    assert [hook['type'] for hook in dumped.custom_hooks][-1] == 'xhf_hooks.HFCheckpointHook'
    assert type(HOOKS.build(dumped.custom_hooks[-1])) is HFCheckpointHook


@pytest.mark.parametrize('name', RESULTS)
def test_a_converted_checkpoint_is_the_hooks_export(runs, name, tmp_path):
    """The config is the checkpoint's own text; the checkpoint is found through `last_checkpoint`."""
    work_dir = runs.work_dir(name)
    assert_same_files(convert(work_dir, tmp_path / 'converted', '--verify'), export_of(work_dir))


def test_an_older_checkpoint_by_a_config_that_nobody_ran(runs, tmp_path):
    """The lazy config that the user wrote is read, and what it imports is not imported."""
    work_dir = runs.work_dir(RESUMED)
    found = convert(work_dir / 'iter_2.pth', tmp_path / 'out', '--config', work_dir.parent / f'{RESUMED}.py')
    assert json.loads((found / 'xhf_manifest.json').read_text())['iteration'] == 2
    for name in ('config.json', 'tokenizer_config.json', 'generation_config.json'):
        assert (found / name).read_bytes() == (export_of(work_dir) / name).read_bytes()
