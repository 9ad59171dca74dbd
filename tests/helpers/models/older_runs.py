"""A program that saves bases and finished runs with transformers 4: what they hold is named as it was there in memory.

    python tests/helpers/models/older_runs.py OUT FAMILY...

Of each family: ``OUT/FAMILY/base``, ``iter_2.pth`` with the state dict of a model that was trained from it, and
``trained`` with what ``save_pretrained`` writes of that model. Families that this transformers lacks are left out.
Of some, also runs with LoRA: ``OUT/FAMILY_lora/run`` with the state dict and what peft writes, and ``merged``.
"""

import sys
from pathlib import Path

from tests.helpers.models.families import MODELS


def train(family: str, folder: Path) -> None:
    import torch

    from tests.helpers.models.model_folder import save_tokenizer
    from tests.helpers.models.zoo import build

    built = build(family)
    built.save_pretrained(folder / 'base')
    save_tokenizer(folder / 'base', 131)
    model = type(built).from_pretrained(folder / 'base')
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    torch.save({'state_dict': model.state_dict()}, folder / 'iter_2.pth')
    model.save_pretrained(folder / 'trained')


def train_adapter(family: str, folder: Path) -> None:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    base = folder.with_name(family) / 'base'
    kind = getattr(transformers, MODELS[family][0])
    lora = LoraConfig(r=3, lora_alpha=5, target_modules=['q_proj'], task_type='CAUSAL_LM')
    model = get_peft_model(kind.from_pretrained(base), lora)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if 'lora_' in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(folder / 'run')
    torch.save({'state_dict': model.state_dict()}, folder / 'run' / 'iter_2.pth')
    model.merge_and_unload().save_pretrained(folder / 'merged')


if __name__ == '__main__':
    from tests.helpers.models.zoo import available

    for name in sys.argv[2:] or MODELS:
        if available(name):
            train(name, Path(sys.argv[1]) / name)
            if name in ('mixtral', 'qwen2_moe', 'llava'):
                train_adapter(name, Path(sys.argv[1]) / f'{name}_lora')
