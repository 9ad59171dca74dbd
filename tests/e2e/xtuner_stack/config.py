"""A fine-tune, full or LoRA, as XTuner's own configs have it; one import differs: where HFCheckpointHook comes from.

tests/e2e/xtuner_stack/launches.py appends runtime.py, fills in PART 1 and runs it.
"""

from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from mmengine.hooks import EMAHook
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.dataset import process_hf_dataset
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.dataset.map_fns import alpaca_map_fn, template_map_fn_factory
from xtuner.engine.hooks import DatasetInfoHook, ThroughputHook
from xtuner.engine.hooks import HFCheckpointHook as XTunerHFCheckpointHook
from xtuner.model import SupervisedFinetune
from xtuner.utils import PROMPT_TEMPLATE

from xhf_hooks import HFCheckpointHook

#######################################################################
#                          PART 1  Settings                           #
#######################################################################
# Model
pretrained_model_name_or_path = None
use_varlen_attn = False
with_lora = False

# Data
data_path = None
prompt_template = PROMPT_TEMPLATE.qwen_chat
max_length = 64
pack_to_max_length = True

batch_size = 1  # per_device
dataloader_num_workers = 0

# Save
with_xtuner_hook = False  # XTuner's own hook, too, which needs DeepSpeed
with_ema = False

#######################################################################
#                      PART 2  Model & Tokenizer                      #
#######################################################################
tokenizer = dict(
    type=AutoTokenizer.from_pretrained,
    pretrained_model_name_or_path=pretrained_model_name_or_path,
    trust_remote_code=True,
    padding_side='right',
)

model = dict(
    type=SupervisedFinetune,
    use_varlen_attn=use_varlen_attn,
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        trust_remote_code=True,
    ),
    lora=dict(type=LoraConfig, r=8, lora_alpha=16, lora_dropout=0.1, bias='none', task_type='CAUSAL_LM')
    if with_lora
    else None,
)

#######################################################################
#                      PART 3  Dataset & Dataloader                   #
#######################################################################
train_dataset = dict(
    type=process_hf_dataset,
    dataset=dict(type=load_dataset, path='json', data_files=dict(train=data_path)),
    tokenizer=tokenizer,
    max_length=max_length,
    dataset_map_fn=alpaca_map_fn,
    template_map_fn=dict(type=template_map_fn_factory, template=prompt_template),
    remove_unused_columns=True,
    shuffle_before_pack=True,
    pack_to_max_length=pack_to_max_length,
    use_varlen_attn=use_varlen_attn,
    map_num_proc=None,  # XTuner's default is 32 processes
)

train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    dataset=train_dataset,
    sampler=dict(type=DefaultSampler, shuffle=True),
    collate_fn=dict(type=default_collate_fn, use_varlen_attn=use_varlen_attn),
)

#######################################################################
#                        PART 4  Custom hooks                         #
#######################################################################
custom_hooks = [
    dict(type=DatasetInfoHook, tokenizer=tokenizer),
    dict(type=ThroughputHook),
    dict(type=HFCheckpointHook),
]

if with_xtuner_hook:
    custom_hooks += [dict(type=XTunerHFCheckpointHook)]
if with_ema:
    custom_hooks += [dict(type=EMAHook, momentum=0.1)]
