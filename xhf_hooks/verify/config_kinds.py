"""JSON types of the fields in config.json and generation_config.json that are the same for every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNT, _TEXT, _FLAG, _OBJECT, _LIST = 'a whole number', 'a string', 'true or false', 'an object', 'a list'
_TEXTS, _LABELS, _NAMES = 'a list of strings', 'an object of numbers', 'an object of names'

#: Every field may be null, except those in :data:`_NEVER_NULL`.
_KINDS: Mapping[str, tuple[str, ...]] = {
    'model_type': (_TEXT,),
    'architectures': (_TEXTS,),
    'auto_map': (_NAMES,),
    'transformers_version': (_TEXT,),
    'torch_dtype': (_TEXT, _OBJECT),
    'dtype': (_TEXT, _OBJECT),
    'tie_word_embeddings': (_FLAG,),
    'is_encoder_decoder': (_FLAG,),
    'use_cache': (_FLAG,),
    'id2label': (_OBJECT,),
    'label2id': (_LABELS,),
    'quantization_config': (_OBJECT,),
    'rope_scaling': (_OBJECT,),
    'rope_parameters': (_OBJECT,),
    'text_config': (_OBJECT,),
    'vision_config': (_OBJECT,),
    'audio_config': (_OBJECT,),
    'vocab_size': (_COUNT,),
    'hidden_size': (_COUNT, _LIST),
    'num_hidden_layers': (_COUNT, _LIST, _OBJECT),
    'num_attention_heads': (_COUNT, _LIST),
}
_NEVER_NULL = frozenset({'model_type'})
_DEEPEST = 20


def wrong_kinds(config: Mapping[str, Any], path: str = '', depth: int = 0) -> list[str]:
    """One message for each field of the wrong JSON type; nested ``*_config`` objects are checked, too."""
    wrong = []
    for name, value in config.items():
        kinds = _KINDS.get(name, (_COUNT, _LIST) if name.endswith('_token_id') else ())
        if kinds and not (value is None and name not in _NEVER_NULL) and not any(_is(value, kind) for kind in kinds):
            wrong.append(f'{path}{name} is {str(value)[:40]!r}, expected {" or ".join(kinds)}')
        if name.endswith('_config') and isinstance(value, dict) and depth < _DEEPEST:
            wrong += wrong_kinds(value, f'{path}{name}.', depth + 1)
    return wrong


def _is(value: Any, kind: str) -> bool:
    if kind == _COUNT:
        return type(value) is int
    if kind == _TEXTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == _LABELS:
        return isinstance(value, dict) and all(type(item) in (int, str) for item in value.values())
    if kind == _NAMES:
        return isinstance(value, dict) and all(isinstance(item, (str, list, type(None))) for item in value.values())
    return isinstance(value, {_TEXT: str, _FLAG: bool, _OBJECT: dict, _LIST: list}[kind])
