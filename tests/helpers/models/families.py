"""More than 50 families of tiny models, for comparisons with ``save_pretrained`` of any transformers from 4.46 on.

The families of `tests.helpers.models.zoo`, which other tests use, too, and those whose names, ties, experts or configs
transformers treats in a way of their own when it saves.
"""

from tests.helpers.models import zoo
from tests.helpers.models.vision_families import VISION
from tests.helpers.models.zoo import DECODER, GPT, ODD_DECODER, SEQ2SEQ, VISION_TOWER, Models

_ENCODER = zoo.MODELS['bert'][2]
_MOE = {**DECODER, 'intermediate_size': 88, 'num_experts_per_tok': 2}
_QWEN_MOE = {**_MOE, 'num_experts': 5, 'moe_intermediate_size': 56}
_SEQ2SEQ = {**SEQ2SEQ, 'max_position_embeddings': 64}

_TEXT_DECODERS: Models = {
    'llama_tied': ('LlamaForCausalLM', 'LlamaConfig', {**ODD_DECODER, 'tie_word_embeddings': True}),
    'llama_classifier': ('LlamaForSequenceClassification', 'LlamaConfig', {**ODD_DECODER, 'num_labels': 3}),
    'llama_base': ('LlamaModel', 'LlamaConfig', ODD_DECODER),
    'opt': (
        'OPTForCausalLM',
        'OPTConfig',
        {**DECODER, 'ffn_dim': 77, 'word_embed_proj_dim': 40, 'num_attention_heads': 4},
    ),
    'bloom': ('BloomForCausalLM', 'BloomConfig', {**GPT, 'hidden_size': 40}),
    'falcon': ('FalconForCausalLM', 'FalconConfig', {**DECODER, 'ffn_hidden_size': 77}),
    'gptj': ('GPTJForCausalLM', 'GPTJConfig', {**GPT, 'rotary_dim': 4, 'n_inner': 77}),
    'nemotron': ('NemotronForCausalLM', 'NemotronConfig', DECODER),
    'apertus': ('ApertusForCausalLM', 'ApertusConfig', DECODER),  # its __init__ reads the dtype
    'gemma4_text': (  # its config has other head sizes in some layers
        'Gemma4ForCausalLM',
        'Gemma4TextConfig',
        {
            **DECODER,
            'num_hidden_layers': 6,
            'head_dim': 8,
            'global_head_dim': 16,
            'hidden_size_per_layer_input': 8,
            'vocab_size_per_layer_input': 131,
            'sliding_window': 16,
        },
    ),
}

_EXPERTS: Models = {
    'qwen2_moe': ('Qwen2MoeForCausalLM', 'Qwen2MoeConfig', {**_QWEN_MOE, 'shared_expert_intermediate_size': 72}),
    'olmoe': ('OlmoeForCausalLM', 'OlmoeConfig', {**_MOE, 'num_experts': 5}),
    'phimoe': ('PhimoeForCausalLM', 'PhimoeConfig', {**_MOE, 'num_local_experts': 5}),
    'granitemoe': ('GraniteMoeForCausalLM', 'GraniteMoeConfig', {**_MOE, 'num_local_experts': 5}),
    'glm4_moe': (
        'Glm4MoeForCausalLM',
        'Glm4MoeConfig',
        {**_MOE, 'head_dim': 10, 'moe_intermediate_size': 56, 'n_routed_experts': 4},
    ),
    'jamba': (
        'JambaForCausalLM',
        'JambaConfig',
        {
            **_MOE,
            'num_experts': 5,
            'attn_layer_period': 2,
            'attn_layer_offset': 1,
            'use_mamba_kernels': False,
            'mamba_d_state': 7,
        },
    ),
    'ernie4_5_vl_moe': (  # experts for text and for images are one list in its files
        'Ernie4_5_VLMoeForConditionalGeneration',
        'Ernie4_5_VLMoeConfig',
        {
            'text_config': {
                **DECODER,
                'hidden_size': 256,
                'head_dim': 128,
                'num_attention_heads': 2,
                'num_key_value_heads': 1,
                'moe_num_experts': 3,
                'moe_intermediate_size': [16, 24],
                'moe_k': 2,
                'moe_num_shared_experts': 1,
            },
            'vision_config': {
                'depth': 1,
                'hidden_size': 32,
                'intermediate_size': 48,
                'num_heads': 4,
                'text_hidden_size': 256,
            },
            'image_start_token_id': 120,
            'image_end_token_id': 121,
            'image_token_id': 122,
            'video_start_token_id': 123,
            'video_end_token_id': 124,
            'video_token_id': 125,
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
    'musicgen': (  # text_encoder and decoder are both text configs
        'MusicgenForConditionalGeneration',
        'MusicgenConfig',
        {
            'text_encoder': {**zoo.MODELS['t5'][2], 'model_type': 't5'},
            'audio_encoder': {
                'model_type': 'encodec',
                'num_filters': 4,
                'hidden_size': 16,
                'codebook_size': 32,
                'upsampling_ratios': [2, 2],
                'target_bandwidths': [1.0],
                'sampling_rate': 800,
            },
            'decoder': {
                'vocab_size': 32,
                'hidden_size': 40,
                'ffn_dim': 77,
                'num_hidden_layers': 1,
                'num_attention_heads': 4,
                'num_codebooks': 2,
            },
        },
    ),
    'umt5': ('UMT5ForConditionalGeneration', 'UMT5Config', zoo.MODELS['t5'][2]),
}

MODELS: Models = {**zoo.MODELS, **_TEXT_DECODERS, **_EXPERTS, **_ENCODERS, **VISION}
