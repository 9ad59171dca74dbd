"""LLaVA's pretraining and fine-tuning as XTuner's own configs have them; where HFCheckpointHook comes from differs.

tests/e2e/xtuner_stack/test_llava_train.py appends runtime.py, fills in PART 1 and runs it.
"""

from mmengine.dataset import DefaultSampler
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPImageProcessor, CLIPVisionModel
from xtuner.dataset import LLaVADataset
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.dataset.map_fns import llava_map_fn, template_map_fn_factory
from xtuner.engine.hooks import DatasetInfoHook
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

batch_size = 1  # per_device
dataloader_num_workers = 0

# Save
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
#                        PART 4  Custom hooks                         #
#######################################################################
custom_hooks = [
    dict(type=DatasetInfoHook, tokenizer=tokenizer),
    dict(type=HFCheckpointHook),
]

if complete_dir is not None:
    custom_hooks += [dict(type=HFCheckpointHook, llava_format='huggingface', out_dir=complete_dir)]
