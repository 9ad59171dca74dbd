"""RoPE in config.json, in words of transformers 4.

transformers 5 writes RoPE as ``rope_parameters``. transformers 4 ignores that, and computes with its default without a
word. So config.json gets the older names, too, if the installed class proves them: it must read the same RoPE from them
alone, and the same config from the file with them as without them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.format import strict_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ROPE = 'rope_parameters'
#: Types that transformers 4 computes (``ROPE_INIT_FUNCTIONS`` in ``modeling_rope_utils.py`` of 4.57). Others are
#: transformers 5's names for what is fixed in an older class.
_SCALINGS = ('linear', 'dynamic', 'yarn', 'longrope', 'llama3')
_SECTIONS = ('mrope', 'default')  # Qwen2-VL: its older and its present name
_FIELDS_BESIDE = ('rope_theta', 'partial_rotary_factor')


def add_older_rope(folder: Path, config: PretrainedConfig) -> list[str]:
    """Add RoPE in the words of transformers 4 to the config.json that ``config`` was saved to, and return warnings."""
    path = folder / 'config.json'
    content = strict_json.read(path)
    with_rope = [found for found in _parts('', config, content) if isinstance(found[2].get(_ROPE), dict)]
    warnings = []
    for name, part, fields in with_rope:
        older = next((found for found in _descriptions(part, fields) if _is_proven(part, fields, found)), None)
        is_of_a_part = any(other.startswith(name) and other != name for other, _, _ in with_rope)
        if older is None and not is_of_a_part:  # transformers 4.57 wrote that of Qwen2-VL's text_config outside, too
            warnings.append(
                f'config.json: transformers 4 ignores {name}{_ROPE}, and has no field for this RoPE of '
                f'{type(part).__name__}: with transformers 4, the model computes other values'
            )
        fields.update({field: value for field, value in (older or {}).items() if field not in fields})
    if with_rope:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n', encoding='utf-8')  # as transformers does
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
    try:
        expected = _as_read(config, fields)
        alone = _as_read(config, {name: value for name, value in both.items() if name != _ROPE})
        return _as_read(config, both) == expected and alone[_ROPE] == expected[_ROPE]
    except Exception:  # classes may be custom code, and refuse with any error
        return False


def _as_read(config: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The config that ``from_pretrained`` reads from them. It also decodes infinite numbers, which JSON lacks."""
    with tempfile.TemporaryDirectory(prefix='xhf_hooks_') as folder:
        Path(folder, 'config.json').write_text(json.dumps(fields), encoding='utf-8')
        read = type(config).from_pretrained(folder).to_dict()
    return {name: value for name, value in read.items() if name != '_name_or_path'}
