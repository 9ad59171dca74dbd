"""The demo: a small Llama trained with DeepSpeed ZeRO-3, saved as Hugging Face folders on the way.

Run it (CPU and gloo, or GPUs and nccl: the same file), from the root of the repository:

    bash tools/demo.sh                                       # everything, from an empty machine

or, with the environment already made:

    python tools/demo/task.py work_dirs/demo_base            # tokenizer, config, token blocks; once
    torchrun --nproc_per_node 2 tools/train.py configs/demo_zero3.py

What it leaves:

    work_dirs/demo/
        <timestamp>/
            hf_model/                  the newest save; load it with from_pretrained
                config.json
                generation_config.json  README.md
                model.safetensors
                tokenizer.json  tokenizer_config.json
                xhf_manifest.json
            vis_data/scalars.json      loss, learning rate, what each save cost
            <timestamp>.log
            converted/                 of tools/demo.sh: the checkpoint below, converted
        iter_<N>.pth/                  MMEngine's own DeepSpeed checkpoint, to resume from
        last_checkpoint
"""

#######################################################################
#                          PART 1  Settings                           #
#######################################################################
# Model: the folder that tools/demo/task.py makes (tokenizer, config.json, token blocks)
base_folder = 'work_dirs/demo_base'

# Data
block_length = 64  # tokens in one training sample
batch_size = 8  # samples per process and iteration

# Schedule, in iterations
max_iters = 100
warmup_iters = 20
save_interval = 50  # both kinds of checkpoint
log_interval = 10

# Optimizer
lr = 5e-3  # high, because the model is small and the run is short
final_lr = 5e-4
betas = (0.9, 0.95)
weight_decay = 0.01
max_norm = 1.0  # gradient clipping

#######################################################################
#                     PART 2  Model & Tokenizer                       #
#######################################################################
# 'xhf_hooks' registers HFCheckpointHook; 'demo.task' (tools/demo/task.py) the model and the dataset
custom_imports = dict(imports=['xhf_hooks', 'demo.task'])

model = dict(
    # An MMEngine model that holds a transformers model as `llm`, as XTuner's models do
    type='DemoCausalLM',
    base_folder=base_folder,
)

# The hook saves this tokenizer beside the weights
tokenizer = dict(
    type='transformers.AutoTokenizer.from_pretrained',
    pretrained_model_name_or_path=base_folder,
)

#######################################################################
#                    PART 3  Dataset & Dataloader                     #
#######################################################################
train_dataloader = dict(
    batch_size=batch_size,
    # The blocks are a memory map: reading them costs nothing, so no worker processes
    num_workers=0,
    dataset=dict(type='TokenBlocks', base_folder=base_folder, block_length=block_length),
    # Each process draws its own samples
    sampler=dict(type='InfiniteSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
)

#######################################################################
#                   PART 4  Optimizer & Scheduler                     #
#######################################################################
optim_wrapper = dict(
    type='DeepSpeedOptimWrapper',
    # torch's own AdamW: runs on CPU and GPU alike, nothing to compile
    optimizer=dict(type='AdamW', lr=lr, betas=betas, weight_decay=weight_decay),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=warmup_iters),
    dict(
        type='CosineAnnealingLR',
        eta_min=final_lr,
        by_epoch=False,
        begin=warmup_iters,
        end=max_iters,
    ),
]

train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters)

#######################################################################
#                          PART 5  Runtime                            #
#######################################################################
runner_type = 'FlexibleRunner'

strategy = dict(
    type='DeepSpeedStrategy',
    # Many CPUs multiply bfloat16 ten times slower than float32. Not an import statement: with one, MMEngine reads a
    # config as its lazy kind
    bf16=dict(enabled=__import__('torch').cuda.is_available()),
    gradient_clipping=max_norm,
    zero_optimization=dict(
        stage=3,
        # DeepSpeed keeps small parameters whole on every process. 0 partitions every one of them,
        # so that this small model is stored as a large one would be.
        stage3_param_persistence_threshold=0,
    ),
)

default_hooks = dict(
    # DeepSpeed's checkpoint, to resume from
    checkpoint=dict(
        type='CheckpointHook',
        by_epoch=False,
        interval=save_interval,
        max_keep_ckpts=1,
    ),
    logger=dict(type='LoggerHook', interval=log_interval),
)

# The Hugging Face folder, at the same iterations as the checkpoint above
custom_hooks = [dict(type='HFCheckpointHook')]

# The logged loss is the mean of the iterations since the line before
log_processor = dict(by_epoch=False, window_size=log_interval)

work_dir = 'work_dirs/demo'

# FlexibleRunner has no default for this one; the process group is tools/train.py's affair
env_cfg = dict(cudnn_benchmark=False)

# The same initial weights and the same data in every run
randomness = dict(seed=0)
