"""A real run of XTuner's InternVL, with code that cannot be built on the meta device as it is."""

from __future__ import annotations

import pytest

from tests.e2e.xtuner_stack.launches import FIRST, INTERNVL, LAST, export_of, log_of, saves_in
from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.models.remote_code import use_modules_cache


@pytest.fixture
def work_dir(runs, tmp_path, monkeypatch):
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    monkeypatch.chdir(runs.root)
    return runs.work_dir(INTERNVL)


def test_what_was_trained_is_saved_and_loads(runs, work_dir):
    from transformers import AutoModel

    assert saves_in(log_of(work_dir)) == [f'iter_{FIRST}', f'iter_{LAST}']
    base, found = folder_tensors(runs.root / 'internvl'), folder_tensors(export_of(work_dir))
    assert found.keys() == base.keys()
    moved = {name for name, tensor in found.items() if not tensor.equal(base[name])}
    assert moved == {name for name in base if not name.startswith('vision_model.')}  # which the config freezes
    model, report = AutoModel.from_pretrained(export_of(work_dir), trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    assert len(model.vision_model.dpr) == model.config.vision_config.num_hidden_layers


def test_a_converted_checkpoint_is_the_hooks_export(work_dir, tmp_path):
    options = ['--base', 'internvl', '--trust-remote-code']
    assert_same_files(convert(work_dir, tmp_path / 'converted', *options), export_of(work_dir))
