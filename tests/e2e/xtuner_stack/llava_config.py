"""LLaVA's pretraining and fine-tuning as XTuner's own configs have them; where HFCheckpointHook comes from differs.

tests/e2e/xtuner_stack/test_llava_train.py fills in PART 1 and runs it.
"""

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
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPImageProcessor, CLIPVisionModel
from xtuner.dataset import LLaVADataset
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.dataset.map_fns import llava_map_fn, template_map_fn_factory
from xtuner.engine.hooks import DatasetInfoHook
from xtuner.engine.runner import TrainLoop
from xtuner.model import LLaVAModel
from xtuner.utils import PROMPT_TEMPLATE

from xhf_hooks import HFCheckpointHook

#######################################################################
#                          PART 1  Settings                           #
#######################################################################
# Model
llm_name_or_path = None
visual_encoder_name_or_path = None
freeze_llm = True
freeze_visual_encoder = True
with_lora = False
visual_select_layer = -2

# Data
data_path = None
image_folder = None
prompt_template = PROMPT_TEMPLATE.vicuna
max_length = 64

# Scheduler & Optimizer
batch_size = 1  # per_device
accumulative_counts = 1
dataloader_num_workers = 0
max_iters = 2
optim_type = AdamW
lr = 1e-2  # tiny models: the weights must move
betas = (0.9, 0.999)
weight_decay = 0
max_norm = 1  # grad clip
warmup_iters = 1

# Save
save_steps = 2
save_total_limit = -1  # Maximum checkpoints to keep (-1 means unlimited)
complete_dir = None  # of a second hook, for transformers' layout

#######################################################################
#            PART 2  Model & Tokenizer & Image Processor              #
#######################################################################
tokenizer = dict(
    type=AutoTokenizer.from_pretrained,
    pretrained_model_name_or_path=llm_name_or_path,
    trust_remote_code=True,
    padding_side='right',
)

image_processor = dict(
    type=CLIPImageProcessor.from_pretrained,
    pretrained_model_name_or_path=visual_encoder_name_or_path,
    trust_remote_code=True,
)

llm_lora = dict(type=LoraConfig, r=5, lora_alpha=16, lora_dropout=0.05, bias='none', task_type='CAUSAL_LM')
visual_encoder_lora = dict(type=LoraConfig, r=3, lora_alpha=16, lora_dropout=0.05, bias='none')

model = dict(
    type=LLaVAModel,
    freeze_llm=freeze_llm,
    freeze_visual_encoder=freeze_visual_encoder,
    visual_select_layer=visual_select_layer,
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=llm_name_or_path,
        trust_remote_code=True,
    ),
    visual_encoder=dict(
        type=CLIPVisionModel.from_pretrained,
        pretrained_model_name_or_path=visual_encoder_name_or_path,
    ),
    llm_lora=llm_lora if with_lora else None,
    visual_encoder_lora=visual_encoder_lora if with_lora else None,
)

#######################################################################
#                      PART 3  Dataset & Dataloader                   #
#######################################################################
llava_dataset = dict(
    type=LLaVADataset,
    data_path=data_path,
    image_folder=image_folder,
    tokenizer=tokenizer,
    image_processor=image_processor,
    dataset_map_fn=llava_map_fn,
    template_map_fn=dict(type=template_map_fn_factory, template=prompt_template),
    max_length=max_length,
    pad_image_to_square=True,
)

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    dataset=llava_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    collate_fn=dict(type=default_collate_fn),
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
    dict(type=DatasetInfoHook, tokenizer=tokenizer),
    dict(type=HFCheckpointHook),
]

if complete_dir is not None:
    custom_hooks += [dict(type=HFCheckpointHook, llava_format='huggingface', out_dir=complete_dir)]

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
