"""Checkpoints of FSDP runs as trainers write them, each with the hook's export beside it. Runs on: all ranks."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.helpers.models.zoo.llamas import llama, odd_llama
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks import save_hf


def shard(model: Any, kind: str) -> Any:
    """Each decoder layer is a unit of its own, the rest belongs to the root; or all belongs to the root.

    Args:
        kind: ``fsdp1`` or ``fsdp2``, and what it does beside that. ``hsdp1``, ``hsdp2``, ``tp`` and ``fsdp1_tp`` need
            four ranks: two replicas of two shards, or two shards of two halves by tensor parallelism.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.tensor import Shard

    layers = [module for module in model.modules() if type(module).__name__.endswith('DecoderLayer')]
    mesh, world_size = None, dist.get_world_size()
    if 'hsdp' in kind or 'tp' in kind:
        mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('outer', 'inner'))
    if 'tp' in kind:
        split_layers(model, mesh['inner'])
        mesh = mesh['outer']
    if kind.startswith(('fsdp2', 'hsdp2', 'tp')):
        options: dict[str, Any] = dict(mesh=mesh or init_device_mesh('cpu', (world_size,)))
        if kind == 'fsdp2_columns':  # of what can be split evenly
            options['shard_placement_fn'] = lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % world_size == 0 else None
        for layer in [] if kind == 'fsdp2_root_only' else layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    strategies = {'hsdp1': ShardingStrategy.HYBRID_SHARD, 'fsdp1_grad_op': ShardingStrategy.SHARD_GRAD_OP}
    return FullyShardedDataParallel(
        model,
        device_id=torch.device('cpu'),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
        device_mesh=mesh,
        sharding_strategy=strategies.get(kind),
    )


def whole_state(model: Any) -> dict[str, Any]:
    """By torch itself, on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def save_whole(model: Any, whole: Any, folder: Path) -> None:
    """What save_pretrained writes of a whole model with the weights of a sharded one. Runs on: all ranks."""
    state = whole_state(model)
    if dist.get_rank() == 0:
        whole.load_state_dict(state)  # save_pretrained(state_dict=...) would not see what is tied
        whole.save_pretrained(folder, max_shard_size=20_000)


def split_layers(model: Any, mesh: Any) -> None:
    """Tensor parallelism by torch, as its tutorial has it for a Llama."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'mlp.gate_proj', 'mlp.up_proj')
    plan = {f'model.layers.*.{name}': ColwiseParallel() for name in columns}
    plan |= {f'model.layers.*.{name}': RowwiseParallel() for name in ('self_attn.o_proj', 'mlp.down_proj')}
    plan['model.embed_tokens'] = RowwiseParallel(input_layouts=Replicate())
    plan['lm_head'] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def build(kind: str) -> Any:
    """A model: ``'untied'``, ``'tied'``, ``'lora'``, ``'bf16'``, or ``'even'``, which tensor parallelism can split."""
    if kind == 'even':
        return llama(num_key_value_heads=2)
    return odd_llama(tied=kind == 'tied', lora=kind == 'lora', bf16=kind == 'bf16')


def trained(kind: str, way: str) -> Any:
    """A model, sharded in a way and trained; and its optimizer."""
    model = shard(build(kind), way)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    doors.train_steps(model, optimizer)
    return model, optimizer


def accelerates(kind: str, version: int, state_dict_type: str, folder: Path) -> None:
    """Write what ``accelerator.save_state(folder/state)`` writes for an FSDP model, by the functions that it calls.

    Accelerate itself wraps a model in FSDP only on a machine with a GPU.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    model, optimizer = trained(kind, f'fsdp{version}')
    save_hf(model, folder / 'hook')
    with doors.fresh_accelerate(ACCELERATE_USE_CPU='true'):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=state_dict_type)
        accelerator = Accelerator(cpu=True)
        save_fsdp_model(plugin, accelerator, model, str(folder / 'state'))
        if state_dict_type == 'SHARDED_STATE_DICT':
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder / 'state'))


def plain_dcp(kind: str, folder: Path) -> None:
    """``torch.distributed.checkpoint.save`` of FSDP2's state dict, with optimizer state, as torch's tutorial has it."""
    model, optimizer = trained(kind, 'fsdp2')
    save_hf(model, folder / 'hook')
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({'app': {'model': model_state, 'optimizer': optimizer_state}}, checkpoint_id=folder / 'state')


def strategy_run(kind: str, folder: Path) -> None:
    """A run with MMEngine's FSDPStrategy.

    Args:
        kind: ``'full'`` or ``'local'``.
    """
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

    # Like state_dict_cfg='full', but without rank0_only and offload_to_cpu, which make torch's FSDP1 crash on a CPU
    state: Any = dict(
        state_dict_type='FULL_STATE_DICT',
        state_dict_config=FullStateDictConfig(),
        optim_state_dict_config=FullOptimStateDictConfig(),
    )
    if kind == 'local':
        state = 'local'
    os.environ['LOCAL_RANK'] = str(dist.get_rank())
    wrapper = dict(type='MMFullyShardedDataParallel', device_id=torch.device('cpu'), use_orig_params=True)
    hook = dict(interval=4, by_epoch=False, out_dir=str(folder / 'hook'))
    checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=2)
    config = run_config(folder / 'run', hook=hook, stage=None, checkpoint=checkpoint)
    strategy = dict(type='FSDPStrategy', model_wrapper=wrapper, state_dict_cfg=state)
    train(config | dict(runner_type='FlexibleRunner', strategy=strategy))


def config_alone(export: Path, folder: Path) -> Path:
    """Make a base model without weights, so that none can be read from it."""
    folder.mkdir(parents=True)
    for name in ('config.json', 'adapter_config.json'):
        if (export / name).is_file():
            shutil.copy(export / name, folder)
    return folder
