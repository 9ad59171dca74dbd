"""The plugin as Axolotl's source calls it (helpers/runs/axolotl_interface), its callback in a real Trainer."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.runs import frontends as doors
from xhf_hooks.errors import OptionError

PLUGIN = 'xhf_hooks.integrations.axolotl.HFCheckpointPlugin'


@pytest.fixture
def plugin(monkeypatch):
    """Loaded by its name, as ``load_plugin`` does: module and class are split at the last dot."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / 'helpers' / 'runs' / 'axolotl_interface'))
    module, name = PLUGIN.rsplit('.', 1)
    yield getattr(importlib.import_module(module), name)()
    for loaded in [m for m in sys.modules if m.split('.')[0] == 'axolotl' or m == module]:
        del sys.modules[loaded]


def read_yaml(plugin: Any, content: dict[str, Any]) -> dict[str, Any]:
    """As ``merge_input_args``: the class that is named becomes a base of Axolotl's own, which reads the YAML."""
    from pydantic import BaseModel

    class AxolotlInputConfig(BaseModel):
        output_dir: str
        save_strategy: str | None = None

    module, name = plugin.get_input_args().rsplit('.', 1)
    merged = type('Merged', (AxolotlInputConfig, getattr(importlib.import_module(module), name)), {})
    return merged(**content).model_dump(exclude_none=True)


def trainer_of(cfg: dict[str, Any]) -> Any:
    named = {name: cfg[name] for name in ('output_dir', 'save_strategy')}
    args = TrainingArguments(**named, max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True)
    return Trainer(model=odd_llama(), args=args, train_dataset=doors.Sequences())


#: The command prints the number of the save, which goes into Trainer's log.
OPTIONS = dict(save_strategy='steps', save_steps=2, save_total_limit=2, on_saved=['echo', '{"iteration": {step}}'])


@pytest.mark.parametrize('options', [None, OPTIONS])
def test_a_run_that_saves_nothing_else(plugin, tmp_path, options):
    content = {'output_dir': str(tmp_path / 'out'), 'save_strategy': 'no', 'hf_checkpoint': options}
    cfg = read_yaml(plugin, content)
    with doors.fresh_accelerate():
        trainer = trainer_of(cfg)
        for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
            assert callback.logger.name.startswith('axolotl.')  # its console drops INFO of others
            trainer.add_callback(callback)
        trainer.train()
        trainer.model.save_pretrained(tmp_path / 'theirs')
    kept = ['hf_model'] if options is None else ['hf_model', 'hf_model_iter_2', 'hf_model_on_saved']
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == kept
    assert_same_folder_tensors(tmp_path / 'out' / 'hf_model', tmp_path / 'theirs')
    assert_whole(tmp_path / 'out' / 'hf_model')
    name = 'on_saved/hf_model/iteration'
    told = [(line['step'], line[name]) for line in trainer.state.log_history if name in line]
    assert told[-1:] == ([] if options is None else [(3, 3)])


def test_wrong_options_are_refused(plugin):
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match='save_stepz'):
        read_yaml(plugin, {'output_dir': 'out', 'hf_checkpoint': {'save_stepz': 2}})
    cfg = read_yaml(plugin, {'output_dir': 'out', 'hf_checkpoint': {'save_steps': 2}})
    with pytest.raises(OptionError, match='save_steps'):
        plugin.add_callbacks_post_trainer(cfg, None)
