"""Small, complete checkpoints and model folders in real formats, which a fuzzer copies and spoils."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.model_folder import save_tokenizer, write_manifest
from tests.helpers.zoo.llamas import llama

if TYPE_CHECKING:
    import torch

#: The checkpoint argument of xhf-convert in each folder, and the other arguments.
CHECKPOINTS = {
    'stage1': 'checkpoint-5',
    'stage2_lora': 'checkpoint-5',
    'stage3': 'checkpoint-5',
    'file': 'work_dir/iter_5.pth',
}
MODELS = ('whole', 'sharded', 'no_manifest', 'sharded_no_manifest', 'adapter')


def make_checkpoint(kind: str, folder: Path) -> None:
    """Make one of :data:`CHECKPOINTS`; paths in it are relative to ``folder``."""
    model = llama()
    tokens = model.config.vocab_size
    model.config.architectures = ['LlamaForCausalLM']
    model.generation_config.max_new_tokens = 20
    if kind == 'file':
        _save_base(folder / 'base')
        (folder / 'work_dir').mkdir()
        _save_file(folder, {name: tensor.detach() for name, tensor in model.state_dict().items()})
        return
    trainer = folder / 'checkpoint-5'
    made = MadeCheckpoint(masters=_trained(model), stage=int(kind[5]), dtype=_bf16())
    if kind == 'stage2_lora':
        adapted = _adapted(folder)
        trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        masters = {name: parameter.detach().float() + 0.01 for name, parameter in trained.items()}
        frozen = {name: p.detach() for name, p in adapted.named_parameters() if name not in trained}
        made = MadeCheckpoint(masters=masters, frozen=frozen, stage=2, dtype=_bf16())
    made.write(trainer / 'global_step5')
    (trainer / 'latest').write_text('global_step5')
    if kind == 'stage2_lora':
        adapted.peft_config['default'].save_pretrained(str(trainer))
    else:
        model.config.save_pretrained(trainer)
        model.generation_config.save_pretrained(trainer)
    save_tokenizer(trainer, tokens)


def make_model(kind: str, folder: Path) -> None:
    """Make one of :data:`MODELS`, as the folder ``model``."""
    target = folder / 'model'
    if kind == 'adapter':
        _adapted(folder).save_pretrained(target)
        return
    model = llama().bfloat16()
    model.save_pretrained(target, max_shard_size='20KB' if kind.startswith('sharded') else '1GB')
    save_tokenizer(target, model.config.vocab_size)
    if not kind.endswith('no_manifest'):
        write_manifest(target)


def _bf16() -> torch.dtype:
    import torch

    return torch.bfloat16


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _save_base(folder: Path) -> None:
    base = llama().bfloat16()
    base.save_pretrained(folder)
    save_tokenizer(folder, base.config.vocab_size)


def _adapted(folder: Path) -> torch.nn.Module:
    """A model with an adapter; its base model is saved as ``base``."""
    from peft import LoraConfig, get_peft_model

    _save_base(folder / 'base')
    lora = LoraConfig(r=2, target_modules=['q_proj', 'down_proj'], task_type='CAUSAL_LM')
    adapted = get_peft_model(llama().bfloat16(), lora)
    adapted.peft_config['default'].base_model_name_or_path = 'base'
    return adapted


def _save_file(folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
    """Save a checkpoint like a plain MMEngine run."""
    import torch

    llm = dict(type='transformers.AutoModelForCausalLM.from_pretrained', pretrained_model_name_or_path='base')
    tokenizer = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path='base')
    fields = dict(
        model=dict(type='xtuner.model.SupervisedFinetune', llm=llm),
        tokenizer=tokenizer,
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999))),
        custom_hooks=[dict(type='mmengine.hooks.LoggerHook', interval=10)],
    )
    text = ''.join(f'{name} = {value!r}\n' for name, value in fields.items())
    meta = {'iter': 5, 'epoch': 0, 'cfg': text, 'seed': 7, 'hook_msgs': json.loads('{"last_ckpt": "iter_5.pth"}')}
    named = {f'llm.{name}': tensor for name, tensor in state_dict.items()}
    content = {'state_dict': named, 'meta': meta, 'message_hub': {'lr': [1e-4] * 5, 'loss': [2.5, 2.25]}}
    torch.save(content, folder / 'work_dir' / 'iter_5.pth')
    (folder / 'work_dir' / 'run.py').write_text(text)
