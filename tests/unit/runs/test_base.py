"""The model that a run starts from is neither replaced nor deleted by it."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.helpers.checks.compare import bytes_in
from tests.helpers.models.adapted import adapted, around
from tests.helpers.models.model_folder import edit_json, save_model
from tests.helpers.models.zoo import build
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks import save_hf
from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.exporters.assets.base_files import base_dirs_of
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.runs.access import lock_targets


def test_an_adapter_does_not_replace_its_base_which_is_named_through_a_link(tmp_path):
    (tmp_path / 'real').mkdir()
    (tmp_path / 'link').symlink_to('real')
    save_hf(build('llama'), tmp_path / 'real' / 'hf_model')
    model = adapted('llama')
    model.get_base_model().config._name_or_path = str(tmp_path / 'link' / 'hf_model')
    with pytest.raises(XhfError, match=r'hf_model is \(or contains\) the base model .* set out_dir to another'):
        save_hf(model, tmp_path / 'real' / 'hf_model')
    assert (tmp_path / 'real' / 'hf_model' / 'model.safetensors').exists()


def test_each_part_of_a_model_has_a_base():
    """As LLaVA's llm and visual encoder in XTuner."""
    whole = around(llm=build('llama'), visual_encoder=build('gpt2'), projector=nn.Linear(1, 1))
    whole.llm.config._name_or_path, whole.visual_encoder.config._name_or_path = '/base/llm', '/base/vision'
    assert base_dirs_of(whole) == ['/base/llm', '/base/vision']


def test_the_folder_of_the_best_may_be_the_base_too(tmp_path):
    newest = CheckpointFolder(tmp_path / 'hf_model', 1)
    best = newest.extra_target('best')
    best.path.mkdir()
    with pytest.raises(TargetError, match=r'hf_model_best is \(or contains\) the base model .* set out_dir to another'):
        lock_targets(logging.LoggerAdapter(logging.getLogger('test')), [newest, best], 1, [str(best.path)])
    newest.unlock()


#: What saves get from the base, byte for byte.
OF_BASE = (
    *('modeling_own.py', 'settings.py', 'preprocessor_config.json', 'modules.json', '1_Pooling/config.json'),
    *('tokenizer.json', 'tokenizer_config.json'),
)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base in the working folder, with a file of each kind that saves get from a base."""
    monkeypatch.chdir(tmp_path)
    folder = save_model('llama', tmp_path / 'base')
    edit_json(folder / 'config.json', auto_map={'AutoModelForCausalLM': 'modeling_own.OwnModel'})
    (folder / 'modeling_own.py').write_text('from .settings import x\nclass OwnModel: ...\n')
    (folder / 'settings.py').write_text('x = 5\n')
    (folder / 'preprocessor_config.json').write_text('{"feature_extractor_type": "Own"}')
    (folder / 'modules.json').write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / '1_Pooling').mkdir()
    (folder / '1_Pooling' / 'config.json').write_text('{"pooling_mode": "cls"}')
    tokenizer = json.loads((folder / 'tokenizer.json').read_text())
    (folder / 'tokenizer.json').write_text(json.dumps({**tokenizer, 'truncation': None}))  # other bytes than saved
    return folder


def leave(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reward's code does. There is another model of the same name."""
    elsewhere = base.parent / 'elsewhere'
    save_model('gpt2', elsewhere / 'base')
    (elsewhere / 'base' / 'preprocessor_config.json').write_text('"of another model"')
    monkeypatch.chdir(elsewhere)


def remove(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those who clean a cache or a scratch folder do."""
    shutil.rmtree(base)


@pytest.mark.parametrize('change', [leave, remove])
@pytest.mark.parametrize('is_run', [True, False])
def test_each_save_has_what_the_base_had_before_training(base, tmp_path, monkeypatch, change, is_run):
    """Whatever became of it since then, in a run, and between two calls."""
    model, before = LlamaForCausalLM.from_pretrained('base'), bytes_in(base)
    out = tmp_path / 'out' / 'hf_model'
    if is_run:
        saves = open_run(model, out)
        change(base, monkeypatch)
        saves.save(iteration(1))
        model.config.bos_token_id = 2  # so that the next save is planned again
        saves.save(iteration(2))
        saves.close()
    else:
        tokenizer = AutoTokenizer.from_pretrained('base')
        save_hf(model, out, tokenizer=tokenizer)
        change(base, monkeypatch)
        save_hf(model, out, tokenizer=tokenizer)
    found = bytes_in(out)
    assert {name: found.get(name) for name in OF_BASE} == {name: before[name] for name in OF_BASE}


@pytest.mark.parametrize('is_below', [True, False])
def test_a_base_is_not_replaced_by_a_run_that_has_gone_elsewhere(tmp_path, monkeypatch, is_below):
    """Into a folder below, as hydra goes, before the run is known; or anywhere else, between two calls."""
    monkeypatch.chdir(tmp_path)
    save_hf(build('llama'), 'work/hf_model')
    model = LlamaForCausalLM.from_pretrained('work/hf_model')
    if not is_below:
        save_hf(model, tmp_path / 'other' / 'hf_model')
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / ('work' if is_below else 'elsewhere'))
    with pytest.raises(XhfError, match=r'hf_model is \(or contains\) the base model .* set out_dir to another'):
        save_hf(model, tmp_path / 'work' / 'hf_model')
