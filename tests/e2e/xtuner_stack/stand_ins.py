"""Tiny models without weights in place of the base models that XTuner's built-in configs name.

Everything else of a config is real: XTuner's model class, its LoRA, its freezing, transformers' and bitsandbytes'
quantized layers. Language models are Llamas, but for StarCoder, and DeepSeek V2, whose experts XTuner may shard; CLIP
is CLIP, and InternVL's chat model is three real parts.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    GPTBigCodeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    PretrainedConfig,
    PreTrainedModel,
)

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_VISION_SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)


def family_of(base: str) -> str:
    """What stands in for a base model, by its name."""
    return 'InternVL' if 'InternVL' in base else type(_config_of(base)).__name__.removesuffix('Config')


class RewardBase(LlamaPreTrainedModel):
    """As POLAR's InternLM2ForRewardModel: a decoder and its head, which RewardModel takes apart."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.v_head = nn.Linear(config.hidden_size, 1, bias=False)


class InternVLConfig(PretrainedConfig):
    """What XTuner reads of InternVL's."""

    model_type = 'internvl_chat'

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.llm_config = LlamaConfig(**_SIZES)
        self.vision_config = CLIPVisionConfig(**_VISION_SIZES)
        self.hidden_size = self.llm_config.hidden_size


class InternVLChatModel(PreTrainedModel):
    """Named and laid out as the one in InternVL's code on the hub."""

    config_class = InternVLConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__(config)
        self.vision_model = CLIPVisionModel(config.vision_config)
        self.language_model = LlamaForCausalLM(config.llm_config)
        self.mlp1 = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


class Tokenizer:
    """What XTuner's models ask of one."""

    def __len__(self) -> int:
        return 1

    def convert_tokens_to_ids(self, token: str) -> int:
        return 5


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, ``from_pretrained`` loads nothing, and gives a tiny model on the meta device."""
    replaced = {
        AutoConfig: lambda base, **_: _config_of(base),
        AutoTokenizer: lambda *_, **__: Tokenizer(),
        AutoModelForCausalLM: lambda *base, **options: _from_pretrained(None, *base, **options),
        AutoModel: _auto_model,
    }
    with ExitStack() as patches:
        for owner, loader in replaced.items():
            patches.enter_context(mock.patch.object(owner, 'from_pretrained', staticmethod(loader)))
        patches.enter_context(mock.patch.object(PreTrainedModel, 'from_pretrained', classmethod(_from_pretrained)))
        yield


def _auto_model(pretrained_model_name_or_path: str, **options: Any) -> PreTrainedModel:
    kind = InternVLChatModel if 'InternVL' in pretrained_model_name_or_path else RewardBase
    return _from_pretrained(kind, pretrained_model_name_or_path, **options)


def _config_of(base: str) -> PretrainedConfig:
    if 'InternVL' in base:
        return InternVLConfig()
    if 'DeepSeek-V2' in base:
        from xtuner.model.transformers_models.deepseek_v2 import DeepseekV2Config

        return DeepseekV2Config(
            **_SIZES,
            first_k_dense_replace=0,
            moe_intermediate_size=16,
            n_routed_experts=40,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
        )
    if 'starcoder' in base:  # its configs name layers that a Llama has not
        return GPTBigCodeConfig(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2, n_inner=48)
    return CLIPVisionConfig(**_VISION_SIZES) if 'clip-vit' in base else LlamaConfig(**_SIZES)


def _from_pretrained(
    cls: type[PreTrainedModel] | None, pretrained_model_name_or_path: str, **options: Any
) -> PreTrainedModel:
    """As it leaves a model. Attention's implementation, which needs a GPU, does not matter here."""
    config = options.pop('config', None) or _config_of(pretrained_model_name_or_path)
    for name in ('moe_implementation', 'expert_in_one_shard', 'rope_scaling'):
        if name in options:
            setattr(config, name, options[name])
    for part in (config, getattr(config, 'llm_config', config)):
        part._attn_implementation = 'eager'
    config._name_or_path = pretrained_model_name_or_path
    quantization = options.get('quantization_config')
    if options.get('load_in_8bit'):
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    model.to(options.get('torch_dtype') or torch.float32)
    if quantization is not None:
        from transformers.quantizers import AutoHfQuantizer  # since 4.38

        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)  # its check for a GPU left out
        quantizer.preprocess_model(model=model, device_map=None)
        quantizer.postprocess_model(model)
    return model.eval()
