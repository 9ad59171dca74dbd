"""config.json as ``save_pretrained`` writes it, with the fields that a save adds for transformers 4."""

import json
from pathlib import Path
from typing import Any

#: Beside ``rope_parameters``, nothing else may be added.
_ADDED = frozenset(
    {
        *('rope_theta', 'rope_scaling', 'partial_rotary_factor', 'rotary_emb_base', 'rotary_pct'),
        *('rope_local_base_freq', 'global_rope_theta', 'local_rope_theta'),
        'num_experts',  # of Qwen3-MoE, beside num_local_experts
    }
)


def config_fields(folder: Path, like: Path | None = None) -> dict[str, Any]:
    """The fields of the folder's config.json, in order.

    Args:
        like: A folder of ``save_pretrained``; what a save may add to its config.json is left out.
    """
    fields = json.loads((folder / 'config.json').read_text())
    return fields if like is None else _without_added(fields, json.loads((like / 'config.json').read_text()))


def dtype_in(folder: Path) -> str | None:
    """What config.json says, under the name of transformers since 4.56 or before."""
    fields = config_fields(folder)
    return fields.get('dtype', fields.get('torch_dtype'))


def assert_same_config(found: Path, expected: Path, **other: Any) -> None:
    """Assert that config.json has the fields and the form of ``save_pretrained``'s, but for the added ones.

    Args:
        other: Fields with other values than in ``expected``.
    """
    wanted = {**config_fields(expected), **other}
    fields = config_fields(found, expected)
    assert fields == wanted
    fields = config_fields(found)
    assert (found / 'config.json').read_text() == json.dumps(fields, indent=2, sort_keys=True) + '\n'


def _without_added(fields: dict[str, Any], expected: Any) -> dict[str, Any]:
    expected = expected if isinstance(expected, dict) else {}
    added = _ADDED - expected.keys() if isinstance(expected.get('rope_parameters'), dict) else ()
    return {
        name: _without_added(value, expected.get(name)) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in added
    }
