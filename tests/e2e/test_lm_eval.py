"""The recipe for lm_eval in docs/on-saved.md, in a run: its numbers are in the visualizer.

Only where lm_eval is installed: ``bash tools/test.sh --lm-eval``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_hook_runs import run
from tests.helpers.model_folder import save_tokenizer
from tests.helpers.ranks import REPO_ROOT
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zoo.llamas import VOCAB

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec('lm_eval') is None, reason='lm_eval: bash tools/test.sh --lm-eval'
)

TASK = """
task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def recipe(folder: Path) -> list[str]:
    """The documented command, for a task of ours."""
    page = (REPO_ROOT / 'docs' / 'on-saved.md').read_text()
    (code,) = (block for block in re.findall(r'```python\n(.*?)```', page, re.S) if 'lm_eval' in block)
    found: dict[str, Any] = {}
    exec(code, found)
    shell, option, script, *arguments = found['on_saved']
    ours = f'--tasks toy_choice --include_path {folder} --device cpu'
    assert script.count('--tasks arc_easy') == 1
    return [shell, option, script.replace('--tasks arc_easy', ours), *arguments]


def evaluated(folder: Path, work_dir: Path) -> str:
    hook = dict(on_saved=recipe(folder), interval=-1, by_epoch=False, tokenizer=str(folder / 'tokenizer'))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    with mock.patch.dict(os.environ, PATH=programs):
        return run(dict(hook=hook, stage=3, max_iters=2), work_dir)


def test_the_numbers_of_lm_eval_are_in_the_visualizer(tmp_path):
    save_tokenizer(tmp_path / 'tokenizer', VOCAB)
    asked = [dict(question=f'w{i} w{i + 1}', choices=[' w1', ' w2'], answer=i % 2) for i in range(8)]
    (tmp_path / 'data.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in asked))
    (tmp_path / 'task.yaml').write_text(TASK.format(data=tmp_path / 'data.jsonl'))
    outcomes = run_scenarios({'run': partial(evaluated, tmp_path, tmp_path / 'run')}, 2)
    log_dir = Path(check(outcomes, 'run')[0])
    output = log_dir / 'hf_model_on_saved' / 'iter_2'
    lines = [json.loads(line) for line in (log_dir / 'vis_data' / 'scalars.json').read_text().splitlines()]
    found = [line for line in lines if 'on_saved/hf_model/toy_choice/acc,none' in line]
    assert len(found) == 1, (output / 'output.log').read_text()
    (results,) = (output / 'lm_eval').glob('*/results_*.json')
    expected = json.loads(results.read_text())['results']['toy_choice']['acc,none']
    assert found[0]['on_saved/hf_model/toy_choice/acc,none'] == expected and found[0]['step'] == 2
