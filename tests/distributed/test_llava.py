"""LLaVA under DeepSpeed: both layouts are those of the whole model, whatever holds its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.models.adapted import assert_rounded_once
from tests.helpers.models.zoo.llava import TinyLlava, save_bases
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import names_read, save_folder, zero_engine

#: Options of the model, and the trained parts besides the projector to the folders that they have in XTuner's layout.
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    'pretrain': (dict(frozen=('llm', 'visual_encoder')), {}),
    'full': ({}, {'llm': '.', 'visual_encoder': 'visual_encoder'}),
    'lora': (
        dict(lora={'llm': dict(target_modules='all-linear'), 'visual_encoder': dict(target_modules=['q_proj'])}),
        {'llm': 'llm_adapter', 'visual_encoder': 'visual_encoder_adapter'},
    ),
}
#: Name to the options of a save.
SAVES: dict[str, dict[str, str]] = {'xtuner': {}, 'huggingface': dict(llava_format='huggingface', writer='positional')}


def save_case(name: str, root: Path) -> dict[str, set[str]]:
    """Saves the partitioned model, and on rank 0 what it is to be compared with. Runs on: all ranks.

    Returns:
        The names that each save read.
    """
    import torch
    import torch.distributed as dist

    def build() -> TinyLlava:
        return TinyLlava(root, dtype=torch.bfloat16, **MODELS[name][0])

    folder = root / name
    if dist.get_rank() == 0:
        for part in ('llm', 'visual_encoder', 'projector'):
            getattr(build(), part).save_pretrained(folder / 'parts' / part)
        exact = build().double()
        for part in MODELS[name][0].get('lora', {}):
            setattr(exact, part, getattr(exact, part).merge_and_unload())
        save_folder_alone(exact, folder / 'exact')
    dist.barrier()
    engine = zero_engine(build(), stage=3)
    read = {}
    for how, options in SAVES.items():
        plan, _ = save_folder(engine.module, folder / how, **options)
        read[how] = names_read(plan)
    engine.destroy()
    return read


def save_folder_alone(model: Any, folder: Path) -> None:
    """Transformers' layout of a whole model, by the exporter, without ranks. Runs on: rank 0."""
    from safetensors.torch import save_file

    from xhf_hooks.exporters import exporter_for
    from xhf_hooks.sources import source_for

    specs = source_for(model).specs()
    tensors = dict(model.state_dict())
    made = {}
    for entry in exporter_for(model, None, llava_format='huggingface').entries(specs, None):
        read = {name: tensors[name] for name in entry.reads}
        whole = read[entry.reads[0]] if entry.combine is None else entry.combine(read)[entry.hf_name]
        made[entry.hf_name] = whole.to(tensors[entry.reads[0]].dtype).contiguous()
    folder.mkdir(parents=True)
    save_file(made, folder / 'model.safetensors', metadata={'format': 'pt'})


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('llava')
    save_bases(root)
    scenarios = {name: partial(save_case, name, root) for name in MODELS}
    return root, run_scenarios(scenarios, 2)


@pytest.mark.parametrize('name', MODELS)
def test_xtuners_layout_has_what_save_pretrained_writes(saved, name):
    root, results = saved
    check(results, name)
    trained = {**MODELS[name][1], 'projector': 'projector'}
    folder = root / name / 'xtuner'
    assert {str(file.parent.relative_to(folder)) for file in folder.rglob('*.safetensors')} == set(trained.values())
    for part, at in trained.items():
        assert_same_folder_tensors(root / name / 'parts' / part, folder / at)


@pytest.mark.parametrize('name', MODELS)
def test_one_model_is_that_of_the_whole_model(saved, name):
    from transformers import LlavaForConditionalGeneration

    root, results = saved
    check(results, name)
    folder = root / name / 'huggingface'
    assert_rounded_once(folder_tensors(folder), folder_tensors(root / name / 'exact'))
    assert_loads_clean(folder, LlavaForConditionalGeneration)


def test_only_what_is_written_is_read(saved):
    _, results = saved
    pretrain, lora = (check(results, name)[0]['xtuner'] for name in ('pretrain', 'lora'))
    assert pretrain and all(n.startswith('projector.') for n in pretrain)
    assert lora and all('lora_' in n or n.startswith('projector.') for n in lora)
