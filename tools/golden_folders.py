#!/usr/bin/env python
"""Make the folders in tests/golden/folders, each with the versions that it is named after.

Each was made once, and stays: tests/unit/offline/convert/test_golden_folders.py reads it with the installed versions.
Run this in an environment with those versions (requirements/matrix, or .venv with an overlay), from the root of the
repository:

    PYTHONPATH=$PWD:$PWD/tests/e2e/xtuner_stack PYTHON tools/golden_folders.py OUT CASE...
    .venv/bin/python tools/golden_folders.py OUT save_of_COMMIT...

The second form makes saves of this package as it was at a commit. A folder's ``golden.json`` has the versions, and by
the folder with the expected weights the arguments of xhf-convert.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('torch', 'deepspeed', 'transformers', 'peft', 'accelerate', 'mmengine', 'xtuner')
#: Small enough for the repository, in the sizes that old versions accept.
SIZES = dict(
    hidden_size=12,
    intermediate_size=17,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)


def small_llama(vocab_size: int = 19, **config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab_size, **config))


def gathered_state(engine: Any) -> dict[str, Any]:
    """The weights that training works with. Runs on: all ranks."""
    import deepspeed
    import torch.distributed as dist

    parameters = [p for p in engine.module.parameters() if hasattr(p, 'ds_id')]
    with deepspeed.zero.GatheredParameters(parameters):
        dist.barrier()  # DeepSpeed waits for its last gather alone, and gloo ends them in any order
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def train_engine(folder: Path, stage: int, frozen: str = '', lora: bool = False) -> None:
    """A checkpoint of a DeepSpeed engine, and what save_pretrained writes of its weights. Runs on: all ranks."""
    import torch
    import torch.distributed as dist

    from tests.helpers.models.model_folder import save_tokenizer
    from tests.helpers.runs.engines import train_one_step, zero_engine

    model = small_llama().bfloat16()
    if dist.get_rank() == 0:
        model.save_pretrained(folder / 'base')
        save_tokenizer(folder / 'base', 19)
        if not lora:
            (folder / 'base' / 'model.safetensors').unlink()
    dist.barrier()
    if lora:
        from peft import LoraConfig, get_peft_model

        model.config._name_or_path = model.name_or_path = 'base'
        options = LoraConfig(r=2, lora_alpha=6, target_modules=['q_proj', 'down_proj'], task_type='CAUSAL_LM')
        model = get_peft_model(model, options).bfloat16()
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    whole = copy.deepcopy(model)
    engine = zero_engine(model, stage)
    for _ in range(2):
        train_one_step(engine)
    engine.save_checkpoint(str(folder / 'checkpoint'), tag='global_step2')
    weights = gathered_state(engine)
    if dist.get_rank() == 0:
        whole.load_state_dict(weights)
        whole.save_pretrained(folder / 'expected')
        if lora:
            shutil.copy(folder / 'expected' / 'adapter_config.json', folder / 'checkpoint')
        keep_weights(folder / 'expected')
        if lora:
            merged = whole.float().merge_and_unload().to(torch.bfloat16)
            merged.save_pretrained(folder / 'merged')
            keep_weights(folder / 'merged')
    dist.barrier()


def train_with_trainer(folder: Path, stage: int) -> None:
    """A checkpoint of transformers' Trainer, which writes the gathered weights beside it. Runs on: all ranks."""
    import torch
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments

    from tests.helpers.runs.frontends import fresh_accelerate
    from tests.helpers.runs.zero_config import zero_config

    sections = dict(optimizer={'type': 'AdamW', 'params': {'lr': 'auto', 'torch_adam': True}})
    zero = zero_config(stage, sections=sections, stage3_gather_16bit_weights_on_model_save=True)
    tokens = torch.arange(8)
    with fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        steps = dict(max_steps=2, learning_rate=1e-2, save_strategy='steps', save_steps=2)
        steps['per_device_train_batch_size'] = 1
        machine = dict(use_cpu=True, ddp_backend='gloo', disable_tqdm=True, report_to=[])
        arguments = TrainingArguments(str(folder / 'run'), bf16=True, deepspeed=zero, **steps, **machine)
        data = [{'input_ids': tokens, 'labels': tokens}] * 4
        Trainer(model=small_llama(), args=arguments, train_dataset=data).train()
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoint = folder / 'run' / 'checkpoint-2'
        for path in (*checkpoint.glob('rng_state*'), checkpoint / 'training_args.bin'):
            path.unlink()
        (folder / 'expected').mkdir()
        (checkpoint / 'model.safetensors').rename(folder / 'expected' / 'model.safetensors')


def train_mixtral(folder: Path) -> None:
    """A plain state dict of a family whose experts were apart in memory before transformers 5."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, vocab_size=19, num_local_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).bfloat16()
    model.save_pretrained(folder / 'expected')
    (folder / 'base').mkdir()
    shutil.copy(folder / 'expected' / 'config.json', folder / 'base')
    torch.save({'state_dict': model.state_dict()}, folder / 'iter_2.pth')
    keep_weights(folder / 'expected')


def run_xtuner(name: str, folder: Path) -> None:
    """``xtuner train`` with this package's hook and XTuner's own: the last checkpoint, and both saves."""
    from tests.e2e.xtuner_stack import base_models, launches

    base_models._SIZES.clear()
    base_models._SIZES.update(SIZES, hidden_size=4, vocab_size=301, max_position_embeddings=128)
    config = launches.Runs.small_config
    launches.Runs.small_config = lambda self, name: config(self, name).replace('r=64,', 'r=2,')
    with tempfile.TemporaryDirectory() as root:
        runs = launches.Runs(Path(root))
        work_dir = runs.work_dir(name)
        for path in work_dir.rglob('*'):
            if path.suffix in ('.log', '.json') and path.parent.name in ('vis_data', path.stem):
                path.unlink()
        for path in (work_dir / f'iter_{launches.FIRST}.pth', *work_dir.glob('*/vis_data/eval_outputs*')):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if (work_dir / 'hf_model').is_dir():
            keep_weights(work_dir / 'hf_model')
        shutil.move(work_dir, folder / 'run')
        shutil.copytree(Path(root) / launches.RUNS[name].base, folder / launches.RUNS[name].base)
        if 'lora' not in name:
            (folder / launches.RUNS[name].base / 'model.safetensors').unlink()


def keep_weights(folder: Path) -> None:
    """Delete what depends on the version of transformers that writes."""
    for path in folder.iterdir():
        if path.suffix != '.safetensors':
            path.unlink()


def _on_ranks(function: Any, **options: Any) -> Any:
    from tests.helpers.ranks.launch import run_ranks

    return lambda folder: run_ranks(partial(function, folder, **options), 2)


FULL, LORA = 'llama3_8b_instruct_full_alpaca_zero3', 'llama3_8b_instruct_lora_alpaca_zero3'
_BASE, _LLAMA = ['--base', 'base'], ['--base', 'llama']
#: Name to what makes it, and the arguments of xhf-convert by what they make: a folder with the expected weights.
CASES: dict[str, tuple[Any, dict[str, list[str]]]] = {
    'deepspeed_0.13_zero2': (_on_ranks(train_engine, stage=2), {'expected': ['checkpoint', *_BASE]}),
    'deepspeed_0.13_zero3_frozen': (
        _on_ranks(train_engine, stage=3, frozen='embed'),
        {'expected': ['checkpoint', *_BASE]},
    ),
    'deepspeed_0.13_zero3_lora': (
        _on_ranks(train_engine, stage=3, lora=True),
        {
            'expected': ['checkpoint', *_BASE, '--lora', 'adapter'],
            'merged': ['checkpoint', *_BASE, '--lora', 'merge'],
        },
    ),
    # With DeepSpeed 0.16, as XTuner 0.2.0
    'trainer_4.48_zero3': (_on_ranks(train_with_trainer, stage=3), {'expected': ['run/checkpoint-2']}),
    'transformers_4.36_mixtral': (train_mixtral, {'expected': ['iter_2.pth', *_BASE]}),
    'transformers_4.57_mixtral': (train_mixtral, {'expected': ['iter_2.pth', *_BASE]}),
    # XTuner 0.1.15 has no hook of its own
    'xtuner_0.1.15_full': (partial(run_xtuner, FULL), {'run/*/hf_model': ['run', *_LLAMA]}),
    'xtuner_0.1.23_lora': (partial(run_xtuner, LORA), {'run/hf_model': ['run', *_LLAMA], 'run/*/hf_model': ['run']}),
    'xtuner_0.2.0_lora': (partial(run_xtuner, LORA), {'run/hf_model': ['run', *_LLAMA], 'run/*/hf_model': ['run']}),
}

#: A run with MMEngine's Runner in one process: the newest save and the one before it, which moved away.
OWN_RUN = """
import sys
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from transformers import LlamaConfig, LlamaForCausalLM
import xhf_hooks

folder, commit, sizes = sys.argv[1], sys.argv[2], eval(sys.argv[3])
assert commit in xhf_hooks.__file__, xhf_hooks.__file__

@MODELS.register_module()
class Toy(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.llm = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=19))

    def init_weights(self):
        pass

    def forward(self, input_ids, mode='loss'):
        return {'loss': self.llm(input_ids=input_ids, labels=input_ids).loss}

runner = Runner.from_cfg(Config(dict(
    model=dict(type='Toy'),
    work_dir=folder + '/run',
    experiment_name='run',
    train_dataloader=dict(
        batch_size=1, num_workers=0, dataset=[{'input_ids': torch.arange(8) % 19}] * 8,
        sampler=dict(type='DefaultSampler', shuffle=False), collate_fn=dict(type='default_collate'),
    ),
    train_cfg=dict(type='IterBasedTrainLoop', max_iters=4),
    optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-2)),
    custom_hooks=[
        dict(type='HFCheckpointHook', interval=2, by_epoch=False, max_keep_ckpts=2, out_dir=folder + '/hf_model')
    ],
    randomness=dict(seed=0),
)))
runner.train()
"""


def make_own(commit: str, folder: Path) -> None:
    """Saves of this package as it was at a commit."""
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent, commit)
        subprocess.run(['git', 'worktree', 'add', '--detach', str(tree), commit], cwd=ROOT, check=True)
        try:
            environment = {**os.environ, 'PYTHONPATH': str(tree), 'CUDA_VISIBLE_DEVICES': ''}
            command = [sys.executable, '-c', OWN_RUN, str(folder), commit, repr(SIZES)]
            subprocess.run(command, cwd=parent, env=environment, check=True)
        finally:
            subprocess.run(['git', 'worktree', 'remove', '--force', str(tree)], cwd=ROOT, check=True)
    shutil.rmtree(folder / 'run')


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:]:
        folder = out / name
        folder.mkdir(parents=True)
        _, _, commit = name.partition('save_of_')
        if commit:
            make_own(commit, folder)
            content: dict[str, Any] = {'commit': commit}
        else:
            make, conversions = CASES[name]
            make(folder)
            for program in folder.rglob('zero_to_fp32.py'):  # DeepSpeed's, beside each checkpoint
                program.unlink()
            content = {'versions': versions(), 'conversions': conversions}
        (folder / 'golden.json').write_text(json.dumps(content, indent=1) + '\n')
        nbytes = sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())
        print(f'{name}: {nbytes} bytes')


if __name__ == '__main__':
    main()
