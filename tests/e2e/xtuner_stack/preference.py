"""DPO, ORPO or a reward model as XTuner's own configs have it; one import differs: where HFCheckpointHook comes from.

tests/e2e/xtuner_stack/launches.py appends runtime.py, fills in PART 1 and runs it.
"""

from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.dataset.collate_fns.preference_collate_fn import preference_collate_fn
from xtuner.dataset.preference_dataset import build_preference_dataset, orpo_dpo_mix_40k_map_fn
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

batch_size = 1  # per_device
dataloader_num_workers = 0

# Save
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
#                        PART 4  Custom hooks                         #
#######################################################################
custom_hooks = [
    dict(type=HFCheckpointHook, **export_options),
]
