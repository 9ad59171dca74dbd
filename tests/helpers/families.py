"""More than 50 families of tiny models, for comparisons with ``save_pretrained`` of any transformers from 4.46 on.

The families of `tests.helpers.zoo`, which other tests use, too, and those whose names, ties, experts or configs
transformers treats in a way of their own when it saves.
"""

from __future__ import annotations

from tests.helpers import zoo
from tests.helpers.vision_families import VISION
from tests.helpers.zoo import DECODER, ODD_DECODER, SPECIAL_TOKENS, VISION_TOWER, Models

_GPT = {'vocab_size': 131, 'n_embd': 40, 'n_layer': 2, 'n_head': 4, 'n_positions': 64, **SPECIAL_TOKENS}
_ENCODER = zoo.MODELS['bert'][2]
_MOE = {**DECODER, 'intermediate_size': 88, 'num_experts_per_tok': 2}
_QWEN_MOE = {**_MOE, 'num_experts': 5, 'moe_intermediate_size': 56}
_SEQ2SEQ = {
    'vocab_size': 131,
    'd_model': 40,
    'encoder_layers': 2,
    'decoder_layers': 2,
    'encoder_attention_heads': 4,
    'decoder_attention_heads': 4,
    'encoder_ffn_dim': 77,
    'decoder_ffn_dim': 77,
    'max_position_embeddings': 64,
    'decoder_start_token_id': 2,
    **SPECIAL_TOKENS,
}

_TEXT_DECODERS: Models = {
    'llama_tied': ('LlamaForCausalLM', 'LlamaConfig', {**ODD_DECODER, 'tie_word_embeddings': True}),
    'llama_classifier': ('LlamaForSequenceClassification', 'LlamaConfig', {**ODD_DECODER, 'num_labels': 3}),
    'llama_base': ('LlamaModel', 'LlamaConfig', ODD_DECODER),
    'opt': (
        'OPTForCausalLM',
        'OPTConfig',
        {**DECODER, 'ffn_dim': 77, 'word_embed_proj_dim': 40, 'num_attention_heads': 4},
    ),
    'bloom': ('BloomForCausalLM', 'BloomConfig', {**_GPT, 'hidden_size': 40}),
    'falcon': ('FalconForCausalLM', 'FalconConfig', {**DECODER, 'ffn_hidden_size': 77}),
    'gptj': ('GPTJForCausalLM', 'GPTJConfig', {**_GPT, 'rotary_dim': 4, 'n_inner': 77}),
    'nemotron': ('NemotronForCausalLM', 'NemotronConfig', DECODER),
}

_EXPERTS: Models = {
    'qwen2_moe': ('Qwen2MoeForCausalLM', 'Qwen2MoeConfig', {**_QWEN_MOE, 'shared_expert_intermediate_size': 72}),
    'olmoe': ('OlmoeForCausalLM', 'OlmoeConfig', {**_MOE, 'num_experts': 5}),
    'phimoe': ('PhimoeForCausalLM', 'PhimoeConfig', {**_MOE, 'num_local_experts': 5}),
    'granitemoe': ('GraniteMoeForCausalLM', 'GraniteMoeConfig', {**_MOE, 'num_local_experts': 5}),
    'glm4_moe': (
        'Glm4MoeForCausalLM',
        'Glm4MoeConfig',
        {
            **_MOE,
            'head_dim': 10,
            'moe_intermediate_size': 56,
            'n_routed_experts': 4,
            'n_shared_experts': 1,
            'n_group': 1,
            'topk_group': 1,
            'first_k_dense_replace': 1,
        },
    ),
    'jamba': (
        'JambaForCausalLM',
        'JambaConfig',
        {
            **_MOE,
            'num_experts': 5,
            'attn_layer_period': 2,
            'attn_layer_offset': 1,
            'expert_layer_period': 2,
            'expert_layer_offset': 1,
            'use_mamba_kernels': False,
            'mamba_d_state': 7,
        },
    ),
    'gpt_oss': ('GptOssForCausalLM', 'GptOssConfig', {**_MOE, 'head_dim': 10, 'num_local_experts': 4}),
}

_ENCODERS: Models = {
    'roberta': ('RobertaForMaskedLM', 'RobertaConfig', _ENCODER),
    'electra': ('ElectraForPreTraining', 'ElectraConfig', {**_ENCODER, 'embedding_size': 35}),
    'vit': ('ViTForImageClassification', 'ViTConfig', {**VISION_TOWER, 'num_labels': 3}),
    'clip': (
        'CLIPModel',
        'CLIPConfig',
        {
            'text_config': {**_ENCODER, 'bos_token_id': 1, 'eos_token_id': 2},
            'vision_config': VISION_TOWER,
            'projection_dim': 21,
        },
    ),
    'bart': ('BartForConditionalGeneration', 'BartConfig', _SEQ2SEQ),
    'pegasus': ('PegasusForConditionalGeneration', 'PegasusConfig', _SEQ2SEQ),
    'umt5': ('UMT5ForConditionalGeneration', 'UMT5Config', zoo.MODELS['t5'][2]),
}

MODELS: Models = {**zoo.MODELS, **_TEXT_DECODERS, **_EXPERTS, **_ENCODERS, **VISION}
