"""Checkpoints of real runs, converted, against what the hook wrote at that iteration and what their own tools give."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.config_fields import assert_same_config, config_fields
from tests.helpers.checks.converted import assert_same_files, config_of, convert
from tests.helpers.models.adapted import EXPERTS, is_known_to_peft
from tests.helpers.models.zoo import available
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.frontends import trainer_run
from tests.helpers.runs.old_runs import (
    MIXED_WAYS,
    MMENGINE_RUNS,
    accelerate_run,
    below_a_wrapper,
    mixed_base,
    mmengine_run,
    plain_deepspeed,
    trainer_with_tokens,
)
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks.cli.convert import main

#: Name to the arguments of ``plain_deepspeed``: engines without a trainer.
PLAIN: dict[str, dict[str, Any]] = {
    'mixtral_zero2': dict(family='mixtral', stage=2),
    'lora_tied_zero3': dict(family='qwen2', stage=3, lora={}),
    'lora_modules_to_save_zero2': dict(family='llama', stage=2, lora={'modules_to_save': ['lm_head']}),
    # Families with other names or forms in files than in memory
    'lora_alone_llava': dict(family='llava', stage=2, lora={}, exclude_frozen_parameters=True),
    'lora_alone_mixtral': dict(family='mixtral', stage=2, lora={}, exclude_frozen_parameters=True),
}
if is_known_to_peft('expert_parameters'):
    PLAIN['lora_experts_zero3'] = dict(family='mixtral', stage=3, lora={'target_parameters': EXPERTS})
#: Name to (family, stage, dtype); the base has its norms in fp32. At ZeRO-0 the hook finds no masters.
MIXED: dict[str, tuple[str, int, str]] = {
    'base_zero3': ('llama', 3, 'base'),
    't5_zero2': ('t5', 2, 'float16'),
    **({'deepseek_v3_zero3': ('deepseek_v3', 3, 'bfloat16')} if available('deepseek_v3') else {}),
}
TRAINER_STAGES = (2, 3)
#: Runs of Trainer with tokens and a chat template of their own; name to (family, stage, LoRA options).
WITH_TOKENS: dict[str, tuple[str, int, dict[str, Any] | None]] = {
    'tokens_full_zero3': ('llama', 3, None),
    'tokens_parts_zero2': ('llava', 2, None),
    'tokens_lora_zero2': ('llama', 2, {}),
    'tokens_modules_to_save_zero2': ('llama', 2, {'modules_to_save': ['embed_tokens', 'lm_head']}),
}
#: At ZeRO-3, Trainer saves resized embeddings that are frozen nowhere.
LOST_TOKENS: dict[str, tuple[str, int, dict[str, Any]]] = {
    'tokens_lora_zero3': ('qwen2', 3, {}),
    'tokens_trained_zero3': ('llama', 3, {'modules_to_save': ['embed_tokens', 'lm_head']}),
}


def trained_by_trainer(stage: int, folder: Path) -> None:
    """``folder/checkpoint-2``, which also holds the model that Trainer saved. Runs on: all ranks."""
    from tests.helpers.models.zoo import build

    gather = {'stage3_gather_16bit_weights_on_model_save': True} if stage == 3 else {}
    arguments = dict(max_steps=2, save_strategy='steps', save_steps=2, model=build('qwen2'))
    trainer_run(None, arguments, zero_config(stage, **gather), folder)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('old_runs')
    scenarios: dict[str, Any] = {name: partial(mmengine_run, name, root / name) for name in MMENGINE_RUNS}
    scenarios |= {name: partial(plain_deepspeed, root / name, **options) for name, options in PLAIN.items()}
    scenarios |= {name: partial(mixed_base, *mixed, root / name) for name, mixed in MIXED.items()}
    scenarios |= {f'trainer{n}': partial(trained_by_trainer, n, root / f'trainer{n}') for n in TRAINER_STAGES}
    scenarios['below_a_wrapper'] = partial(below_a_wrapper, root / 'below_a_wrapper')
    scenarios |= {
        name: partial(trainer_with_tokens, *how, root / name) for name, how in (WITH_TOKENS | LOST_TOKENS).items()
    }
    scenarios['accelerate'] = partial(accelerate_run, root / 'accelerate')
    return root, run_scenarios(scenarios, 2)


def export_of(finished: Any, name: str) -> Path:
    return Path(check(finished[1], name)[0]) / 'hf_model'


@pytest.mark.parametrize('name', MMENGINE_RUNS)
def test_the_hooks_bytes(finished, name, tmp_path):
    """From the work_dir alone, whose last checkpoint is taken, and whose hook tells what was trained."""
    expected = export_of(finished, name)
    options = ('--lora', 'both') if 'lora' in name else ()
    folder = convert(finished[0] / name, tmp_path / 'out', '--workers', '3', *options)
    assert_same_files(folder, expected)
    if 'lora' in name:
        assert {'adapter', 'generation_config.json', 'tokenizer.json'} <= {path.name for path in folder.iterdir()}
    manifests = [json.loads((each / 'xhf_manifest.json').read_text()) for each in (folder, expected)]
    for key in ('step', 'iteration'):
        assert manifests[0][key] == manifests[1][key]
    weights = [manifest['files']['model.safetensors'] for manifest in manifests]
    assert weights[0] == weights[1], 'with the checksum of every tensor'


def test_an_earlier_iteration_in_shards_is_another_model(finished, tmp_path):
    base = export_of(finished, 'zero3')
    checkpoint = finished[0] / 'zero3' / 'iter_2.pth'
    folder = convert(checkpoint, tmp_path / 'out', '--base', base, '--max-shard-size', '20KB', '--verify')
    sharded, last = folder_tensors(folder), folder_tensors(base)
    assert len(list(folder.glob('*.safetensors'))) > 3 and sharded.keys() == last.keys()
    whole = folder_tensors(convert(checkpoint, tmp_path / 'whole', '--base', base, '--dtype', 'bfloat16'))
    assert all(torch.equal(whole[name], tensor) for name, tensor in sharded.items())
    assert not all(torch.equal(sharded[name], last[name]) for name in last)


def test_float16_is_rounded_once_from_the_master(finished, tmp_path):
    base = export_of(finished, 'zero3')
    exact = folder_tensors(convert(finished[0] / 'zero3', tmp_path / 'a', '--base', base, '--dtype', 'float32'))
    rounded = folder_tensors(convert(finished[0] / 'zero3', tmp_path / 'b', '--base', base, '--dtype', 'float16'))
    assert all(torch.equal(tensor, exact[name].half()) for name, tensor in rounded.items())
    assert not all(torch.equal(tensor, exact[name].bfloat16().half()) for name, tensor in rounded.items())


@pytest.mark.parametrize(
    ('name', 'mode'), [(name, mode) for name in PLAIN for mode in (['adapter', 'both'] if 'lora' in name else ['full'])]
)
def test_engines_without_a_trainer(finished, name, mode, tmp_path, monkeypatch):
    """Experts are unfused; what is frozen comes from the checkpoint, or from the base under the names that it has."""
    from xhf_hooks.convert import weights

    monkeypatch.setattr(weights, 'PART_NBYTES', 4096)  # so that what is merged lies across parts, and between
    check(finished[1], name)
    folder = finished[0] / name
    options = ['--lora', mode] if 'lora' in name else ['--base', folder / 'base']
    if mode == 'adapter':  # its adapter_config.json says what was trained, and names the base model
        options += ['--base', folder / 'hook_adapter']
    elif mode == 'both':
        shutil.copy(folder / 'hook_adapter' / 'adapter_config.json', folder / 'checkpoint')
    found = convert(folder / 'checkpoint', tmp_path / 'out', *options, '--verify')
    assert_same_files(found, folder / f'hook_{mode}')


def test_a_small_module_beside_the_model_below_a_wrapper(finished, tmp_path, capsys):
    check(finished[1], 'below_a_wrapper')
    folder = finished[0] / 'below_a_wrapper'
    found = convert(folder / 'checkpoint', tmp_path / 'out', '--base', folder / 'base')
    assert_same_files(found, folder / 'hook')
    assert json.loads((found / 'generation_config.json').read_text())['temperature'] == 0.6
    assert (found / 'tokenizer.json').read_bytes() == (folder / 'base' / 'tokenizer.json').read_bytes()
    assert 'not in the model: _forward_module.temperature.weight' in capsys.readouterr().err


@pytest.mark.parametrize('name', MIXED)
def test_fp32_tensors_are_the_masters_whatever_writes_them(finished, name, tmp_path):
    """What dtype makes fp32 is read from the master weights, and all else from the 16-bit weights."""
    check(finished[1], name)
    folder, dtype = finished[0] / name, MIXED[name][2]
    exact = folder_tensors(
        convert(folder / 'checkpoint', tmp_path / 'wide', '--base', folder / 'base', '--dtype', 'float32')
    )
    found = folder_tensors(folder / 'positional')
    base = folder_tensors(folder / 'base')
    wide = {key for key, tensor in found.items() if tensor.dtype == torch.float32}
    if dtype == 'base':
        assert wide == {key for key, tensor in base.items() if tensor.dtype == torch.float32}
    assert wide and wide != set(found)
    for key in wide:
        assert torch.equal(found[key], exact[key]), key
    if 'deepseek' not in name:  # its bias is a buffer, which has no master
        assert any(not torch.equal(found[key], found[key].bfloat16().float()) for key in wide)
    for way in MIXED_WAYS:
        assert_same_folder_tensors(folder / way, folder / 'positional')
    for shard in ('5GB', '20KB') if dtype != 'float16' else ():
        options = ['--base', folder / 'base', '--dtype', dtype, '--max-shard-size', shard, '--verify']
        converted = convert(folder / 'checkpoint', tmp_path / shard, *options)
        assert_same_folder_tensors(converted, folder / 'positional')
        assert config_of(converted) == config_of(folder / 'positional')


@pytest.mark.parametrize('stage', TRAINER_STAGES)
def test_trainer(finished, stage, tmp_path):
    """Nothing but the checkpoint folder is named."""
    check(finished[1], f'trainer{stage}')
    checkpoint = finished[0] / f'trainer{stage}' / 'checkpoint-2'
    folder = convert(checkpoint, tmp_path / 'out')
    found, expected = folder_tensors(folder), folder_tensors(checkpoint)
    if stage == 2:  # Trainer saves copies there, and so the tied weight twice
        assert torch.equal(expected.pop('lm_head.weight'), expected['model.embed_tokens.weight'])
    assert found.keys() == expected.keys()
    assert all(t.dtype == torch.bfloat16 and torch.equal(t, expected[name]) for name, t in found.items())
    own_path = {k: v for k, v in config_fields(folder).items() if k == '_name_or_path'}  # transformers 4 writes it
    assert_same_config(folder, checkpoint, **own_path, use_cache=True)  # Trainer may have set it to false


@pytest.mark.modern_only  # the Trainer of XTuner's stack fails with adapters: its scheduler has other groups
@pytest.mark.parametrize('name', WITH_TOKENS)
def test_what_trainer_left_beside_its_checkpoint_comes_before_the_base(finished, name, tmp_path):
    check(finished[1], name)
    folder, is_lora = finished[0] / name, WITH_TOKENS[name][2] is not None
    checkpoint = folder / 'run' / 'checkpoint-2'
    options = ('--lora', 'both') if is_lora else ('--base', folder / 'base')
    assert_same_files(convert(checkpoint, tmp_path / 'out', *options), folder / 'run' / 'hf_model')
    if is_lora:
        found = convert(checkpoint, tmp_path / 'adapter', '--lora', 'adapter')
        assert_same_folder_tensors(found, folder / 'run' / 'hf_model' / 'adapter')
        for file in folder.glob('run/hf_model/*token*'):
            assert (found / file.name).read_bytes() == file.read_bytes()
    else:  # the base is not named
        without = convert(checkpoint, tmp_path / 'without')
        assert_same_folder_tensors(without, folder / 'run' / 'hf_model')
        assert config_of(without) == config_of(folder / 'run' / 'hf_model')


@pytest.mark.modern_only
def test_resized_embeddings_that_no_file_has_are_not_taken_from_the_base(finished, tmp_path, capsys):
    check(finished[1], 'tokens_lora_zero3')
    checkpoint = finished[0] / 'tokens_lora_zero3' / 'run' / 'checkpoint-2'
    for mode in ('adapter', 'merge'):
        assert main([str(checkpoint), str(tmp_path / 'out'), '--lora', mode]) == 2
        said = capsys.readouterr().err
        assert 'has 133 tokens' in said and '131 rows' in said and 'nobody saved' in said and '--base' in said
        assert not (tmp_path / 'out').exists()


@pytest.mark.modern_only
def test_resized_embeddings_that_are_trained_copies(finished, tmp_path):
    """What they replace is lost, and not needed."""
    check(finished[1], 'tokens_trained_zero3')
    run = finished[0] / 'tokens_trained_zero3' / 'run'
    found = convert(run / 'checkpoint-2', tmp_path / 'out', '--lora', 'merge')
    assert_same_folder_tensors(found, run / 'hf_model')
    assert config_of(found) == config_of(run / 'hf_model')


def test_accelerate(finished, tmp_path):
    check(finished[1], 'accelerate')
    folder = finished[0] / 'accelerate'
    found = convert(folder / 'state', tmp_path / 'out', '--base', folder / 'base')
    assert_same_folder_tensors(found, folder / 'own')
    assert_same_files(found, folder / 'hook')
