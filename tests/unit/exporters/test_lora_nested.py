"""A model with adapters on some of its parts goes out merged and whole, as InternVL's must."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
from transformers import AutoModel, PreTrainedModel

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.models.adapted import adapt, around
from tests.helpers.models.remote_code import use_modules_cache
from tests.helpers.models.zoo.internvl import CODE, load_internvl
from tests.helpers.runs.engines import save_folder
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import HuggingFaceExporter, NestedLoraExporter, exporter_for

ADAPTED = {
    'llm': dict(language_model=dict(target_modules='all-linear')),
    'both': dict(
        language_model=dict(target_modules=['q_proj'], modules_to_save=['lm_head'], use_dora=True),
        vision_model=dict(target_modules=['q_proj', 'patch_embedding'], task_type=None),
    ),
}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Transformers' copies of the code go to tmp_path, too."""
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    return tmp_path / 'internvl'


def with_adapters(base: Path, kind: str | None) -> PreTrainedModel:
    model = load_internvl(base)
    for name, lora in ADAPTED.get(kind, {}).items():
        setattr(model, name, adapt(getattr(model, name), **lora))
    return model


def merged_by_peft(model: PreTrainedModel, folder: Path) -> None:
    """As XTuner's convert_to_official.py does it."""
    merged = copy.deepcopy(model)
    for name in ('vision_model', 'language_model'):
        if hasattr(getattr(merged, name), 'merge_and_unload'):
            setattr(merged, name, getattr(merged, name).merge_and_unload())
    merged.save_pretrained(folder)


@pytest.mark.parametrize('kind', [None, *ADAPTED])
def test_whole_model_as_xtuner_converts_it(kind, base, tmp_path):
    model = with_adapters(base, kind)
    merged_by_peft(model, tmp_path / 'expected')
    wrapped = around(model=model)
    assert type(exporter_for(wrapped, None)) is (HuggingFaceExporter if kind is None else NestedLoraExporter)
    _, committed = save_folder(wrapped, tmp_path / 'hf_model')
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)
    assert not any('lora_' in name or 'base_model' in name for name in folder_tensors(committed.path))
    assert set(CODE) <= {path.name for path in committed.path.iterdir()}

    shutil.rmtree(base)  # the new folder must be enough
    loaded, report = AutoModel.from_pretrained(committed.path, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values())
    assert type(loaded).__name__ == 'TinyInternVLModel'


def test_merge_is_all_that_there_is(base):
    model = around(model=with_adapters(base, 'both'))
    assert type(exporter_for(model, None, lora='merge')) is NestedLoraExporter
    for lora in ('adapter', 'both'):
        with pytest.raises(OptionError, match=r"None or 'merge', because TinyInternVLModel has adapters on") as caught:
            exporter_for(model, None, lora=lora)
        assert caught.value.option == 'lora'


def test_quantized_is_refused(base):
    model = around(model=with_adapters(base, 'llm'))
    model.model.quantization_method = 'bitsandbytes'
    with pytest.raises(ModelError, match=r'quantized \(bitsandbytes\).* set quantization_llm'):
        exporter_for(model, None)
