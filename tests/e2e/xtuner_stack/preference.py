"""DPO, ORPO or a reward model as XTuner's own configs have it; one import differs: where HFCheckpointHook comes from.

tests/e2e/xtuner_stack/launches.py fills in PART 1 and runs it.
"""

from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from mmengine.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
)
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.dataset.collate_fns.preference_collate_fn import preference_collate_fn
from xtuner.dataset.preference_dataset import build_preference_dataset, orpo_dpo_mix_40k_map_fn
from xtuner.engine.runner import TrainLoop
from xtuner.model.dpo import DPO
from xtuner.model.orpo import ORPO
from xtuner.model.reward import RewardModel

from xhf_hooks import HFCheckpointHook

#######################################################################
#                          PART 1  Settings                           #
#######################################################################
# Model
pretrained_model_name_or_path = None
kind = 'dpo'
use_varlen_attn = False
with_lora = False
reward_token_id = 2  # <pad>

# Data
data_path = None
max_length = 64

# Scheduler & Optimizer
batch_size = 1  # per_device
accumulative_counts = 1
dataloader_num_workers = 0
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
export_options = {}  # of HFCheckpointHook

#######################################################################
#                      PART 2  Model & Tokenizer                      #
#######################################################################
tokenizer = dict(
    type=AutoTokenizer.from_pretrained,
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    trust_remote_code=True,
    padding_side='right',
    # the preference data goes through the tokenizer's own
    chat_template="{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}",
)

llm = dict(
    type=AutoModelForCausalLM.from_pretrained,
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    trust_remote_code=True,
)
lora = dict(type=LoraConfig, r=8, lora_alpha=16, lora_dropout=0.1, bias='none', task_type='CAUSAL_LM')

model = dict(
    type=dict(dpo=DPO, orpo=ORPO, reward=RewardModel)[kind],
    use_varlen_attn=use_varlen_attn,
    llm=llm,
    lora=lora if with_lora else None,
)

if kind == 'dpo':
    model['ref_llm'] = llm  # at ZeRO-3 XTuner cannot copy it

#######################################################################
#                      PART 3  Dataset & Dataloader                   #
#######################################################################
train_dataset = dict(
    type=build_preference_dataset,
    dataset=dict(type=load_dataset, path='json', data_files=dict(train=data_path)),
    tokenizer=tokenizer,
    max_length=max_length,
    dataset_map_fn=orpo_dpo_mix_40k_map_fn,
    is_dpo=kind != 'reward',
    is_reward=kind == 'reward',
    reward_token_id=reward_token_id,
    num_proc=1,
    use_varlen_attn=use_varlen_attn,
)

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    dataset=train_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    collate_fn=dict(type=preference_collate_fn, use_varlen_attn=use_varlen_attn),
)

#######################################################################
#                    PART 4  Scheduler & Optimizer                    #
#######################################################################
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

#######################################################################
#                           PART 5  Runtime                           #
#######################################################################
custom_hooks = [
    dict(type=HFCheckpointHook, **export_options),
]

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
