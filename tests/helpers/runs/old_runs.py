"""Small but real finished runs, in the layouts that can be converted. Everything runs on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.runs.zero_config import zero_config

#: Name to options of ``run_config``: MMEngine runs, each with the hook's export of its last iteration.
MMENGINE_RUNS: dict[str, dict[str, Any]] = {
    'zero0': dict(stage=0),
    'zero1_frozen': dict(stage=1, model=dict(freeze='embed_tokens')),
    'zero2_tied': dict(stage=2, model=dict(tied=True)),
    'zero2_weights_only': dict(
        stage=2, checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2, save_optimizer=False)
    ),
    'zero2_epochs': dict(stage=2, epochs=1, checkpoint=dict(type='CheckpointHook', by_epoch=True, interval=1)),
    'zero3': dict(stage=3),
    'zero3_frozen_tied': dict(stage=3, model=dict(freeze='mlp', tied=True)),
    'zero3_fp32_training': dict(stage=3, bf16=False),
    'runner': dict(stage=None, ddp=True),
    'zero2_lora': dict(stage=2, model=dict(lora=True), hook=dict(lora='both')),
    'zero3_lora': dict(stage=3, model=dict(lora=True), hook=dict(lora='both')),
}
#: Ways to save a model from a base of mixed dtypes.
MIXED_WAYS: dict[str, dict[str, Any]] = {
    'positional': dict(writer='positional'),
    'stream': dict(writer='stream', in_background=True),
    'gather': dict(writer='gather'),
}


def mmengine_run(name: str, work_dir: Path) -> str:
    """A run with the hook; returns its log_dir. Adapters are trained from ``work_dir/base``."""
    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs.toy_run import run_config, train

    options = {'hook': {}, **MMENGINE_RUNS[name]}
    if 'lora' in options['hook']:
        save_base(odd_llama(), work_dir / 'base')
        options['model'] = {**options['model'], 'base': str(work_dir / 'base')}
    return train(run_config(work_dir, **options)).log_dir


def save_base(model: Any, folder: Path) -> None:
    """Save a base model with a generation config and a tokenizer. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.models.model_folder import save_tokenizer

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
    import torch

    from tests.helpers.models.adapted import adapt
    from tests.helpers.models.zoo import build
    from xhf_hooks import save_hf

    built = build(family).bfloat16()
    save_base(built, folder / 'base')
    model = type(built).from_pretrained(folder / 'base', torch_dtype=torch.bfloat16)
    trained = model if lora is None else adapt(model, torch.bfloat16, **lora)
    engine = _trained_engine(trained, stage, folder, exclude_frozen_parameters=exclude_frozen_parameters)
    for mode in [None] if lora is None else ['adapter', 'both']:
        save_hf(engine, folder / f'hook_{mode or "full"}', lora=mode)


def _trained_engine(model: Any, stage: int, folder: Path, **options: Any) -> Any:
    """With its checkpoint after two steps."""
    import torch

    from tests.helpers.runs.engines import zero_engine

    engine = zero_engine(model, stage)
    ids = torch.arange(24).reshape(2, 12) % 131
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder / 'checkpoint'), tag='global_step2', **options)
    return engine


def below_a_wrapper(folder: Path) -> None:
    """A checkpoint as Lightning has it: a model and a small module, below a wrapper; and the hook's export."""
    import torch

    from tests.helpers.models.zoo import build
    from tests.helpers.runs.engines import zero_engine
    from xhf_hooks import save_hf

    model = build('llama').bfloat16()
    model.generation_config.update(do_sample=True, temperature=0.6)
    save_base(model, folder / 'base')
    model.config._name_or_path = model.name_or_path = str(folder / 'base')
    wrapper, task = torch.nn.Module(), torch.nn.Module()
    task.model, task.temperature = model, torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    wrapper._forward_module = task
    engine = zero_engine(wrapper, 2)
    engine.save_checkpoint(str(folder / 'checkpoint'), tag='checkpoint')
    save_hf(engine, folder / 'hook')


def mixed_base(family: str, stage: int, dtype: str, folder: Path) -> None:
    """As :func:`plain_deepspeed`, from a base in bf16 with norms in fp32; saved with ``dtype`` by every writer."""
    import torch.distributed as dist
    from safetensors.torch import load_file, save_file

    from tests.helpers.models.zoo import build
    from tests.helpers.runs.engines import save_folder

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
    """A Trainer run with tokens and a chat template of its own, and the callback: ``folder/run``, from ``folder/base``.

    Runs on: all ranks.
    """
    import torch
    from transformers import AutoTokenizer

    from tests.helpers.models.adapted import adapt
    from tests.helpers.models.families import MODELS
    from tests.helpers.models.zoo import build
    from tests.helpers.runs.frontends import trainer_run

    built, base = build(family, models=MODELS), folder / 'base'
    built.generation_config.update(do_sample=True, temperature=0.6)
    save_base(built, base)
    model = type(built).from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(['<call>', '<reply>'])
    tokenizer.chat_template = "{% for m in messages %}<call>{{ m['content'] }}<reply>{% endfor %}"
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    options = {} if lora is None else {'lora': 'both'}
    trained = model if lora is None else adapt(model, torch.bfloat16, **lora)
    arguments = dict(max_steps=2, save_strategy='steps', save_steps=2, model=trained, tokenizer=tokenizer)
    gather = {'stage3_gather_16bit_weights_on_model_save': True} if stage == 3 else {}
    trainer_run(options, arguments, zero_config(stage, **gather), folder / 'run')


def accelerate_run(folder: Path) -> None:
    """An Accelerate run from ``base``: its ``save_state`` in ``state``, its own save in ``own``, ours in ``hook``."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    from tests.helpers.models.zoo import build
    from tests.helpers.runs.frontends import fresh_accelerate
    from xhf_hooks import save_hf

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
