"""One process is the owner of everything: nothing travels, and each writer that sends writes what is there."""

from __future__ import annotations

import pytest

from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.runs.engines import save_folder


@pytest.mark.parametrize('in_background', [False, True])
@pytest.mark.parametrize('writer', ['stream', 'parallel', 'gather'])
def test_one_process_saves(tmp_path, writer, in_background):
    model = odd_llama(bf16=True)
    model.save_pretrained(tmp_path / 'expected')
    plan, committed = save_folder(
        model, tmp_path / 'hf_model', writer=writer, in_background=in_background, bucket_size=4000
    )
    assert bool(plan.rounds) == (writer != 'gather') and bool(plan.buckets) == (writer == 'gather')
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)
