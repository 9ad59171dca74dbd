"""Train an MMEngine config, on GPUs with nccl or on CPU with gloo.

    torchrun --nproc_per_node 2 tools/train.py CONFIG [--work-dir DIR] [--resume [CHECKPOINT]]
        [--cfg-options model.a=1 train_cfg.max_iters=10]

Both runners work (`runner_type = 'FlexibleRunner'` in the config, else Runner). The config's `custom_imports` may name
modules beside this file.
"""

import argparse
import os
import sys
import warnings

try:
    import torch
    from mmengine.config import Config, DictAction
except ModuleNotFoundError as error:
    sys.exit(
        f"tools/train.py: {error.name} is not installed: pip install '.[deepspeed]', or "
        'source tools/env.sh && use_env .venv'
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Train an MMEngine config.')
    parser.add_argument('config', help='path of the config file')
    parser.add_argument('--work-dir', help="work_dir of the run, instead of the config's")
    resume = 'resume from this checkpoint; without a value, from the newest one in the work_dir'
    parser.add_argument('--resume', nargs='?', const='auto', metavar='CHECKPOINT', help=resume)
    options = 'config fields to set, such as train_cfg.max_iters=10'
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE', help=options)
    args = parser.parse_args()
    if 'LOCAL_RANK' not in os.environ:
        parser.error('start this with torchrun: torchrun --nproc_per_node 2 tools/train.py CONFIG')
    return args


def init_process_group() -> None:
    """Join the process group, with the backend that this machine's devices need, before anything imports deepspeed.

    MMEngine would do this, too, but calls `torch.cuda.set_device` with any backend. It uses an existing process group
    unchanged.
    """
    backend = 'nccl' if torch.cuda.is_available() else 'gloo'
    if backend == 'nccl':
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    else:
        os.environ['DS_ACCELERATOR'] = 'cpu'  # read by deepspeed when it is imported
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend)


def load_config(args: argparse.Namespace) -> Config:
    """The config file with the command-line options."""
    cfg = Config.fromfile(args.config)
    cfg.merge_from_dict(args.cfg_options)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    cfg.launcher = 'pytorch'
    if 'runner_type' not in cfg and not torch.cuda.is_available():
        # By default, Runner gives DistributedDataParallel the id of a GPU
        cfg.setdefault('model_wrapper_cfg', dict(type='MMDistributedDataParallel'))
        cfg.model_wrapper_cfg.device_ids = None
    return cfg


def main() -> None:
    args = parse_args()
    # Several times per iteration, DeepSpeed calls functions that torch 2.13 renames
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch.distributed')
    init_process_group()
    cfg = load_config(args)

    from mmengine.registry import RUNNERS
    from mmengine.runner import Runner

    runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
    runner.train()
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
