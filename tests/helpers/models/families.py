"""More than 50 families of tiny models, for comparisons with ``save_pretrained`` of any transformers from 4.46 on.

The families of `tests.helpers.models.zoo`, which other tests use, too, and those whose names, ties, experts or configs
transformers treats in a way of their own when it saves.
"""

from tests.helpers.models import zoo
from tests.helpers.models.zoo import ALIGNED, MROPE, ODD, ODD_ENCODER, Models

_TIED = {'tie_word_embeddings': True}

_TEXT_DECODERS: Models = {
    'llama_tied': ('LlamaForCausalLM', {**ODD, **_TIED}),
    'llama_classifier': ('LlamaForSequenceClassification', {**ODD, 'num_labels': 3}),
    'llama_base': ('LlamaModel', ODD),
    'opt': ('OPTForCausalLM', {'word_embed_proj_dim': 40}),
    'bloom': ('BloomForCausalLM', {}),
    'falcon': ('FalconForCausalLM', {}),
    'gptj': ('GPTJForCausalLM', {'rotary_dim': 4}),
    'nemotron': ('NemotronForCausalLM', {}),
    'apertus': ('ApertusForCausalLM', {}),  # its __init__ reads the dtype
    'gemma4_text': (  # its config has other head sizes in some layers
        'Gemma4ForCausalLM',
        {
            'num_hidden_layers': 6,
            'head_dim': 8,
            'global_head_dim': 16,
            'hidden_size_per_layer_input': 8,
            'vocab_size_per_layer_input': 131,
        },
    ),
}

_EXPERTS: Models = {
    'qwen2_moe': ('Qwen2MoeForCausalLM', {'shared_expert_intermediate_size': 72}),
    'olmoe': ('OlmoeForCausalLM', ALIGNED),
    'phimoe': ('PhimoeForCausalLM', ALIGNED),
    'granitemoe': ('GraniteMoeForCausalLM', ALIGNED),
    'glm4_moe': ('Glm4MoeForCausalLM', {}),
    'jamba': (
        'JambaForCausalLM',
        {**ALIGNED, 'attn_layer_period': 2, 'attn_layer_offset': 1, 'use_mamba_kernels': False, 'mamba_d_state': 7},
    ),
    'ernie4_5_vl_moe': (  # experts for text and for images are one list in its files
        'Ernie4_5_VLMoeForConditionalGeneration',
        {
            'text_config': {
                'hidden_size': 256,
                'head_dim': 128,
                'num_attention_heads': 2,
                'num_key_value_heads': 1,
                'moe_num_experts': 3,
                'moe_intermediate_size': [16, 24],
                'moe_k': 2,
                'moe_num_shared_experts': 1,
            },
            'vision_config': {'depth': 1, 'hidden_size': 32, 'intermediate_size': 48, 'text_hidden_size': 256},
            'image_start_token_id': 120,
            'image_end_token_id': 121,
            'image_token_id': 122,
            'video_start_token_id': 123,
            'video_end_token_id': 124,
            'video_token_id': 125,
        },
    ),
    'gpt_oss': ('GptOssForCausalLM', {**ALIGNED, 'num_local_experts': 4}),
}

_SMALL_T5 = zoo.MODELS['t5'][1]
_ENCODERS: Models = {
    'roberta': ('RobertaForMaskedLM', ODD_ENCODER),
    'electra': ('ElectraForPreTraining', {**ODD_ENCODER, 'embedding_size': 35}),
    'vit': ('ViTForImageClassification', {'num_labels': 3}),
    'clip': ('CLIPModel', {'text_config': ODD_ENCODER, 'projection_dim': 21}),
    'bart': ('BartForConditionalGeneration', {}),
    'pegasus': ('PegasusForConditionalGeneration', {}),
    'musicgen': (  # text_encoder and decoder are both text configs
        'MusicgenForConditionalGeneration',
        {
            'text_encoder': {**_SMALL_T5, 'model_type': 't5'},
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
    'umt5': ('UMT5ForConditionalGeneration', _SMALL_T5),
}

_SWIN = {'image_size': 32, 'embed_dim': 24, 'hidden_size': 48, 'depths': [1, 2], 'num_heads': [2, 3], 'window_size': 4}
_STAGES = {'hidden_sizes': [14, 21], 'depths': [1, 2]}

#: Classes that read values while they are built, in transformers 4.48: rates of stochastic depth.
_WITH_RATES: Models = {
    'swin': ('SwinForImageClassification', {**_SWIN, 'num_labels': 3}),
    'beit': ('BeitForImageClassification', {'num_labels': 3}),
    'convnext': ('ConvNextForImageClassification', {**_STAGES, 'num_stages': 2, 'num_labels': 3}),
    'segformer': (
        'SegformerForImageClassification',
        {
            **_STAGES,
            'num_encoder_blocks': 2,
            'sr_ratios': [2, 1],
            'patch_sizes': [7, 3],
            'strides': [4, 2],
            'num_attention_heads': [1, 3],
            'mlp_ratios': [2, 2],
            'decoder_hidden_size': 15,
            'num_labels': 3,
        },
    ),
    'donut': (
        'VisionEncoderDecoderModel',
        {
            'encoder': {**_SWIN, 'model_type': 'donut-swin'},
            'decoder': {'model_type': 'mbart', 'is_decoder': True, 'add_cross_attention': True, 'decoder_layers': 1},
        },
    ),
}

_PALIGEMMA = {'text_config': ODD, 'projection_dim': 35}
_GEMMA3 = zoo.MODELS['gemma3'][1]
_UNTIED = {'tie_word_embeddings': False}
_VISION_LANGUAGE: Models = {
    'llava_tied': ('LlavaForConditionalGeneration', {'text_config': {**ODD, **_TIED}, 'image_seq_length': 4}),
    'llava_onevision': ('LlavaOnevisionForConditionalGeneration', {'image_grid_pinpoints': [[8, 8], [8, 16]]}),
    'qwen2_5_vl': (
        'Qwen2_5_VLForConditionalGeneration',
        {'text_config': MROPE, 'vision_config': {'window_size': 16, 'fullatt_block_indexes': [1]}},
    ),
    'qwen3_vl': (
        'Qwen3VLForConditionalGeneration',
        {
            'text_config': {'rope_scaling': {'rope_type': 'default', 'mrope_section': [1, 2, 2]}},
            'vision_config': {'num_position_embeddings': 16, 'deepstack_visual_indexes': [0]},
        },
    ),
    'paligemma': ('PaliGemmaForConditionalGeneration', _PALIGEMMA),
    'colpali': ('ColPaliForRetrieval', {'vlm_config': {**_PALIGEMMA, 'model_type': 'paligemma'}, 'embedding_dim': 21}),
    'internvl': ('InternVLForConditionalGeneration', {'vision_config': {'image_size': [8, 8]}}),
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
            'vocabulary_map': {f'<|visual token {i:06d}|>': 20 + i for i in range(20)} | {'<image>': 130},
        },
    ),
    'mllama': (
        'MllamaForConditionalGeneration',
        {
            'text_config': {
                'num_hidden_layers': 3,
                'cross_attention_layers': [1],
                'rope_scaling': {'rope_type': 'default'},
            },
            'vision_config': {
                'hidden_size': 40,
                'attention_heads': 4,
                'num_global_layers': 1,
                'vision_output_dim': 120,
                'intermediate_layers_indices': [0, 1],
                'max_num_tiles': 2,
                'supported_aspect_ratios': [[1, 1], [1, 2]],
            },
        },
    ),
    'idefics3': ('Idefics3ForConditionalGeneration', {'text_config': ODD}),
    'blip_2': (
        'Blip2ForConditionalGeneration',
        {
            'qformer_config': ODD_ENCODER,
            'text_config': {'model_type': 'opt', 'word_embed_proj_dim': 40},
            'num_query_tokens': 3,
        },
    ),
    'gemma3_untied': ('Gemma3ForConditionalGeneration', {**_GEMMA3, **_UNTIED, 'text_config': {**ODD, **_UNTIED}}),
}

MODELS: Models = {
    **zoo.MODELS,
    **_TEXT_DECODERS,
    **_EXPERTS,
    **_ENCODERS,
    **_WITH_RATES,
    **_VISION_LANGUAGE,
}
