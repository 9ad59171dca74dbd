"""The hook in real runs of `xtuner train` of what XTuner trains besides whole models by SFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.xtuner_stack.base_models import make_base_model, make_dataset, make_preferences
from tests.e2e.xtuner_stack.launches import PARTITIONED, Launch, Runs, export_of, log_of, partitioning_config, saves_in
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.converted import assert_same_files, convert

LAST = 4
PREFERENCE = dict(config='preference.py', data='preferences.json')
ORPO_LORA = {'kind': 'orpo', 'with_lora': True, 'export_options': {'lora': 'both'}}
LAUNCHES = {
    'lora': Launch('llama', PARTITIONED, {'with_lora': True, 'with_xtuner_hook': True}),
    'dpo': Launch('llama', PARTITIONED, {'kind': 'dpo'}, **PREFERENCE),
    'orpo_lora': Launch('llama', 'deepspeed_zero2', ORPO_LORA, **PREFERENCE),
    'reward': Launch('llama', PARTITIONED, {'kind': 'reward'}, **PREFERENCE),
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('xtuner')
    make_base_model(root / 'llama', 'llama')
    make_dataset(root / 'data.json')
    make_preferences(root / 'preferences.json')
    (root / PARTITIONED).write_text(json.dumps(partitioning_config()))
    return Runs(root, LAUNCHES)


def trained_weights(work_dir: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint in fp32, by DeepSpeed's own converter, under the names of the trained model."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=f'iter_{LAST}.pth')


def assert_rounded(saved: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> None:
    assert saved.keys() == trained.keys()
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, trained[name].bfloat16())] == []


@pytest.mark.parametrize('name', LAUNCHES)
def test_saves_on_the_schedule_of_checkpoint_hook(runs, name):
    assert saves_in(log_of(runs.work_dir(name))) == ['iter_2', f'iter_{LAST}']


def test_adapter_is_that_of_xtuners_own_hook(runs):
    work_dir = runs.work_dir('lora')
    folder = export_of(work_dir)
    assert_same_folder_tensors(folder, work_dir / 'hf_model')
    assert json.loads((folder / 'adapter_config.json').read_text()) == json.loads(
        (work_dir / 'hf_model' / 'adapter_config.json').read_text()
    )
    assert all('lora_' in name for name in folder_tensors(folder))
    of_base = len(folder_tensors(work_dir.parent / 'llama'))
    assert f'not exported: {of_base} tensors (llm.base_model.model.model.embed_tokens.weight' in log_of(work_dir)


def test_adapter_is_the_trained_one_and_generates(runs):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    work_dir = runs.work_dir('lora')
    folder = export_of(work_dir)
    trained = {n.replace('.default', '')[4:]: t for n, t in trained_weights(work_dir).items() if 'lora_' in n}
    assert_rounded(folder_tensors(folder), trained)
    assert all(tensor.any() for tensor in trained.values()), 'B begins as zero: it was trained'
    model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer('The sum of 3 and 4 is', return_tensors='pt')
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape[1] == prompt['input_ids'].shape[1] + 5


def test_dpo_saves_the_policy(runs):
    from transformers import AutoModelForCausalLM

    work_dir = runs.work_dir('dpo')
    folder = export_of(work_dir)
    model = assert_loads_clean(folder, AutoModelForCausalLM)
    saved, base = folder_tensors(folder), folder_tensors(work_dir.parent / 'llama')
    trained = {n.removeprefix('llm.'): t for n, t in trained_weights(work_dir).items() if n.startswith('llm.')}
    assert_rounded(saved, trained)
    assert [name for name, tensor in saved.items() if torch.equal(tensor, base[name].bfloat16())] == []
    assert f'not exported: {len(saved)} tensors (ref_llm.model.embed_tokens.weight' in log_of(work_dir)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape[1] > 2


def test_orpo_saves_the_policy_merged_and_its_adapter(runs):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    work_dir = runs.work_dir('orpo_lora')
    folder = export_of(work_dir)
    trained = {n.replace('.default', '')[4:]: t for n, t in trained_weights(work_dir).items() if 'lora_' in n}
    assert_rounded(folder_tensors(folder / 'adapter'), trained)
    base = AutoModelForCausalLM.from_pretrained(work_dir.parent / 'llama', torch_dtype=torch.bfloat16).double()
    expected = PeftModel.from_pretrained(base, folder / 'adapter').double().merge_and_unload().state_dict()
    merged = folder_tensors(folder)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        allowed = 2.0**-8 * expected[name].abs() + 2.0**-20 * expected[name].abs().max()
        assert ((tensor.double() - expected[name]).abs() <= allowed).all(), name
    assert_loads_clean(folder, AutoModelForCausalLM)
    assert 'not exported' not in log_of(work_dir)


def test_reward_model_scores_as_it_was_trained(runs):
    from transformers import AutoModelForSequenceClassification

    work_dir = runs.work_dir('reward')
    folder = export_of(work_dir)
    names = {'llm.': 'model.', 'v_head.': 'score.'}
    trained = {
        new + name.removeprefix(old): tensor
        for name, tensor in trained_weights(work_dir).items()
        for old, new in names.items()
        if name.startswith(old)
    }
    saved = folder_tensors(folder)
    assert_rounded(saved, trained)
    assert saved['score.weight'].any(), 'XTuner begins with zeros'
    model = assert_loads_clean(folder, AutoModelForSequenceClassification)
    assert model.num_labels == 1 and model.config.pad_token_id == 2
    padded = torch.tensor([[7, 8, 9, 2], [7, 8, 9, 10]])
    assert model(padded).logits.shape == (2, 1)
    assert 'not exported' not in log_of(work_dir)


@pytest.mark.parametrize('name', LAUNCHES)
def test_a_converted_checkpoint_is_the_hooks_export(runs, name, tmp_path):
    """What the checkpoint lacks, such as weights under an adapter, comes from the base that its config names."""
    work_dir = runs.work_dir(name)
    options = ['--lora', 'both'] if name == 'orpo_lora' else []
    assert_same_files(convert(work_dir, tmp_path / 'out', *options), export_of(work_dir))
