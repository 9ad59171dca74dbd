"""What readers with transformers 4, vLLM and llama.cpp need of a save made with transformers 5: one step, which ends.

transformers 5 saves other fields and fewer files than transformers 4 reads, and RoPE as ``rope_parameters``, which 4
ignores without a word. So the base's files get what changed, in older words, and config.json the base's fields and the
older names of RoPE, too: where the installed transformers proves that they mean the same.

It ends when this package requires transformers 5 (``LEAST`` in system/versions.py; tests/unit/test_layering.py says so
then): delete this module, exporters/older_tensors.py, ``hf_assets.for_older_readers``, what they call in
compat/transformers.py, and their tests. :mod:`.write_tokenizer` then writes what a tokenizer or processor saves, and
``hf_assets.write_config`` only saves the config.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.compat.transformers import converts_weights, older_layer_types, tell_unread
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.exporters.assets.load_tokenizer import vocabulary_files
from xhf_hooks.format import strict_json
from xhf_hooks.format.loaded_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_JSON

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Content by name.
Files = dict[str, bytes]

_EXTRA = 'extra_special_tokens'
_ADDITIONAL = 'additional_special_tokens'
_DECODER = 'added_tokens_decoder'
#: The file that transformers 5 writes of a processor, and the parts in it of which transformers 4 reads other files.
_PROCESSOR = 'processor_config.json'
_PARTS = {
    'preprocessor_config.json': ('image_processor', 'feature_extractor'),
    'video_preprocessor_config.json': ('video_processor',),
}

_ROPE = 'rope_parameters'
#: Types that transformers 4 computes (``ROPE_INIT_FUNCTIONS`` in ``modeling_rope_utils.py`` of 4.57). Others are
#: transformers 5's names for what is fixed in an older class.
_SCALINGS = ('linear', 'dynamic', 'yarn', 'longrope', 'llama3')
_SECTIONS = ('mrope', 'default')  # Qwen2-VL: its older and its present name
#: Fields of a base that say where it comes from, and those that a save writes with values of its own.
_NOT_KEPT = {'_name_or_path', '_commit_hash', 'transformers_version', 'architectures', 'auto_map', 'use_cache'}
#: Kinds of layers that have a RoPE of their own.
_KINDS = ('full_attention', 'sliding_attention')
_FIELDS_BESIDE = ('rope_theta', 'partial_rotary_factor')
#: Fields of RoPE in transformers 4.
_ROPE_WORDS = {
    *_FIELDS_BESIDE,
    'rope_scaling',
    'rope_local_base_freq',
    'global_rope_theta',
    'local_rope_theta',
    'rotary_emb_base',
    'rotary_pct',
}


def older_tokenizer_files(
    tokenizer: Any, saved: Files, base_saved: Files | None, base_model: LocatedBase
) -> tuple[list[Files], list[str]]:
    """Forms in which transformers 4 may read a changed tokenizer, the best one first; and warnings if none is proven.

    Args:
        saved: The files that the tokenizer itself saves.
        base_saved: Those that the base's tokenizer saves; None if there is none.
    """
    if not converts_weights():  # transformers 4 writes what it reads
        return [], []
    forms = [] if base_saved is None else [_in_words_of_base(tokenizer, saved, base_saved, base_model)]
    needed = json.loads(saved[TOKENIZER_CONFIG]).get('tokenizer_class')
    warning = f'transformers 4 may not read the tokenizer: it needs the class {needed}'
    return [*forms, _in_words_of_base(tokenizer, saved, {}, LocatedBase())], [warning]


def _in_words_of_base(tokenizer: Any, saved: Files, base_saved: Files, base_model: LocatedBase) -> Files:
    """The base's tokenizer_config.json with the fields that changed, and its vocabulary if that did not change.

    Without a base, what the tokenizer saves, in words of transformers 4.
    """
    base = json.loads(base_model.read_files((TOKENIZER_CONFIG,)).get(TOKENIZER_CONFIG, b'{}'))
    now, before = json.loads(saved[TOKENIZER_CONFIG]), json.loads(base_saved.get(TOKENIZER_CONFIG, b'{}'))
    kept = {name: value for name, value in base.items() if name in now or name not in before}
    changed = _changed(now, before)
    special = {name: now[name] for name in tokenizer.special_tokens_map if name in now and name not in base}
    if any(name not in now and name in before for name in (_EXTRA, _ADDITIONAL)):  # all were removed
        kept = without(kept, _EXTRA, _ADDITIONAL)
    if _EXTRA in changed:
        kept = without(kept, _ADDITIONAL)
    if _json_part(saved, 'post_processor') != _json_part(base_saved, 'post_processor'):
        for name in ('add_bos_token', 'add_eos_token'):  # transformers 5 does not save them, 4 builds with them
            if name in base:
                kept[name] = getattr(tokenizer, name, base[name])
    if _DECODER in base:
        tokens = tokenizer.added_tokens_decoder.items()
        kept[_DECODER] = {str(token_id): token.__getstate__() for token_id, token in tokens}
    result = without({**kept, **special, **changed}, 'chat_template') | _template(tokenizer, base, base_model)
    if result.get('tokenizer_class') == 'TokenizersBackend':  # its name since transformers 5
        result['tokenizer_class'] = 'PreTrainedTokenizerFast'
    if isinstance(result.get(_EXTRA), list):  # transformers 4 expects a dict, of names
        result[_ADDITIONAL] = result.pop(_EXTRA)
    form = {**saved, TOKENIZER_CONFIG: _json_bytes(result)}
    if _json_part(saved, 'model') == _json_part(base_saved, 'model'):
        form = {**base_model.read_files(vocabulary_files(tokenizer)), **form}
    return form


def _template(tokenizer: Any, beside: Mapping[str, Any], base_model: LocatedBase) -> dict[str, Any]:
    """The field ``chat_template``, unless the base has the template only in a file of its own."""
    template = tokenizer.chat_template
    if not template or ('chat_template' not in beside and base_model.has_file(CHAT_TEMPLATE)):
        return {}
    several = isinstance(template, dict)
    return {'chat_template': [{'name': n, 'template': t} for n, t in template.items()] if several else template}


def with_older_processor_files(files: Files, before: Files, base_model: LocatedBase) -> Files:
    """The files of a processor, with its parts in files of their own where its base has these, as transformers 4 has.

    They are the base's with the fields that changed. transformers 4.48 cannot read them in processor_config.json.

    Args:
        before: The files that the base's processor saves; fields that they lack count as changed.
    """
    now, then = (json.loads(each.get(_PROCESSOR, b'{}')) for each in (files, before))
    older = {}
    for name, parts in _PARTS.items():
        part = next((part for part in parts if part in now), None)
        found = base_model.read_files((name,)) if name not in files else {}
        if part is None or not found:
            continue
        known, fields = then.get(part, {}), now.pop(part)
        removed = [field for field in known if field not in fields]
        older[name] = _json_bytes(without(json.loads(found[name]), *removed) | _changed(fields, known))
    return {**files, **older, _PROCESSOR: _json_bytes(now)} if older else files


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The fields but those of these names."""
    return {key: value for key, value in fields.items() if key not in names}


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _json_bytes(fields: Mapping[str, Any]) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + '\n').encode()


def _json_part(saved: Files, name: str) -> Any:
    """A part of tokenizer.json; None if there is no such file."""
    return json.loads(saved[TOKENIZER_JSON]).get(name) if TOKENIZER_JSON in saved else None


def with_older_fields(
    saved: bytes, config: PretrainedConfig, base_model: LocatedBase | None = None
) -> tuple[bytes, list[str]]:
    """Add what transformers 4 reads to a config.json, and return it with warnings.

    Fields that the installed class reads and writes under another key, or with another value, are kept as the base has
    them. RoPE gets the words of transformers 4 where the base has none.

    Args:
        saved: What ``config`` itself saves.
    """
    if not converts_weights():  # transformers 4 writes what it reads
        return saved, []
    content = strict_json.parse(saved, 'config.json')
    base = {} if base_model is None else base_model.read_json('config.json')
    if base.get('model_type') != content.get('model_type'):
        base = {}
    for name, part, fields in [*_parts('', config, content)]:
        fields.update(_read_alike(part, fields, _fields_below(name, base)))
        _name_experts(part, fields)
        _name_layers(part, fields)
    kind = str(content.get('model_type'))
    warnings = _add_older_rope(config, content, base)
    warnings += [
        f'transformers 4 does not read this {kind} as it was trained: it {problem}. Read the save with transformers 5'
        for problem in tell_unread(kind, has_base=bool(base))
    ]
    if content != strict_json.parse(saved, 'config.json'):
        saved = (json.dumps(content, indent=2, sort_keys=True) + '\n').encode()  # as transformers does
    return saved, warnings


def _fields_below(name: str, base: Mapping[str, Any]) -> Mapping[str, Any]:
    """The base's fields of a part of a config, whose name ends with a dot; {} if it has none."""
    found: Any = base
    for key in filter(None, name.split('.')):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _read_alike(config: PretrainedConfig, fields: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The base's fields that differ, and with which the class reads the same config.

    A field that is not written at all is one of them only if the class reads it, and makes the same of it as for the
    base: else training has changed that. Those of RoPE are left to :func:`_add_older_rope`.
    """
    others = base.keys() - _NOT_KEPT - _ROPE_WORDS
    differing = sorted(key for key in others if key not in fields or fields[key] != base[key])
    if not differing:
        return {}
    expected, of_base = _as_read(config, fields), _as_read(config, base)
    if expected is None or of_base is None:
        return {}
    kept: dict[str, Any] = {}
    for key in differing:
        is_alike = _as_read(config, {**fields, **kept, key: base[key]}) == expected
        if is_alike and key not in fields:
            without_it = _as_read(config, without(base, key))
            made_of_it = [] if without_it is None else [n for n, value in of_base.items() if without_it.get(n) != value]
            is_alike = bool(made_of_it) and all(of_base[name] == expected.get(name) for name in made_of_it)
        if is_alike and not isinstance(fields.get(key), dict):
            kept[key] = base[key]
    return kept


def _name_experts(config: PretrainedConfig, fields: dict[str, Any]) -> None:
    """Add the number of experts as Qwen3-MoE and its kin called it before transformers 5, for models without a base."""
    older, now = 'num_experts', 'num_local_experts'
    is_renamed = config.model_type.startswith('qwen3') and config.attribute_map.get(older) == now
    if is_renamed and now in fields:
        fields.setdefault(older, fields[now])


def _name_layers(config: PretrainedConfig, fields: dict[str, Any]) -> None:
    """Name kinds of layers as GraniteMoeHybrid did before transformers 5, for models without a base."""
    kinds, older = fields.get('layer_types'), older_layer_types(config)
    renamed = [older.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else None
    if renamed in (None, kinds):
        return
    expected = _as_read(config, fields)
    if expected is not None and _as_read(config, {**fields, 'layer_types': renamed}) == expected:
        fields['layer_types'] = renamed


def _add_older_rope(config: PretrainedConfig, content: dict[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Add RoPE in the words of transformers 4 to the content of config.json, and return warnings.

    They are those of the base, if these still say the same.
    """
    with_rope = [found for found in _parts('', config, content) if isinstance(found[2].get(_ROPE), dict)]
    warnings = []
    for name, part, fields in with_rope:
        of_base = {key: value for key, value in _fields_below(name, base).items() if key in _ROPE_WORDS}
        descriptions = (*([of_base] if of_base else []), *_descriptions(part, fields))
        local = _local_theta(fields[_ROPE])
        has_all = (found for found in descriptions if local is None or local in found.values())
        older = next((found for found in has_all if _is_proven(part, fields, found)), None)
        is_of_a_part = any(other.startswith(name) and other != name for other, _, _ in with_rope)
        if older is None and not is_of_a_part:  # transformers 4.57 wrote that of Qwen2-VL's text_config outside, too
            warnings.append(
                f'config.json: transformers 4 ignores {name}{_ROPE}, and has no field for this RoPE of '
                f'{type(part).__name__}: with transformers 4, the model computes other values'
            )
        fields.update({field: value for field, value in (older or {}).items() if field not in fields})
    return warnings


def _parts(
    name: str, config: PretrainedConfig, fields: dict[str, Any]
) -> Iterator[tuple[str, PretrainedConfig, dict[str, Any]]]:
    """The config and its parts, each with its fields in config.json."""
    from transformers import PretrainedConfig

    yield name, config, fields
    for key, value in fields.items():
        part = vars(config).get(key)  # getattr raises where it differs between layers, as in Gemma 4
        if isinstance(value, dict) and isinstance(part, PretrainedConfig):
            yield from _parts(f'{name}{key}.', part, value)


def _descriptions(config: PretrainedConfig, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields to add, as the classes of transformers 4 name them."""
    rope = fields[_ROPE]
    if isinstance(rope.get('full_attention'), dict) and isinstance(rope.get('sliding_attention'), dict):
        full, sliding = rope['full_attention'], rope['sliding_attention']
        base, local = {'rope_theta': full.get('rope_theta')}, sliding.get('rope_theta')
        yield {**base, 'rope_local_base_freq': local, **_scaling(config, full)}  # Gemma 3
        yield {'global_rope_theta': full.get('rope_theta'), 'local_rope_theta': local}  # ModernBERT
        yield {**base, **_scaling(config, full)}  # OLMo 3
    theta, share = rope.get('rope_theta'), rope.get('partial_rotary_factor')
    yield {'rope_theta': theta, **({} if share is None else {'partial_rotary_factor': share}), **_scaling(config, rope)}
    yield {'rotary_emb_base': theta, 'rotary_pct': share, **_scaling(config, rope)}  # GPT-NeoX
    yield {'rope_theta': theta, **_scaling(config, rope)}  # the share is fixed in the class


def _local_theta(rope: Mapping[str, Any]) -> float | None:
    """Theta of layers with a window, if it is another than in the other layers."""
    full, local = (rope[name].get('rope_theta') if isinstance(rope.get(name), dict) else None for name in _KINDS)
    return None if local == full else local


def _scaling(config: PretrainedConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling``, if there is one."""
    kind, named = rope.get('rope_type', 'default'), rope.get('type')
    own = (*_FIELDS_BESIDE, 'rope_type', 'type')
    rest = {name: value for name, value in rope.items() if name not in own and not hasattr(config, name)}
    if kind == 'longrope' and named is not None:
        return {'rope_scaling': {'type': named, **rest}}  # Phi-3 knows only this name, and no further field
    if kind in _SCALINGS or (kind == 'default' and rest):
        older = {'type': named} if named == kind or (named, kind) == _SECTIONS else {}
        return {'rope_scaling': {**older, 'rope_type': kind, **rest}}
    return {}


def _is_proven(config: PretrainedConfig, fields: Mapping[str, Any], older: Mapping[str, Any]) -> bool:
    both = {**older, **fields}
    expected, alone = _as_read(config, fields), _as_read(config, without(both, _ROPE))
    if expected is None or alone is None or _ROPE not in expected:
        return False
    return _as_read(config, both) == expected and alone.get(_ROPE) == expected[_ROPE]


def _as_read(config: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config that ``from_pretrained`` reads from fields; None if its class refuses them.

    It also decodes infinite numbers, which JSON lacks.
    """
    try:
        with tempfile.TemporaryDirectory(prefix='xhf_hooks_') as folder:
            Path(folder, 'config.json').write_text(json.dumps(fields), encoding='utf-8')
            return without(type(config).from_pretrained(folder).to_dict(), '_name_or_path')
    except Exception:  # of any type, from custom code
        return None
