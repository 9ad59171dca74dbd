"""The vision-language models of `tests.helpers.models.families`."""

from tests.helpers.models.zoo import DECODER, GEMMA, MODELS, ODD_DECODER, SPECIAL_TOKENS, VISION_TOWER, Models

_TIED = {**MODELS['llava'][2], 'text_config': {**ODD_DECODER, 'tie_word_embeddings': True}}
_GRID = {'image_grid_pinpoints': [[8, 8], [8, 16]]}
_QWEN_VL = MODELS['qwen2_vl'][2]
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
    'swin': ('SwinForImageClassification', 'SwinConfig', {**_SWIN, 'num_labels': 3}),
    'beit': ('BeitForImageClassification', 'BeitConfig', {**VISION_TOWER, 'num_labels': 3}),
    'convnext': ('ConvNextForImageClassification', 'ConvNextConfig', {**_SIZES, 'num_stages': 2, 'num_labels': 3}),
    'segformer': (
        'SegformerForImageClassification',
        'SegformerConfig',
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
        'VisionEncoderDecoderConfig',
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
    'llava_tied': ('LlavaForConditionalGeneration', 'LlavaConfig', _TIED),
    'llava_onevision': (
        'LlavaOnevisionForConditionalGeneration',
        'LlavaOnevisionConfig',
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
        'Qwen2_5_VLConfig',
        {**_QWEN_VL, 'vision_config': {**_QWEN_TOWER, 'window_size': 16, 'fullatt_block_indexes': [1]}},
    ),
    'qwen3_vl': (
        'Qwen3VLForConditionalGeneration',
        'Qwen3VLConfig',
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
    'paligemma': ('PaliGemmaForConditionalGeneration', 'PaliGemmaConfig', {**_PALIGEMMA, 'image_token_id': 130}),
    'colpali': (
        'ColPaliForRetrieval',
        'ColPaliConfig',
        {'vlm_config': {**_PALIGEMMA, 'model_type': 'paligemma'}, 'embedding_dim': 21},
    ),
    'internvl': (
        'InternVLForConditionalGeneration',
        'InternVLConfig',
        {'text_config': DECODER, 'vision_config': {**VISION_TOWER, 'image_size': [8, 8]}, 'image_token_id': 130},
    ),
    'emu3': (
        'Emu3ForConditionalGeneration',
        'Emu3Config',
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
        'MllamaConfig',
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
    'idefics3': ('Idefics3ForConditionalGeneration', 'Idefics3Config', _IDEFICS),
    'blip_2': (
        'Blip2ForConditionalGeneration',
        'Blip2Config',
        {
            'vision_config': VISION_TOWER,
            'qformer_config': MODELS['bert'][2],
            'text_config': {**DECODER, 'model_type': 'opt', 'ffn_dim': 77, 'word_embed_proj_dim': 40},
            'num_query_tokens': 3,
            'image_token_index': 130,
        },
    ),
    'gemma3_untied': (
        'Gemma3ForConditionalGeneration',
        'Gemma3Config',
        {**MODELS['gemma3'][2], 'text_config': {**GEMMA, 'tie_word_embeddings': False}, 'tie_word_embeddings': False},
    ),
}
