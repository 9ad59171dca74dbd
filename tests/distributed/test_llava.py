"""LLaVA under DeepSpeed: both layouts are those of the whole model, whatever holds its weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.models.zoo.llava import TinyLlava, save_bases
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import names_read, save_folder, zero_engine

#: Options of the model, and the folders that its trained parts have in XTuner's layout.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    'pretrain': (dict(frozen=('llm', 'visual_encoder')), {'projector'}),
    'full': ({}, {'.', 'visual_encoder', 'projector'}),
    'lora': (
        dict(lora={'llm': dict(target_modules='all-linear'), 'visual_encoder': dict(target_modules=['q_proj'])}),
        {'llm_adapter', 'visual_encoder_adapter', 'projector'},
    ),
}
#: Name to the options of a save.
SAVES: dict[str, dict[str, str]] = {'xtuner': {}, 'huggingface': dict(llava_format='huggingface', writer='positional')}


def save_case(name: str, root: Path) -> dict[str, set[str]]:
    """Save a model whole, and partitioned: the names that each save of that has read. Runs on: all ranks."""
    model = TinyLlava(root, dtype=torch.bfloat16, **MODELS[name][0])
    for how, options in SAVES.items():
        save_folder(model, root / name / f'whole_{how}', **options)
    engine = zero_engine(model, stage=3)
    read = {}
    for how, options in SAVES.items():
        plan, _ = save_folder(engine.module, root / name / how, **options)
        read[how] = names_read(plan)
    engine.destroy()
    return read


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('llava')
    save_bases(root)
    scenarios = {name: partial(save_case, name, root) for name in MODELS}
    return run_scenarios(scenarios, 2, root=root)


@pytest.mark.parametrize('how', SAVES)
@pytest.mark.parametrize('name', MODELS)
def test_the_layout_is_that_of_the_whole_model(saved, name, how):
    """Which tests/unit/exporters/test_llava_exporter.py and XTuner's own conversion judge."""
    check(saved, name)
    found, whole = saved.root / name / how, saved.root / name / f'whole_{how}'
    expected = MODELS[name][1] if how == 'xtuner' else {'.'}
    assert {str(file.parent.relative_to(found)) for file in found.rglob('*.safetensors')} == expected
    for part in expected:
        assert_same_folder_tensors(found / part, whole / part)
    if how == 'huggingface':
        assert_loads_clean(found, LlavaForConditionalGeneration)


def test_only_what_is_written_is_read(saved):
    pretrain, lora = (check(saved, name)[0]['xtuner'] for name in ('pretrain', 'lora'))
    assert pretrain and all(n.startswith('projector.') for n in pretrain)
    assert lora and all('lora_' in n or n.startswith('projector.') for n in lora)
