"""Checkpoints of real runs, converted, against what the hook wrote at that iteration and what their own tools give."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.checks.compare import (
    assert_loads_clean,
    assert_same_folder_tensors,
    assert_same_tensors,
    folder_tensors,
)
from tests.helpers.checks.converted import assert_same_files, config_of, convert
from tests.helpers.models.adapted import EXPERTS, adapt, is_known_to_peft
from tests.helpers.models.model_folder import resize_embeddings, save_tokenizer
from tests.helpers.models.zoo import available, build
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import save_folder, zero_engine
from tests.helpers.runs.frontends import fresh_accelerate, trainer_run
from tests.helpers.runs.toy_run import run_config, train
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks import save_hf
from xhf_hooks.offline.commands.convert import main
from xhf_hooks.offline.commands.verify import main as verify
from xhf_hooks.offline.convert import weights

#: Name to options of ``run_config``: MMEngine runs, each with the hook's export of its last iteration.
MMENGINE_RUNS: dict[str, dict[str, Any]] = {
    'zero0': dict(stage=0),
    'zero1_frozen': dict(stage=1, model=dict(freeze='embed_tokens')),
    'zero2_weights_only': dict(
        stage=2, checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2, save_optimizer=False)
    ),
    'zero2_epochs_tied': dict(
        stage=2, epochs=1, checkpoint=dict(type='CheckpointHook', by_epoch=True, interval=1), model=dict(tied=True)
    ),
    'zero3': dict(stage=3, max_iters=4),
    'zero3_frozen_tied': dict(stage=3, model=dict(freeze='mlp', tied=True)),
    'zero3_fp32_training': dict(stage=3, bf16=False),
    'runner': dict(stage=None, ddp=True, max_iters=4),
    'zero3_lora': dict(stage=3, model=dict(lora=True), hook=dict(lora='both')),
}
#: By stage, each with one more in the background.
WRITERS = {2: ('positional', 'parallel'), 3: ('gather', 'stream')}
#: Ways to save a model from a base of mixed dtypes.
MIXED_WAYS: dict[str, dict[str, Any]] = {
    'positional': dict(writer='positional'),
    'stream': dict(writer='stream', in_background=True),
    'gather': dict(writer='gather'),
}
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


# The runs, in the layouts that can be converted: each function runs on all ranks


def mmengine_run(name: str, work_dir: Path) -> str:
    """A run with the hook; returns its log_dir. Adapters are trained from ``work_dir/base``."""
    options = {'hook': {}, 'max_iters': 2, **MMENGINE_RUNS[name]}
    if 'lora' in options['hook']:
        save_base(odd_llama(), work_dir / 'base')
        options['model'] = {**options['model'], 'base': str(work_dir / 'base')}
    return train(run_config(work_dir, **options)).log_dir


def save_base(model: Any, folder: Path) -> None:
    """Save a base model with a generation config and a tokenizer."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
        save_tokenizer(folder, 131)
    dist.barrier()


def plain_deepspeed(
    folder: Path,
    *,
    family: str,
    stage: int,
    lora: dict[str, Any] | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Train an engine without MMEngine: ``folder/checkpoint``, and the hook's exports beside it.

    The base model is in ``folder/base``. LoRA runs are exported both as adapter and merged.
    """
    built = build(family).bfloat16()
    save_base(built, folder / 'base')
    model = type(built).from_pretrained(folder / 'base', torch_dtype=torch.bfloat16)
    trained = model if lora is None else adapt(model, torch.bfloat16, **lora)
    engine = _trained_engine(trained, stage, folder, exclude_frozen_parameters=exclude_frozen_parameters)
    for mode in [None] if lora is None else ['adapter', 'both']:
        save_hf(engine, folder / f'hook_{mode or "full"}', lora=mode)


def _trained_engine(model: Any, stage: int, folder: Path, **options: Any) -> Any:
    """With its checkpoint after two steps."""
    engine = zero_engine(model, stage)
    ids = torch.arange(24).reshape(2, 12) % 131
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder / 'checkpoint'), tag='global_step2', **options)
    return engine


def below_a_wrapper(stage: int, folder: Path) -> None:
    """A checkpoint as Lightning has it: a model and small modules, below a wrapper; and the hook's exports."""
    model = build('llama').bfloat16()
    model.generation_config.update(do_sample=True, temperature=0.6)
    save_base(model, folder / 'base')
    model.config._name_or_path = model.name_or_path = str(folder / 'base')
    wrapper, task = torch.nn.Module(), torch.nn.Module()
    task.model, task.encoder = model, torch.nn.Linear(5, 7).requires_grad_(False)
    task.encoder.decoder = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.BatchNorm1d(3))
    wrapper._forward_module = task.bfloat16()
    if dist.get_rank() == 0:
        model.save_pretrained(folder / 'model')
        kept = {name: tensor for name, tensor in wrapper.state_dict().items() if 'decoder' in name}
        save_file(kept, folder / 'decoder.safetensors', {'format': 'pt'})
    dist.barrier()
    engine = zero_engine(wrapper, stage)
    engine.save_checkpoint(str(folder / 'checkpoint'), tag='checkpoint')
    for writer in WRITERS[stage]:
        save_hf(engine, folder / writer, writer=writer)
    save_folder(engine.module, folder / 'background', writer='stream', in_background=True)


def mixed_base(family: str, stage: int, dtype: str, folder: Path) -> None:
    """As :func:`plain_deepspeed`, from a base in bf16 with norms in fp32; saved with ``dtype`` by every writer."""
    model, base = build(family).bfloat16(), folder / 'base'
    if dist.get_rank() == 0:
        model.save_pretrained(base)
        tensors = {n: t.float() if 'norm' in n else t for n, t in load_file(base / 'model.safetensors').items()}
        save_file(tensors, base / 'model.safetensors', metadata={'format': 'pt'})
    dist.barrier()
    model.config._name_or_path = model.name_or_path = str(base)
    engine = _trained_engine(model, stage, folder)
    for way, how in MIXED_WAYS.items():
        save_folder(engine.module, folder / way, dtype=dtype, **how)


def trainer_with_tokens(family: str, stage: int, lora: dict[str, Any] | None, folder: Path) -> None:
    """A Trainer run with tokens and a chat template of its own, and the callback: ``run``, from ``base``."""
    built, base = build(family), folder / 'base'
    built.generation_config.update(do_sample=True, temperature=0.6)
    save_base(built, base)
    model = type(built).from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(['<call>', '<reply>'])
    tokenizer.chat_template = "{% for m in messages %}<call>{{ m['content'] }}<reply>{% endfor %}"
    resize_embeddings(model, len(tokenizer))
    options = {} if lora is None else {'lora': 'both'}
    trained = model if lora is None else adapt(model, torch.bfloat16, **lora)
    arguments = dict(max_steps=2, save_strategy='steps', save_steps=2, model=trained, tokenizer=tokenizer)
    gather = {'stage3_gather_16bit_weights_on_model_save': True} if stage == 3 else {}
    trainer_run(options, arguments, zero_config(stage, **gather), folder / 'run')


def accelerate_run(folder: Path) -> None:
    """An Accelerate run from ``base``: its ``save_state`` in ``state``, its own save in ``own``, ours in ``hook``."""
    # Small parameters stay whole, the default: else Accelerate saves empty ones with DeepSpeed 0.16.2 on a CPU
    zero = dict(stage3_gather_16bit_weights_on_model_save=True, stage3_param_persistence_threshold=100_000)
    with fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config(3, **zero)))
        built = build('llama')
        save_base(built, folder / 'base')
        model = type(built).from_pretrained(folder / 'base')
        engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        ids = torch.arange(24).reshape(2, 12) % 131
        accelerator.backward(engine(input_ids=ids, labels=ids).loss)
        accelerator.save_state(str(folder / 'state'))
        weights = accelerator.get_state_dict(engine)
        if accelerator.is_main_process:
            accelerator.unwrap_model(engine).save_pretrained(folder / 'own', state_dict=weights)
        accelerator.wait_for_everyone()
        save_hf(engine, folder / 'hook')


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('old_runs')
    scenarios: dict[str, Any] = {name: partial(mmengine_run, name, root / name) for name in MMENGINE_RUNS}
    scenarios |= {name: partial(plain_deepspeed, root / name, **options) for name, options in PLAIN.items()}
    scenarios |= {name: partial(mixed_base, *mixed, root / name) for name, mixed in MIXED.items()}
    scenarios |= {f'below_{stage}': partial(below_a_wrapper, stage, root / f'below_{stage}') for stage in (2, 3)}
    scenarios |= {
        name: partial(trainer_with_tokens, *how, root / name) for name, how in (WITH_TOKENS | LOST_TOKENS).items()
    }
    scenarios['accelerate'] = partial(accelerate_run, root / 'accelerate')
    return run_scenarios(scenarios, 2, root=root)


def export_of(finished: Any, name: str) -> Path:
    return Path(check(finished, name)[0]) / 'hf_model'


@pytest.mark.parametrize('name', MMENGINE_RUNS)
def test_the_hooks_bytes(finished, name, tmp_path):
    """From the work_dir alone, whose last checkpoint is taken, and whose hook tells what was trained."""
    expected = export_of(finished, name)
    options = ('--lora', 'both') if 'lora' in name else ()
    folder = convert(finished.root / name, tmp_path / 'out', '--workers', '3', *options)
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
    checkpoint = finished.root / 'zero3' / 'iter_2.pth'
    folder = convert(checkpoint, tmp_path / 'out', '--base', base, '--max-shard-size', '20KB', '--verify', 'full')
    sharded, last = folder_tensors(folder), folder_tensors(base)
    assert len(list(folder.glob('*.safetensors'))) > 3 and sharded.keys() == last.keys()
    whole = folder_tensors(convert(checkpoint, tmp_path / 'whole', '--base', base, '--dtype', 'bfloat16'))
    assert all(torch.equal(whole[name], tensor) for name, tensor in sharded.items())
    assert not all(torch.equal(sharded[name], last[name]) for name in last)


def test_float16_is_rounded_once_from_the_master(finished, tmp_path):
    base = export_of(finished, 'zero3')
    exact = folder_tensors(convert(finished.root / 'zero3', tmp_path / 'a', '--base', base, '--dtype', 'float32'))
    rounded = folder_tensors(convert(finished.root / 'zero3', tmp_path / 'b', '--base', base, '--dtype', 'float16'))
    assert all(torch.equal(tensor, exact[name].half()) for name, tensor in rounded.items())
    assert not all(torch.equal(tensor, exact[name].bfloat16().half()) for name, tensor in rounded.items())


@pytest.mark.parametrize(
    ('name', 'mode'), [(name, mode) for name in PLAIN for mode in (['adapter', 'both'] if 'lora' in name else ['full'])]
)
def test_engines_without_a_trainer(finished, name, mode, tmp_path, monkeypatch):
    """Experts are unfused; what is frozen comes from the checkpoint, or from the base under the names that it has."""
    monkeypatch.setattr(weights, 'PART_NBYTES', 4096)  # so that what is merged lies across parts, and between
    folder = finished.folder(name)
    options = ['--lora', mode] if 'lora' in name else ['--base', folder / 'base']
    if mode == 'adapter':  # its adapter_config.json says what was trained, and names the base model
        options += ['--base', folder / 'hook_adapter']
    elif mode == 'both':
        shutil.copy(folder / 'hook_adapter' / 'adapter_config.json', folder / 'checkpoint')
    found = convert(folder / 'checkpoint', tmp_path / 'out', *options, '--verify', 'full')
    assert_same_files(found, folder / f'hook_{mode}')


@pytest.mark.parametrize('stage', [2, 3])
def test_what_is_trained_beside_the_model_below_a_wrapper(finished, stage, tmp_path):
    folder = finished.folder(f'below_{stage}')
    found = convert(folder / 'checkpoint', tmp_path / 'out', '--base', folder / 'base')
    assert json.loads((found / 'generation_config.json').read_text())['temperature'] == 0.6
    assert (found / 'tokenizer.json').read_bytes() == (folder / 'base' / 'tokenizer.json').read_bytes()
    expected = load_file(folder / 'decoder.safetensors')
    assert len(expected) == 7 and '_forward_module.encoder.decoder.1.running_var' in expected
    for saved in (found, *(folder / name for name in (*WRITERS[stage], 'background'))):
        assert_same_tensors(load_file(saved / 'other_modules' / 'model.safetensors'), expected)
        assert_same_folder_tensors(saved, folder / 'model')
        assert_loads_clean(saved, AutoModelForCausalLM)
    for writer in WRITERS[stage]:
        assert_same_files(found, folder / writer)
    assert verify(['--compare', str(folder / 'checkpoint'), str(found), '--base', str(folder / 'base')]) == 0


@pytest.mark.parametrize('name', MIXED)
def test_another_dtype_is_made_from_the_masters_whatever_writes_it(finished, name, tmp_path):
    """What keeps the dtype of training is read from the 16-bit weights. Hook and converter write the same."""
    folder, dtype = finished.folder(name), MIXED[name][2]
    exact = folder_tensors(
        convert(folder / 'checkpoint', tmp_path / 'wide', '--base', folder / 'base', '--dtype', 'float32')
    )
    found = folder_tensors(folder / 'positional')
    base = folder_tensors(folder / 'base')
    wide = {key for key, tensor in found.items() if tensor.dtype == torch.float32}
    if dtype == 'base':
        assert wide == {key for key, tensor in base.items() if tensor.dtype == torch.float32}
    assert wide and wide != set(found)
    for key in found if dtype == 'float16' else wide:
        assert torch.equal(found[key], exact[key].to(found[key].dtype)), key
    if 'deepseek' not in name:  # its bias is a buffer, which has no master
        assert any(not torch.equal(found[key], found[key].bfloat16().float()) for key in wide)
    for way in MIXED_WAYS:
        assert_same_folder_tensors(folder / way, folder / 'positional')
    for shard in ('5GB', '20KB'):
        options = ['--base', folder / 'base', '--dtype', dtype, '--max-shard-size', shard, '--verify', 'full']
        converted = convert(folder / 'checkpoint', tmp_path / shard, *options)
        assert_same_folder_tensors(converted, folder / 'positional')
        assert config_of(converted) == config_of(folder / 'positional')


@pytest.mark.modern_only  # the Trainer of XTuner's stack fails with adapters: its scheduler has other groups
@pytest.mark.parametrize('name', WITH_TOKENS)
def test_what_trainer_left_beside_its_checkpoint_comes_before_the_base(finished, name, tmp_path):
    folder, is_lora = finished.folder(name), WITH_TOKENS[name][2] is not None
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
    """With the number of rows in the config.json that the hook wrote, and without."""
    run = finished.folder('tokens_lora_zero3') / 'run'
    shutil.copytree(run / 'checkpoint-2', tmp_path / 'alone' / 'checkpoint-2')
    cases = {run: ('has (131, ', 'for (133, '), tmp_path / 'alone': ('has 133 tokens', 'for 131')}
    for folder, (found, expected) in cases.items():
        for mode in ('adapter', 'merge'):
            assert main([str(folder / 'checkpoint-2'), str(tmp_path / 'out'), '--lora', mode]) == 2
            said = capsys.readouterr().err
            assert found in said and expected in said and 'nobody saved' in said and '--base' in said
            assert not (tmp_path / 'out').exists()


@pytest.mark.modern_only
def test_resized_embeddings_that_are_trained_copies(finished, tmp_path):
    """What they replace is lost, and not needed."""
    run = finished.folder('tokens_trained_zero3') / 'run'
    found = convert(run / 'checkpoint-2', tmp_path / 'out', '--lora', 'merge')
    assert_same_folder_tensors(found, run / 'hf_model')
    assert config_of(found) == config_of(run / 'hf_model')


def test_accelerate(finished, tmp_path):
    folder = finished.folder('accelerate')
    found = convert(folder / 'state', tmp_path / 'out', '--base', folder / 'base')
    assert_same_folder_tensors(found, folder / 'own')
    assert_same_files(found, folder / 'hook')
