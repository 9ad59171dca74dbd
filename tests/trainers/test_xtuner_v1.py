"""Models of XTuner V1, from its source: what its own Trainer saves with our hook is what its own save_hf writes.

V1 is on no package index: ``XTUNER_V1=FOLDER bash tools/test.sh --trainers xtuner_v1``, with the folder of a clone of
https://github.com/InternLM/xtuner.
"""

from __future__ import annotations

import pytest
import transformers
from safetensors.torch import load_file

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import (
    assert_loads_clean,
    assert_same_folder_tensors,
    assert_same_tensors,
    folder_tensors,
)
from tests.helpers.models.model_folder import save_model
from tests.helpers.ranks.launch import run_program
from tests.trainers.compare import run

CLASSES = {'dense': 'Qwen3ForCausalLM', 'tied': 'Qwen3ForCausalLM', 'moe': 'Qwen3MoeForCausalLM'}
CLASSES['ep'] = CLASSES['moe']
#: xhf-convert on a CPU.
CONVERT = """
import sys
from tests.trainers import xtuner_v1_cpu
from xhf_hooks.offline.commands.convert import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize('model', CLASSES)
def test_saves_are_those_of_v1(tmp_path, model):
    out = tmp_path / 'out'
    said = run('xtuner_v1_run.py', model, out, save_model('llama', tmp_path / 'base'))
    work_dirs = sorted(path.name for path in out.iterdir())
    foreground = ['positional_False', 'stream_False']
    assert work_dirs in (foreground, sorted([*foreground, 'positional_True', 'stream_True']))  # the first for V1.0.1
    for work_dir in (out / name for name in work_dirs):
        exp_dir, theirs = work_dir / '20261128', work_dir / 'theirs'
        assert sorted(path.name for path in exp_dir.iterdir()) == ['hf-4', 'hf-5', 'hf-latest']
        newest = exp_dir / 'hf-5'
        assert (exp_dir / 'hf-latest').resolve() == newest.resolve()
        assert [assert_whole(exp_dir / name) for name in ('hf-4', 'hf-5')] == [4, 5]
        # V1 writes no total_size into its index, and one file per rank
        expected = {name: one for file in theirs.glob('*.safetensors') for name, one in load_file(file).items()}
        assert_same_tensors(folder_tensors(newest), expected)
        assert (newest / 'config.json').read_bytes() == (theirs / 'config.json').read_bytes()
        assert (newest / 'tokenizer.json').is_file()
        assert_loads_clean(newest, getattr(transformers, CLASSES[model]))
    newest, weights = out / 'stream_False' / '20261128' / 'hf-5', tmp_path / 'ckpt-step-5' / 'weights'
    (converted,) = run_program(CONVERT, weights, tmp_path / 'converted', '--base', newest, '--dtype', 'bfloat16')
    assert converted.returncode == 0, converted.stderr
    assert_same_folder_tensors(tmp_path / 'converted', newest)
    if model in ('moe', 'ep'):  # whose config.json is V1's, too
        assert (tmp_path / 'converted' / 'config.json').read_bytes() == (newest / 'config.json').read_bytes()
    for line in ('positional writer', 'stream writer', 'every 2 steps and at the end', 'saved iter_5 to hf-5'):
        assert line in said, said
