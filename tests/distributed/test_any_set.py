"""What every set of versions must do (tools/matrix.sh runs it in each): ZeRO-3 on two ranks, LoRA, convert, verify."""

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.converted import convert
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.launch import REPO_ROOT, run_program
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks import save_hf
from xhf_hooks.offline.commands import verify
from xhf_hooks.ranks.collective import Collective

HAS_FSDP2 = hasattr(fsdp, 'fully_shard') or find_spec('torch.distributed._composable.fsdp') is not None
LORA = dict(model=dict(lora=True))
#: Name to the options of `run_config`.
RUNS: dict[str, dict[str, Any]] = {
    'zero3': dict(hook={}, stage=3),
    'zero3_async': dict(hook=dict(async_save=True), stage=3),
    'zero3_lora': dict(hook=dict(lora='both'), stage=3, **LORA),
    'zero2': dict(hook={}, stage=2),
}


def trained(options: dict[str, Any], work_dir: Path) -> str:
    """Train with the hook; beside its folder, write what save_pretrained writes of the gathered model.

    Runs on: all ranks.
    """
    # With enough memory, DeepSpeed 0.18 flattens parameters with their autograd graph; gloo cannot gather into that.
    # With little memory it does as versions before and after.
    with mock.patch.object(type(get_accelerator()), 'available_memory', lambda *_: 0):
        runner = train(run_config(work_dir, **options))
    model = runner.model.module.llm
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters([p for p in parameters if hasattr(p, 'ds_id')]):
        dist.barrier()  # DeepSpeed waits for its last gather alone, and gloo ends them in any order
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        whole = _on_cpu(copy.deepcopy(model.config), model, weights)
        whole.save_pretrained(Path(runner.log_dir, 'expected'))
        if hasattr(whole, 'merge_and_unload'):
            whole.float().merge_and_unload().bfloat16().save_pretrained(Path(runner.log_dir, 'expected_merged'))
    dist.barrier()
    return str(runner.log_dir)


def _on_cpu(config: Any, model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A model of its own with these weights."""
    peft = getattr(model, 'peft_config', None)
    whole = AutoModelForCausalLM.from_config(config)
    if peft is not None:
        from peft import get_peft_model

        whole = get_peft_model(whole, peft['default'])
    whole.bfloat16().load_state_dict(weights)
    return whole


def opened_and_closed_often() -> bool:
    """Each save in the background and each run has a group of its own. Runs on: all ranks."""
    for _ in range(100):
        collective = Collective.connect()
        collective.from_all_ranks('exchange', dist.get_rank)
        collective.raise_if_any_failed('test')
        collective.close()
    return True


def sharded_by_torch(folder: Path) -> str:
    """FSDP2 is saved, or refused by name where torch is too old for it. Runs on: all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    model = odd_llama(tied=False)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / 'expected')
    fully_shard(model, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
    return error_of(save_hf, model, folder / 'hf_model')


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('any_set')
    scenarios = {name: partial(trained, options, root / name) for name, options in RUNS.items()}
    scenarios['groups'] = opened_and_closed_often
    if HAS_FSDP2:
        scenarios['fsdp2'] = partial(sharded_by_torch, root / 'fsdp2')
    return run_scenarios(scenarios, 2)


def saved_by(results: Any, name: str) -> Path:
    first, *others = check(results, name)
    assert others == [first]
    return Path(first)


@pytest.mark.parametrize('name', [name for name in RUNS if 'lora' not in name])
def test_the_bytes_are_those_of_save_pretrained(results, name):
    run = saved_by(results, name)
    assert_same_folder_tensors(run / 'hf_model', run / 'expected')
    assert_loads_clean(run / 'hf_model', LlamaForCausalLM)


def test_lora(results):
    """The adapter has the bytes of save_pretrained; the merged model is its sum, rounded once."""
    run = saved_by(results, 'zero3_lora')
    merged, adapter = run / 'hf_model', run / 'hf_model' / 'adapter'
    assert_same_folder_tensors(adapter, run / 'expected')
    ours, pefts = folder_tensors(merged), folder_tensors(run / 'expected_merged')
    assert ours.keys() == pefts.keys()
    assert all(torch.equal(ours[name], pefts[name]) for name in ours)


@pytest.mark.parametrize('name', ['zero3', 'zero2'])
def test_convert_and_verify(results, name, tmp_path):
    run = saved_by(results, name)
    out = convert(run.parent, tmp_path / 'out', '--base', run / 'expected', '--verify', 'full')
    assert_same_folder_tensors(out, run / 'hf_model')
    assert verify.main([str(out)]) == verify.main(['--compare', str(out), str(run / 'hf_model')]) == verify.SAME


def test_closing_a_group_does_not_hang(results):
    """torch 2.5 and 2.6 hung in one of 100: they join gloo's threads while these wait for the GIL."""
    assert check(results, 'groups') == [True, True]


@pytest.mark.skipif(not HAS_FSDP2, reason='this torch has no FSDP2')
def test_fsdp2_is_saved_or_refused_by_name(results):
    (said, _) = check(results, 'fsdp2')
    if not hasattr(fsdp, 'FSDPModule'):
        assert 'expected torch 2.6 or newer' in said and torch.__version__ in said
    else:
        assert said == ''


#: What tools/demo/task.py does.
MAKES_BASE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import task
task.make_base_folder(Path(sys.argv[2]))
"""


@pytest.mark.needs()
def test_the_demos_base_folder(tmp_path):
    """Its tokenizer is read by this version of transformers, and is what was trained."""
    (done,) = run_program(MAKES_BASE, REPO_ROOT / 'tools' / 'demo', tmp_path / 'base')
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'base')
    text = 'def __init__(self, naïve=None):\n    return  1'
    ids = tokenizer(text)['input_ids']
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
