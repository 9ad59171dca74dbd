"""Tiny models of XTuner's own classes."""

import torch
from torch import nn

from tests.helpers.models.zoo import DECODER


def internlm2() -> nn.Module:
    from xtuner.tools.model_converters.modeling_internlm2_reward.configuration_internlm2 import InternLM2Config
    from xtuner.tools.model_converters.modeling_internlm2_reward.modeling_internlm2 import InternLM2ForCausalLM

    torch.manual_seed(0)
    config = InternLM2Config(**DECODER, attn_implementation='eager', bias=False)
    del config.reward_token_id  # the base models' own config has none
    config.auto_map = {  # as InternLM2's base models have it
        'AutoConfig': 'configuration_internlm2.InternLM2Config',
        'AutoModel': 'modeling_internlm2.InternLM2ForCausalLM',
        'AutoModelForCausalLM': 'modeling_internlm2.InternLM2ForCausalLM',
    }
    return InternLM2ForCausalLM(config)


def mixtral(n_in_shard: int) -> nn.Module:
    from xtuner.model.transformers_models.mixtral import MixtralConfig, MixtralForCausalLM

    options = dict(DECODER, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(MixtralConfig(**options, moe_implementation='shard', expert_in_one_shard=n_in_shard))


def deepseek_v2(n_in_shard: int) -> nn.Module:
    from xtuner.model.transformers_models.deepseek_v2 import DeepseekV2Config, DeepseekV2ForCausalLM

    options = dict(
        DECODER,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        moe_intermediate_size=56,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=21,
        kv_lora_rank=17,
        qk_rope_head_dim=8,
        qk_nope_head_dim=10,
        v_head_dim=10,
        attn_implementation='eager',
        moe_implementation='shard',
    )
    return DeepseekV2ForCausalLM(DeepseekV2Config(**options, expert_in_one_shard=n_in_shard))
