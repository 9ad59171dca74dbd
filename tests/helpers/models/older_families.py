"""A program of transformers 4 that saves base models of families whose configs transformers 5 changes, and reads saves.

    python tests/helpers/models/older_families.py make|read ROOT

ROOT has a folder for each family, with the folders base and, made by transformers 5, save and, for some, built: saves
of the base and of a model that was built from its config.
"""

import json
import sys
from pathlib import Path

_HYBRID = {
    'num_local_experts': 4,
    'num_experts_per_tok': 2,
    'shared_intermediate_size': 16,
    'hidden_size': 32,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'mamba_n_heads': 8,
    'mamba_d_head': 8,
    'mamba_d_state': 8,
    'layer_types': ['mamba', 'attention'],
    'position_embedding_type': 'rope',
}


def make(root: Path) -> None:
    from tests.helpers.models.families import MODELS
    from tests.helpers.models.zoo import build

    hybrid = {'granitemoehybrid': ('GraniteMoeHybridForCausalLM', _HYBRID)}
    for family in ('qwen3_moe', 'mllama', 'idefics3', 'llama', 'granitemoehybrid'):
        build(family, models={**MODELS, **hybrid}).save_pretrained(root / family / 'base')


def read(root: Path) -> None:
    import torch
    import transformers

    for folder in sorted(root.iterdir()):
        fields = json.loads((folder / 'base' / 'config.json').read_text())
        kind = getattr(transformers, fields['architectures'][0])
        base = kind.from_pretrained(folder / 'base')
        model, report = kind.from_pretrained(folder / 'save', output_loading_info=True)
        assert not any(report.values()), (folder.name, report)
        expected, found = (_flat(json.loads(one.config.to_json_string(use_diff=False))) for one in (base, model))
        differing = {name: (value, found.get(name)) for name, value in expected.items() if found.get(name) != value}
        assert not differing, (folder.name, differing)
        models = [model, *(kind.from_pretrained(built) for built in folder.glob('built'))]
        for state in (one.state_dict() for one in models):
            assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items()), folder.name
        ids = torch.arange(3, 13)[None]
        logits = [one.eval()(input_ids=ids).logits for one in (base, *models)]
        assert all(torch.equal(one, logits[0]) for one in logits), folder.name


def _flat(fields: dict, above: str = '') -> dict:
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found.update(_flat(value, f'{above}{name}.'))
        elif name not in ('_name_or_path', 'transformers_version'):
            found[above + name] = value
    return found


if __name__ == '__main__':
    {'make': make, 'read': read}[sys.argv[1]](Path(sys.argv[2]))
