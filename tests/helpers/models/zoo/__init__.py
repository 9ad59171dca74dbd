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
    from transformers import PretrainedConfig, PreTrainedModel

NOISE_STD = 0.05

SPECIAL_TOKENS = {'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2}
#: Small values of the fields that families have in common.
SMALL: dict[str, Any] = {
    'vocab_size': 131,
    **dict.fromkeys(('hidden_size', 'out_hidden_size', 'd_model', 'n_embd'), 40),
    **dict.fromkeys(('intermediate_size', 'ffn_hidden_size', 'ffn_dim', 'd_ff', 'n_inner'), 77),
    **dict.fromkeys(('encoder_ffn_dim', 'decoder_ffn_dim'), 77),
    **dict.fromkeys(('num_hidden_layers', 'num_layers', 'n_layer', 'depth', 'encoder_layers', 'decoder_layers'), 2),
    **dict.fromkeys(('num_attention_heads', 'num_heads', 'n_head'), 4),
    **dict.fromkeys(('encoder_attention_heads', 'decoder_attention_heads'), 4),
    'num_key_value_heads': 2,
    'head_dim': 10,
    'max_position_embeddings': 64,
    'n_positions': 64,
    'patch_size': 4,
    'sliding_window': 16,
    'num_experts': 5,
    'num_local_experts': 5,
    'n_routed_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 56,
    'vision_start_token_id': 127,
    'vision_end_token_id': 128,
    **dict.fromkeys(('video_token_id', 'video_token_index'), 129),
    **dict.fromkeys(('image_token_id', 'image_token_index'), 130),
    **SPECIAL_TOKENS,
}
#: Those of a model that takes images of one size.
VISION_TOWER = {
    'hidden_size': 35,
    'intermediate_size': 51,
    'num_hidden_layers': 2,
    'num_attention_heads': 5,
    'image_size': 8,
    'patch_size': 4,
}
#: For families with any head size.
ODD = {'hidden_size': 35, 'num_attention_heads': 5, 'num_key_value_heads': 1, 'head_dim': 10}
ODD_ENCODER = {'hidden_size': 35, 'num_attention_heads': 5}
#: For experts in transformers 5.
ALIGNED = {'intermediate_size': 88}
MROPE = {'rope_scaling': {'type': 'mrope', 'mrope_section': [1, 2, 2]}}

# For models whose code is not in transformers, and those of which a test names each size
_LLAMAS_FIELDS = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads')
_LLAMAS_FIELDS += ('num_key_value_heads', 'max_position_embeddings', *SPECIAL_TOKENS)
DECODER = {name: SMALL[name] for name in _LLAMAS_FIELDS}
ODD_DECODER = {**DECODER, **ODD}

#: Family: model class, fields of its config that differ from :data:`SMALL`. tests/helpers/models/families.py has more.
Models = dict[str, tuple[str, dict[str, Any]]]
_GEMMA3 = {'mm_tokens_per_image': 1, 'boi_token_index': 128, 'eoi_token_index': 129}
MODELS: Models = {
    'llama': ('LlamaForCausalLM', ODD),
    'qwen2': ('Qwen2ForCausalLM', {**ODD, 'tie_word_embeddings': True}),
    'qwen3': ('Qwen3ForCausalLM', ODD),
    'qwen3_moe': ('Qwen3MoeForCausalLM', {}),
    'mixtral': ('MixtralForCausalLM', ALIGNED),
    'deepseek_v3': (
        'DeepseekV3ForCausalLM',
        {
            'num_key_value_heads': 4,
            'first_k_dense_replace': 1,  # one dense layer, then one of experts
            'n_group': 2,
            'topk_group': 1,
            'q_lora_rank': 21,
            'kv_lora_rank': 17,
            'qk_rope_head_dim': 8,
            'qk_nope_head_dim': 10,
            'v_head_dim': 10,
            'head_dim': 8,
        },
    ),
    'gpt2': ('GPT2LMHeadModel', {'n_embd': 35, 'n_head': 5}),
    'gpt_neox': ('GPTNeoXForCausalLM', {}),
    'gemma2': ('Gemma2ForCausalLM', ODD),
    'gemma3': ('Gemma3ForConditionalGeneration', {'text_config': ODD, **_GEMMA3}),
    'gemma3_text': ('Gemma3ForCausalLM', ODD),
    'phi3': ('Phi3ForCausalLM', {}),
    'olmo2': ('Olmo2ForCausalLM', {}),
    'mamba': ('MambaForCausalLM', {'hidden_size': 35, 'intermediate_size': 70, 'state_size': 7}),
    'bert': ('BertForMaskedLM', ODD_ENCODER),
    't5': ('T5ForConditionalGeneration', {'d_model': 35, 'd_kv': 7, 'num_heads': 5, 'decoder_start_token_id': 0}),
    'whisper': (
        'WhisperForConditionalGeneration',
        {'num_mel_bins': 13, 'max_source_positions': 20, 'max_target_positions': 31, 'decoder_start_token_id': 1},
    ),
    'llava': ('LlavaForConditionalGeneration', {'text_config': ODD, 'image_seq_length': 4}),
    'qwen2_vl': (
        'Qwen2VLForConditionalGeneration',
        {'text_config': MROPE, 'vision_config': {'embed_dim': 32, 'hidden_size': 40, 'mlp_ratio': 2}},
    ),
}

FAMILIES = list(MODELS)


def _all_models() -> Models:
    """With those of tests/helpers/models/families.py, which imports this module."""
    from tests.helpers.models.families import MODELS

    return MODELS


def available(family: str, models: Models | None = None) -> bool:
    """Tells whether the installed transformers has `family` (4.48.0 lacks Qwen3, for example)."""
    return (models or _all_models())[family][0] in _names()


def has_class_for(family: str, task: str) -> bool:
    """Tells whether the installed transformers has a class of `family` for a task, such as TokenClassification."""
    return _all_models()[family][0].replace('CausalLM', task) in _names()


@cache
def _names() -> frozenset[str]:
    """What transformers has; looking up a model class would import its whole module."""
    import transformers

    return frozenset(dir(transformers))


def has_head_dim() -> bool:
    """Tells whether Llama's heads may have any size; before transformers 4.45 hidden_size says it."""
    from transformers import LlamaConfig

    return 'head_dim' in inspect.signature(LlamaConfig).parameters


def small_options(config_class: type[PretrainedConfig], exceptions: dict[str, Any]) -> dict[str, Any]:
    """Options that make a config small: the fields of :data:`SMALL` that it has, also in its subconfigs.

    Args:
        exceptions: Other values. A subconfig's may have a ``model_type`` other than the default.
    """
    from transformers import CONFIG_MAPPING

    try:
        fields = vars(config_class())
    except (ValueError, KeyError, AssertionError):  # made of any two models, which exceptions name
        fields = {}
    if fields and 'text_config' not in fields:  # in transformers 4.48 they are fields of Qwen2-VL's config itself
        exceptions = {**exceptions, **exceptions.get('text_config', {})}
        exceptions.pop('text_config', None)
    is_tower = {'image_size', 'patch_size'} <= fields.keys()
    sizes = {**SMALL, **VISION_TOWER} if is_tower else SMALL
    options = {name: size for name, size in sizes.items() if name in fields} | copy.deepcopy(exceptions)
    for name in {*fields, *exceptions}:
        own = exceptions.get(name, {})
        if isinstance(own, dict) and 'model_type' in own:
            subconfig_class = CONFIG_MAPPING[own['model_type']]
        elif hasattr(fields.get(name), 'model_type'):
            subconfig_class = type(fields[name])
        else:
            continue
        options[name] = {'model_type': subconfig_class.model_type, **small_options(subconfig_class, own)}
    return fitted(options)


def fitted(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a config, in sizes that the installed code of Llama and its kin accepts."""
    if {'head_dim', 'num_attention_heads'} <= options.keys() and not has_head_dim():
        return {**options, 'hidden_size': options['head_dim'] * options['num_attention_heads']}
    return options


def small_config(model_class: str, exceptions: dict[str, Any]) -> PretrainedConfig:
    """A small config of a model class, such as ``small_config(*MODELS['llama'])``."""
    import transformers

    config_class = getattr(transformers, model_class).config_class
    return config_class(**small_options(config_class, exceptions))


def build(family: str, seed: int = 0, models: Models | None = None) -> PreTrainedModel:
    """Builds the float32 model of `family`, by default one of families.py; its weights depend on `seed` only."""
    import torch
    import transformers

    models = models or _all_models()
    model_class = getattr(transformers, models[family][0])
    config = small_config(*models[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # keep_vars keeps identities, so that tied parameters get their noise once.
        tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.data += NOISE_STD * torch.randn(tensor.shape)
    return model
