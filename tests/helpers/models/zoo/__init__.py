"""The tiny models of all tests. This module: random models of the transformers families that people train.

`llamas`: models that runs train and save; `llava`, `projector`, `internvl`: models of several parts with custom code.

Sizes are odd on purpose: many tensors can't be cut into 2 or 3 equal parts, so ZeRO-3 has to pad
its partitions. Where heads must have an even size, hidden is 40 instead of 35. Experts have rows of
a multiple of 16 bytes, as torch's grouped matrix product (used by transformers 5) requires.

No tensor is all zeros or ones: a bias, a norm or a buffer that a save omits cannot pass for a
freshly initialised one.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOISE_STD = 0.05

SPECIAL_TOKENS = {'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2}
# Shared by the families with Llama's option names.
DECODER = {
    'vocab_size': 131,
    'hidden_size': 40,
    'intermediate_size': 77,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 64,
    **SPECIAL_TOKENS,
}
# For families with any head size.
ODD_DECODER = {**DECODER, 'hidden_size': 35, 'num_attention_heads': 5, 'num_key_value_heads': 1, 'head_dim': 10}
GEMMA = {**ODD_DECODER, 'query_pre_attn_scalar': 10, 'sliding_window': 16}
GPT = {'vocab_size': 131, 'n_embd': 40, 'n_layer': 2, 'n_head': 4, 'n_positions': 64, **SPECIAL_TOKENS}
SEQ2SEQ = {
    'vocab_size': 131,
    'd_model': 40,
    'encoder_layers': 2,
    'decoder_layers': 2,
    'encoder_attention_heads': 4,
    'decoder_attention_heads': 4,
    'encoder_ffn_dim': 77,
    'decoder_ffn_dim': 77,
    **SPECIAL_TOKENS,
}
VISION_TOWER = {
    'hidden_size': 35,
    'intermediate_size': 51,
    'num_hidden_layers': 2,
    'num_attention_heads': 5,
    'image_size': 8,
    'patch_size': 4,
}

# Family: model class, options of its config. tests/helpers/models/families.py has more.
Models = dict[str, tuple[str, dict[str, Any]]]
MODELS: Models = {
    'llama': ('LlamaForCausalLM', ODD_DECODER),
    'qwen2': ('Qwen2ForCausalLM', {**ODD_DECODER, 'tie_word_embeddings': True}),
    'qwen3': ('Qwen3ForCausalLM', ODD_DECODER),
    'qwen3_moe': (
        'Qwen3MoeForCausalLM',
        {**DECODER, 'head_dim': 10, 'num_experts': 5, 'num_experts_per_tok': 2, 'moe_intermediate_size': 56},
    ),
    'mixtral': (
        'MixtralForCausalLM',
        {**DECODER, 'intermediate_size': 88, 'num_local_experts': 5, 'num_experts_per_tok': 2},
    ),
    'deepseek_v3': (
        'DeepseekV3ForCausalLM',
        {
            **DECODER,
            'num_key_value_heads': 4,
            'first_k_dense_replace': 1,  # one dense layer, then one of experts
            'moe_intermediate_size': 56,
            'n_routed_experts': 4,
            'n_group': 2,
            'topk_group': 1,
            'num_experts_per_tok': 2,
            'q_lora_rank': 21,
            'kv_lora_rank': 17,
            'qk_rope_head_dim': 8,
            'qk_nope_head_dim': 10,
            'v_head_dim': 10,
        },
    ),
    'gpt2': ('GPT2LMHeadModel', {**GPT, 'n_embd': 35, 'n_head': 5, 'n_inner': 77}),
    'gpt_neox': ('GPTNeoXForCausalLM', {**DECODER, 'num_key_value_heads': 4}),
    'gemma2': ('Gemma2ForCausalLM', GEMMA),
    'gemma3': (
        'Gemma3ForConditionalGeneration',
        {
            'text_config': GEMMA,
            'vision_config': VISION_TOWER,
            'mm_tokens_per_image': 1,
            'boi_token_index': 128,
            'eoi_token_index': 129,
            'image_token_index': 130,
        },
    ),
    'gemma3_text': ('Gemma3ForCausalLM', GEMMA),
    'phi3': ('Phi3ForCausalLM', DECODER),
    'olmo2': ('Olmo2ForCausalLM', DECODER),
    'mamba': (
        'MambaForCausalLM',
        {'vocab_size': 131, 'hidden_size': 35, 'state_size': 7, 'num_hidden_layers': 2, **SPECIAL_TOKENS},
    ),
    'bert': (
        'BertForMaskedLM',
        {
            'vocab_size': 131,
            'hidden_size': 35,
            'intermediate_size': 77,
            'num_hidden_layers': 2,
            'num_attention_heads': 5,
            'max_position_embeddings': 64,
            'pad_token_id': 0,
        },
    ),
    't5': (
        'T5ForConditionalGeneration',
        {
            'vocab_size': 131,
            'd_model': 35,
            'd_kv': 7,
            'd_ff': 77,
            'num_layers': 2,
            'num_heads': 5,
            'decoder_start_token_id': 0,
        },
    ),
    'whisper': (
        'WhisperForConditionalGeneration',
        {
            **SEQ2SEQ,
            'num_mel_bins': 13,
            'max_source_positions': 20,
            'max_target_positions': 31,
            'decoder_start_token_id': 1,
        },
    ),
    'llava': (
        'LlavaForConditionalGeneration',
        {'text_config': ODD_DECODER, 'vision_config': VISION_TOWER, 'image_token_index': 130, 'image_seq_length': 4},
    ),
    'qwen2_vl': (
        'Qwen2VLForConditionalGeneration',
        {
            **DECODER,
            'rope_scaling': {'type': 'mrope', 'mrope_section': [1, 2, 2]},
            'vision_config': {
                'depth': 2,
                'embed_dim': 32,
                'hidden_size': 40,
                'num_heads': 4,
                'mlp_ratio': 2,
                'patch_size': 4,
            },
            'vision_start_token_id': 127,
            'vision_end_token_id': 128,
            'video_token_id': 129,
            'image_token_id': 130,
        },
    ),
}

FAMILIES = list(MODELS)


def available(family: str, models: Models = MODELS) -> bool:
    """Tells whether the installed transformers has `family` (4.48.0 lacks Qwen3, for example)."""
    return models[family][0] in _names()


def has_class_for(family: str, task: str, models: Models = MODELS) -> bool:
    """Tells whether the installed transformers has a class of `family` for a task, such as TokenClassification."""
    return models[family][0].replace('CausalLM', task) in _names()


@cache
def _names() -> frozenset[str]:
    """What transformers has; looking up a model class would import its whole module."""
    import transformers

    return frozenset(dir(transformers))


def has_head_dim() -> bool:
    """Tells whether Llama's heads may have any size; before transformers 4.45 hidden_size says it."""
    from transformers import LlamaConfig

    return 'head_dim' in inspect.signature(LlamaConfig).parameters


def fitted(options: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config's options, in sizes that the installed code of Llama and its kin accepts."""
    found = {
        name: fitted(value) if isinstance(value, dict) else copy.deepcopy(value) for name, value in options.items()
    }
    if {'head_dim', 'num_attention_heads'} <= found.keys() and not has_head_dim():
        found['hidden_size'] = found['head_dim'] * found['num_attention_heads']
    return found


def build(family: str, seed: int = 0, models: Models = MODELS) -> PreTrainedModel:
    """Builds the float32 model of `family`; its weights depend on `seed` only."""
    import torch
    import transformers

    model_class = getattr(transformers, models[family][0])
    # A copy, since some configs edit the dicts that they are given.
    config = model_class.config_class(**fitted(models[family][1]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # keep_vars keeps identities, so that tied parameters get their noise once.
        tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.data += NOISE_STD * torch.randn(tensor.shape)
    return model
