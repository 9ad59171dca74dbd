"""What all configs here have in common: scheduler, optimizer, runtime. launches.py appends it to each of them."""

from mmengine.hooks import CheckpointHook, DistSamplerSeedHook, IterTimerHook, LoggerHook, ParamSchedulerHook
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper
from torch.optim import AdamW
from xtuner.engine.runner import TrainLoop

# Scheduler & Optimizer
accumulative_counts = 1
max_iters = 4
optim_type = AdamW
lr = 1e-2  # tiny models: the weights must move
betas = (0.9, 0.999)
weight_decay = 0
max_norm = 1  # grad clip
warmup_iters = 1

# Save
save_steps = 2
save_total_limit = -1  # Maximum checkpoints to keep (-1 means unlimited)

# optimizer
optim_wrapper = dict(
    type=OptimWrapper,  # XTuner's configs have AmpOptimWrapper, which refuses a CPU
    optimizer=dict(type=optim_type, lr=lr, betas=betas, weight_decay=weight_decay),
    clip_grad=dict(max_norm=max_norm, error_if_nonfinite=False),
    accumulative_counts=accumulative_counts,
)

# learning policy
param_scheduler = [
    dict(type=LinearLR, start_factor=0.1, by_epoch=False, begin=0, end=warmup_iters),
    dict(type=CosineAnnealingLR, eta_min=0.0, by_epoch=False, begin=warmup_iters, end=max_iters),
]

# train, val, test setting
train_cfg = dict(type=TrainLoop, max_iters=max_iters)

# configure default hooks
default_hooks = dict(
    # record the time of every iteration.
    timer=dict(type=IterTimerHook),
    # print log every iteration.
    logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=1),
    # enable the parameter scheduler.
    param_scheduler=dict(type=ParamSchedulerHook),
    # save checkpoint per `save_steps`.
    checkpoint=dict(
        type=CheckpointHook,
        by_epoch=False,
        interval=save_steps,
        max_keep_ckpts=save_total_limit,
    ),
    # set sampler seed in distributed evrionment.
    sampler_seed=dict(type=DistSamplerSeedHook),
)

# configure environment
env_cfg = dict(
    # whether to enable cudnn benchmark
    cudnn_benchmark=False,
    # set multi process parameters
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    # set distributed parameters
    dist_cfg=dict(backend='gloo'),
)

# set visualizer
visualizer = None

# set log level
log_level = 'INFO'

# load from which checkpoint
load_from = None

# whether to resume training from the loaded checkpoint
resume = False

# the same data order in every run
randomness = dict(seed=0, deterministic=False)

# set log processor
log_processor = dict(by_epoch=False)
