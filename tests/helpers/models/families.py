"""More than 50 families of tiny models, for comparisons with ``save_pretrained`` of any transformers from 4.46 on.

The families of `tests.helpers.models.zoo`, which other tests use, too, and those whose names, ties, experts or configs
transformers treats in a way of their own when it saves.
"""

from tests.helpers.models import zoo
from tests.helpers.models.zoo import DECODER, GEMMA, GPT, ODD_DECODER, SEQ2SEQ, SPECIAL_TOKENS, VISION_TOWER, Models

_ENCODER = zoo.MODELS['bert'][1]
_MOE = {**DECODER, 'intermediate_size': 88, 'num_experts_per_tok': 2}
_QWEN_MOE = {**_MOE, 'num_experts': 5, 'moe_intermediate_size': 56}
_SEQ2SEQ = {**SEQ2SEQ, 'max_position_embeddings': 64}

_TEXT_DECODERS: Models = {
    'llama_tied': ('LlamaForCausalLM', {**ODD_DECODER, 'tie_word_embeddings': True}),
    'llama_classifier': ('LlamaForSequenceClassification', {**ODD_DECODER, 'num_labels': 3}),
    'llama_base': ('LlamaModel', ODD_DECODER),
    'opt': ('OPTForCausalLM', {**DECODER, 'ffn_dim': 77, 'word_embed_proj_dim': 40, 'num_attention_heads': 4}),
    'bloom': ('BloomForCausalLM', {**GPT, 'hidden_size': 40}),
    'falcon': ('FalconForCausalLM', {**DECODER, 'ffn_hidden_size': 77}),
    'gptj': ('GPTJForCausalLM', {**GPT, 'rotary_dim': 4, 'n_inner': 77}),
    'nemotron': ('NemotronForCausalLM', DECODER),
    'apertus': ('ApertusForCausalLM', DECODER),  # its __init__ reads the dtype
    'gemma4_text': (  # its config has other head sizes in some layers
        'Gemma4ForCausalLM',
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
    'qwen2_moe': ('Qwen2MoeForCausalLM', {**_QWEN_MOE, 'shared_expert_intermediate_size': 72}),
    'olmoe': ('OlmoeForCausalLM', {**_MOE, 'num_experts': 5}),
    'phimoe': ('PhimoeForCausalLM', {**_MOE, 'num_local_experts': 5}),
    'granitemoe': ('GraniteMoeForCausalLM', {**_MOE, 'num_local_experts': 5}),
    'glm4_moe': ('Glm4MoeForCausalLM', {**_MOE, 'head_dim': 10, 'moe_intermediate_size': 56, 'n_routed_experts': 4}),
    'jamba': (
        'JambaForCausalLM',
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
    'gpt_oss': ('GptOssForCausalLM', {**_MOE, 'head_dim': 10, 'num_local_experts': 4}),
}

_ENCODERS: Models = {
    'roberta': ('RobertaForMaskedLM', _ENCODER),
    'electra': ('ElectraForPreTraining', {**_ENCODER, 'embedding_size': 35}),
    'vit': ('ViTForImageClassification', {**VISION_TOWER, 'num_labels': 3}),
    'clip': (
        'CLIPModel',
        {
            'text_config': {**_ENCODER, 'bos_token_id': 1, 'eos_token_id': 2},
            'vision_config': VISION_TOWER,
            'projection_dim': 21,
        },
    ),
    'bart': ('BartForConditionalGeneration', _SEQ2SEQ),
    'pegasus': ('PegasusForConditionalGeneration', _SEQ2SEQ),
    'musicgen': (  # text_encoder and decoder are both text configs
        'MusicgenForConditionalGeneration',
        {
            'text_encoder': {**zoo.MODELS['t5'][1], 'model_type': 't5'},
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
    'umt5': ('UMT5ForConditionalGeneration', zoo.MODELS['t5'][1]),
}

# Vision-language models

_TIED = {**zoo.MODELS['llava'][1], 'text_config': {**ODD_DECODER, 'tie_word_embeddings': True}}
_GRID = {'image_grid_pinpoints': [[8, 8], [8, 16]]}
_QWEN_VL = zoo.MODELS['qwen2_vl'][1]
_QWEN_TOKENS = {name: value for name, value in _QWEN_VL.items() if name.endswith('token_id')}
_QWEN_TOWER = {
    'depth': 2,
    'hidden_size': 40,
    'out_hidden_size': 40,
    'intermediate_size': 77,
    'num_heads': 4,
    'patch_size': 4,
}
_PALIGEMMA = {'text_config': ODD_DECODER, 'vision_config': VISION_TOWER, 'projection_dim': 35, 'image_token_index': 130}
_IDEFICS = {'vision_config': VISION_TOWER, 'text_config': ODD_DECODER, 'image_token_id': 130}

_SWIN = {'image_size': 32, 'patch_size': 4, 'embed_dim': 24, 'depths': [1, 2], 'num_heads': [2, 3], 'window_size': 4}
_SIZES = {'hidden_sizes': [14, 21], 'depths': [1, 2]}

#: Classes that read values while they are built, in transformers 4.48: rates of stochastic depth.
_WITH_RATES: Models = {
    'swin': ('SwinForImageClassification', {**_SWIN, 'num_labels': 3}),
    'beit': ('BeitForImageClassification', {**VISION_TOWER, 'num_labels': 3}),
    'convnext': ('ConvNextForImageClassification', {**_SIZES, 'num_stages': 2, 'num_labels': 3}),
    'segformer': (
        'SegformerForImageClassification',
        {
            **_SIZES,
            'num_encoder_blocks': 2,
            'sr_ratios': [2, 1],
            'patch_sizes': [7, 3],
            'strides': [4, 2],
            'num_attention_heads': [1, 3],
            'mlp_ratios': [2, 2],
            'decoder_hidden_size': 15,
        },
    ),
    'donut': (
        'VisionEncoderDecoderModel',
        {
            'encoder': {**_SWIN, 'model_type': 'donut-swin'},
            'decoder': {
                **SPECIAL_TOKENS,
                'model_type': 'mbart',
                'is_decoder': True,
                'add_cross_attention': True,
                'vocab_size': 131,
                'd_model': 40,
                'decoder_layers': 1,
                'decoder_attention_heads': 4,
                'decoder_ffn_dim': 77,
            },
        },
    ),
}

VISION: Models = {
    **_WITH_RATES,
    'llava_tied': ('LlavaForConditionalGeneration', _TIED),
    'llava_onevision': (
        'LlavaOnevisionForConditionalGeneration',
        {
            'text_config': DECODER,
            'vision_config': VISION_TOWER,
            'image_token_index': 130,
            'video_token_index': 129,
            **_GRID,
        },
    ),
    'qwen2_5_vl': (
        'Qwen2_5_VLForConditionalGeneration',
        {**_QWEN_VL, 'vision_config': {**_QWEN_TOWER, 'window_size': 16, 'fullatt_block_indexes': [1]}},
    ),
    'qwen3_vl': (
        'Qwen3VLForConditionalGeneration',
        {
            'text_config': {
                **DECODER,
                'head_dim': 10,
                'rope_scaling': {'rope_type': 'default', 'mrope_section': [1, 2, 2]},
            },
            'vision_config': {**_QWEN_TOWER, 'num_position_embeddings': 16, 'deepstack_visual_indexes': [0]},
            **_QWEN_TOKENS,
        },
    ),
    'paligemma': ('PaliGemmaForConditionalGeneration', {**_PALIGEMMA, 'image_token_id': 130}),
    'colpali': ('ColPaliForRetrieval', {'vlm_config': {**_PALIGEMMA, 'model_type': 'paligemma'}, 'embedding_dim': 21}),
    'internvl': (
        'InternVLForConditionalGeneration',
        {'text_config': DECODER, 'vision_config': {**VISION_TOWER, 'image_size': [8, 8]}, 'image_token_id': 130},
    ),
    'emu3': (
        'Emu3ForConditionalGeneration',
        {
            'vq_config': {
                'codebook_size': 20,
                'embed_dim': 16,
                'latent_channels': 16,
                'base_channels': 32,
                'channel_multiplier': [1, 1],
                'num_res_blocks': 1,
                'attn_resolutions': [2],
                'hidden_size': 32,
                'num_attention_heads': 2,
            },
            'text_config': DECODER,
            'vocabulary_map': {f'<|visual token {i:06d}|>': 20 + i for i in range(20)} | {'<image>': 130},
        },
    ),
    'mllama': (
        'MllamaForConditionalGeneration',
        {
            'text_config': {
                **DECODER,
                'num_hidden_layers': 3,
                'cross_attention_layers': [1],
                'rope_scaling': {'rope_type': 'default'},
            },
            'vision_config': {
                'hidden_size': 40,
                'attention_heads': 4,
                'num_hidden_layers': 2,
                'num_global_layers': 1,
                'intermediate_size': 77,
                'vision_output_dim': 120,
                'intermediate_layers_indices': [0, 1],
                'image_size': 8,
                'patch_size': 4,
                'max_num_tiles': 2,
                'supported_aspect_ratios': [[1, 1], [1, 2]],
            },
            'image_token_index': 130,
        },
    ),
    'idefics3': ('Idefics3ForConditionalGeneration', _IDEFICS),
    'blip_2': (
        'Blip2ForConditionalGeneration',
        {
            'vision_config': VISION_TOWER,
            'qformer_config': zoo.MODELS['bert'][1],
            'text_config': {**DECODER, 'model_type': 'opt', 'ffn_dim': 77, 'word_embed_proj_dim': 40},
            'num_query_tokens': 3,
            'image_token_index': 130,
        },
    ),
    'gemma3_untied': (
        'Gemma3ForConditionalGeneration',
        {
            **zoo.MODELS['gemma3'][1],
            'text_config': {**GEMMA, 'tie_word_embeddings': False},
            'tie_word_embeddings': False,
        },
    ),
}

MODELS: Models = {**zoo.MODELS, **_TEXT_DECODERS, **_EXPERTS, **_ENCODERS, **VISION}
