"""Runs that loaded other weights over their base, trained an adapter, and whose checkpoints hold the adapter alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.converted import assert_same_files, base_of, convert, refused
from tests.helpers.models.adapted import adapt, around
from tests.helpers.models.model_folder import save_tokenizer
from tests.helpers.models.zoo import build
from tests.helpers.runs.made_checkpoint import MadeCheckpoint
from xhf_hooks import save_hf
from xhf_hooks.offline.commands import verify
from xhf_hooks.offline.commands.convert import main

LORA = dict(r=4, lora_alpha=12, target_modules=['q_proj', 'v_proj'])
NAMES_BASE = "type='transformers.AutoModelForCausalLM.from_pretrained', pretrained_model_name_or_path"


def other_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights of an earlier stage of training, by name in a model that holds the llm."""
    generator = torch.Generator().manual_seed(7)
    state = build('llama').state_dict()
    return {f'llm.{n}': (t + 0.3 * torch.randn(t.shape, generator=generator)).to(dtype) for n, t in state.items()}


@dataclass
class Run:
    """A run in a folder, which trained an adapter on the given weights.

    Attributes:
        kind: The class that its config names.
        config: The other fields of its config.
    """

    folder: Path
    weights: Mapping[str, torch.Tensor]
    kind: str = 'my.Model'
    of_model: str = ''
    config: str = ''

    def __post_init__(self) -> None:
        self.base = base_of('llama', self.folder / 'base')
        save_tokenizer(self.base, build('llama').get_input_embeddings().weight.shape[0])
        llm = type(build('llama')).from_pretrained(self.base)
        llm.load_state_dict({name.removeprefix('llm.'): tensor for name, tensor in self.weights.items()})
        self.live = around(llm=adapt(llm, **LORA))
        self.write_checkpoint(self.folder / 'iter_2.pth')

    def write_checkpoint(self, file: Path, **meta: Any) -> None:
        state = {name: tensor for name, tensor in self.live.state_dict().items() if 'lora_' in name}
        torch.save({'state_dict': state, 'meta': {'cfg': self.config_text(), **meta}}, file)

    def config_text(self) -> str:
        llm = f'llm=dict({NAMES_BASE}={str(self.base)!r})'
        options = ', '.join(f'{name}={value!r}' for name, value in LORA.items())
        lora = f"lora=dict(type='peft.LoraConfig', task_type='CAUSAL_LM', {options})"
        return f'model = dict(type={self.kind!r}, {llm}, {lora}, {self.of_model})\n{self.config}\n'

    def assert_merged_as_by_the_hook(self) -> None:
        save_hf(self.live, self.folder / 'hook', lora='merge')
        out = convert(self.folder / 'iter_2.pth', self.folder / 'out', '--lora', 'merge')
        assert_same_files(out, self.folder / 'hook')


def in_the_adapted_model(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by the names that they have once peft has adapted the llm."""
    live = around(llm=adapt(build('llama'), **LORA))
    plain = {name.replace('.base_model.model', '').replace('.base_layer', ''): name for name in live.state_dict()}
    return {plain[name]: tensor for name, tensor in weights.items()}


def saved(folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({'state_dict': dict(weights)}, folder / 'stage1.pth')
    return folder / 'stage1.pth'


@pytest.mark.parametrize('case', ['before its adapters', 'after its adapters', 'load_from', 'both'])
def test_the_adapter_is_merged_into_the_weights_on_which_it_was_trained(case, tmp_path, capsys):
    weights = other_weights()
    names = weights if case == 'before its adapters' else in_the_adapted_model(weights)
    stage1 = saved(tmp_path / 'stage1', names)
    run = Run(tmp_path / 'run', weights)
    if case == 'load_from':
        run.config = f'load_from = {str(stage1)!r}'
    elif case == 'both':  # MMEngine's comes last
        older = saved(tmp_path / 'older', {name: tensor + 1 for name, tensor in weights.items()})
        run.of_model, run.config = f'pretrained_pth={str(older)!r}', f'load_from = {str(stage1)!r}'
    else:
        run.of_model = f'pretrained_pth={str(stage1)!r}'
        run.kind = 'xtuner.model.LLaVAModel' if case == 'after its adapters' else run.kind
    run.write_checkpoint(run.folder / 'iter_2.pth')
    run.assert_merged_as_by_the_hook()
    assert f'not in the checkpoint, read from {stage1}' in capsys.readouterr().err
    convert(run.folder / 'iter_2.pth', run.folder / 'adapter', '--lora', 'adapter')
    assert f'the adapter was trained on {run.base} with the weights of {stage1}' in capsys.readouterr().err


def test_json_of_both_commands_names_options_as_they_take_them(tmp_path, capfd):
    stage1 = saved(tmp_path / 'stage1', other_weights())
    run = Run(tmp_path / 'run', other_weights(), of_model=f'pretrained_pth={str(stage1)!r}')
    run.write_checkpoint(run.folder / 'iter_2.pth')
    out = tmp_path / 'adapter'
    assert main([str(run.folder / 'iter_2.pth'), str(out), '--lora', 'adapter', '--json']) == 0
    notes = json.loads(capfd.readouterr().out)['notes']
    assert verify.main(['--compare', str(out), str(run.folder / 'iter_2.pth'), '--json']) == 0
    found = json.loads(capfd.readouterr().out)
    for told in (notes, found['notes']):
        assert 'A merged model has these weights (--lora merge)' in ''.join(told)


def test_a_model_of_xtuner_that_adds_adapters_first_does_not_load_plain_names(tmp_path):
    stage1 = saved(tmp_path / 'stage1', other_weights())
    unchanged = {f'llm.{name}': tensor for name, tensor in build('llama').state_dict().items()}
    run = Run(tmp_path / 'run', unchanged, 'xtuner.model.LLaVAModel', f'pretrained_pth={str(stage1)!r}')
    live = run.live.state_dict()
    loaded = torch.load(stage1)['state_dict']
    assert not {name for name in loaded if name in live and 'q_proj' in name}, 'as XTuner does, with strict=False'
    run.live.load_state_dict(loaded, strict=False)
    run.assert_merged_as_by_the_hook()


def test_xtuner_rounds_the_masters_of_a_folder_to_fp16(tmp_path):
    masters = other_weights()
    MadeCheckpoint(masters=masters, dtype=torch.bfloat16).write(tmp_path / 'stage1.pth')
    rounded = {name: tensor.half().float() for name, tensor in masters.items()}
    run = Run(tmp_path / 'run', rounded, of_model=f'pretrained_pth={str(tmp_path / "stage1.pth")!r}')
    run.assert_merged_as_by_the_hook()


def test_a_resumed_run_has_what_the_first_one_loaded(tmp_path):
    weights = other_weights()
    stage1 = saved(tmp_path / 'stage1', in_the_adapted_model(weights))
    run = Run(tmp_path / 'run', weights, config=f'load_from = {str(stage1)!r}')
    run.write_checkpoint(run.folder / 'iter_1.pth')
    run.config = f'resume = True\nload_from = {str(run.folder / "iter_1.pth")!r}'
    run.write_checkpoint(run.folder / 'iter_2.pth')
    run.assert_merged_as_by_the_hook()


@pytest.mark.parametrize('value', ["'/gone/stage1.pth'", "WHERE + '/stage1.pth'"])
def test_weights_that_are_gone_are_asked_for(value, tmp_path, capsys):
    run = Run(tmp_path / 'run', other_weights(), of_model=f'pretrained_pth={value}')
    run.write_checkpoint(run.folder / 'iter_2.pth')
    line = refused(capsys, run.folder / 'iter_2.pth', tmp_path / 'out', '--lora', 'merge')
    assert 'model.pretrained_pth' in line and 'put it back, or give with --config' in line
    out = convert(run.folder / 'iter_2.pth', tmp_path / 'out', '--lora', 'adapter')
    assert 'If it has weights of the base, an adapter needs them, too' in capsys.readouterr().err
    assert all('lora_' in name for name in folder_tensors(out))
    own = tmp_path / 'config.py'
    own.write_text(run.config_text().replace(f'pretrained_pth={value}', ''))
    convert(run.folder / 'iter_2.pth', tmp_path / 'merged', '--lora', 'merge', '--config', own)
