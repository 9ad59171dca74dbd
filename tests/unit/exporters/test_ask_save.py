"""What ``save_pretrained`` of a class says that it would write; test_families and test_golden compare the bytes."""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from tests.helpers.checks.compare import assert_same_tensors, folder_tensors
from tests.helpers.models.adapted import planned
from tests.helpers.models.families import MODELS
from tests.helpers.models.model_folder import rename_tensors
from tests.helpers.models.zoo import build, small_config
from tests.helpers.runs.engines import save_folder
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import converts_weights, prefixes_left_out
from xhf_hooks.errors import AgreedError
from xhf_hooks.exporters.on_meta import call_on_meta


class DropsOptions(transformers.LlamaForCausalLM):
    """Passes nothing on, writes notes, and waits for other ranks, as many a trainer's class does."""

    def save_pretrained(self, save_directory, **options):
        super().save_pretrained(save_directory)
        Path(save_directory, 'notes.txt').write_text('notes')
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


class WithoutTeacher(transformers.LlamaForCausalLM):
    """Its state dict leaves out what is trained beside it, and its save takes it from there."""

    def __init__(self, config):
        super().__init__(config)
        self.teacher = nn.Linear(3, 3)

    def state_dict(self, *args, **options):
        found = super().state_dict(*args, **options)
        return {name: tensor for name, tensor in found.items() if not name.startswith('teacher.')}

    def save_pretrained(self, save_directory, **options):
        super().save_pretrained(save_directory, state_dict=self.state_dict())


class InHalf(transformers.LlamaForCausalLM):
    """Writes 16 bits, and one weight under a second name, transposed."""

    def save_pretrained(self, save_directory, **options):
        state = {name: tensor.cpu().to('cpu', torch.float16) for name, tensor in self.state_dict().items()}
        super().save_pretrained(save_directory, state_dict=state)
        extra = {'transposed': self.model.norm.weight[None].t().contiguous(), 'sum': self.lm_head.weight.sum(0)}
        save_file(extra, Path(save_directory, 'extra.safetensors'))


def leave_out_probe(module, state, prefix, metadata):
    del state[f'{prefix}probe.weight']


class WithHook(transformers.LlamaForCausalLM):
    """A hook of its own leaves a trained tensor out of its state dict."""

    def __init__(self, config):
        super().__init__(config)
        self.probe = nn.Linear(3, 3, bias=False)
        self._register_state_dict_hook(leave_out_probe)


class ForEncoders(transformers.BertModel):
    """Cannot generate, and has a save of its own."""

    def save_pretrained(self, save_directory, **options):
        super().save_pretrained(save_directory, **options)


class WithoutGeneration(transformers.LlamaForCausalLM):
    """Its save writes the weights and the config alone."""

    def save_pretrained(self, save_directory, **options):
        super().save_pretrained(save_directory, **options)
        Path(save_directory, 'generation_config.json').unlink()


@pytest.mark.parametrize('kind', [DropsOptions, WithoutTeacher, InHalf, WithHook, ForEncoders, WithoutGeneration])
def test_a_class_with_its_own_save(kind, tmp_path, caplog):
    model = kind(small_config(*MODELS['bert' if kind is ForEncoders else 'llama']))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    model.save_pretrained(tmp_path / 'expected')
    save_hf(model, tmp_path / 'found', model_card=False)
    names = [{path.name for path in (tmp_path / at).iterdir()} for at in ('found', 'expected')]
    assert names[0] - {'xhf_manifest.json'} == names[1] and 'generation_config' not in caplog.text
    for name in names[1]:
        found, expected = tmp_path / 'found' / name, tmp_path / 'expected' / name
        if found.suffix == '.safetensors':
            assert_same_tensors(load_file(found), load_file(expected))
        elif found.suffix != '.json':
            assert found.read_bytes() == expected.read_bytes()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


class WithProjection(nn.Module):
    """As SentenceTransformer: a model, and a module around it whose weights ``save_model`` of safetensors writes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.projection = inner, nn.Linear(3, 3)

    def save_pretrained(self, path):
        self.inner.save_pretrained(path)
        Path(path, '1_Dense').mkdir()
        save_model(self.projection, Path(path, '1_Dense', 'model.safetensors'))


def test_a_module_around_the_model_that_writes_its_weights_itself(tmp_path, caplog):
    whole = WithProjection(build('llama_tied'))
    whole.save_pretrained(tmp_path / 'expected')
    save_hf(whole, tmp_path / 'found')
    assert 'are not saved' not in caplog.text
    for name in ('model.safetensors', '1_Dense/model.safetensors'):
        assert load_file(tmp_path / 'found' / name).keys() == load_file(tmp_path / 'expected' / name).keys()
        for key, tensor in load_file(tmp_path / 'expected' / name).items():
            assert torch.equal(load_file(tmp_path / 'found' / name)[key], tensor), key


class SharesABlock(transformers.LlamaForCausalLM):
    """Two layers are one, as in Zamba2, which transformers does not save: the class does not declare it."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1] = self.model.layers[0]


def test_tensors_that_are_one_without_being_declared_so(tmp_path):
    model = SharesABlock(small_config(*MODELS['llama']))
    save_hf(model, tmp_path / 'found')
    found = folder_tensors(tmp_path / 'found')
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())
    try:
        model.save_pretrained(tmp_path / 'expected')
    except RuntimeError as error:
        assert 'shared tensors' in str(error)
        assert found.keys() == model.state_dict().keys()
    else:  # as before 4.39
        assert found.keys() == folder_tensors(tmp_path / 'expected').keys()


class Counts(transformers.LlamaForCausalLM):
    """Writes what training has set on it."""

    n_steps = 0

    def save_pretrained(self, save_directory, **options):
        super().save_pretrained(save_directory, **options)
        Path(save_directory, 'steps.json').write_text(json.dumps(self.n_steps))


def test_what_training_sets_is_asked_again(tmp_path):
    exported = planned(Counts(small_config(*MODELS['llama'])))
    model = exported.exporter._model
    model.eval()
    assert not exported.exporter.is_outdated(exported.export), 'each validation'
    model.n_steps = 7
    exported.write_hf_assets(tmp_path, None)
    assert (tmp_path / 'steps.json').read_text() == '7'


class Scored(nn.Module):
    """A wrapper whose files have a value and a size in them, and weights in two formats."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(8, 3)
        self.register_buffer('mean', torch.tensor(5.0))

    def save_pretrained(self, folder):
        self.model.save_pretrained(folder)
        save_file(
            {name: x.detach().contiguous() for name, x in self.head.state_dict().items()}, f'{folder}/h.safetensors'
        )
        torch.save(self.head.state_dict(), f'{folder}/head.pt')
        Path(folder, 'sizes.json').write_text(json.dumps({'num_labels': self.head.weight.shape[0]}))
        Path(folder, 'values.json').write_text(json.dumps({'mean': self.mean.item()}))


def test_files_that_depend_on_values_are_named_and_not_written(tmp_path, caplog):
    model = Scored(build('llama'))
    save_hf(model, tmp_path)
    assert json.loads((tmp_path / 'sizes.json').read_text()) == {'num_labels': 3}
    assert_same_tensors(load_file(tmp_path / 'h.safetensors'), model.head.state_dict())
    assert not (tmp_path / 'values.json').exists() and not (tmp_path / 'head.pt').exists()
    assert "['head.pt', 'values.json'] are not saved: the model's own save_pretrained" in caplog.text


def test_a_transformers_that_writes_in_another_way_is_refused_before_training(tmp_path, monkeypatch):
    """By another function than save_file of safetensors.torch."""
    monkeypatch.setattr('transformers.modeling_utils.safe_save_file', lambda *given, **options: None)
    with pytest.raises(AgreedError, match=r'LlamaForCausalLM in transformers .* save_file of safetensors'):
        save_hf(build('llama'), tmp_path / 'found')
    assert not (tmp_path / 'found').exists()


def test_training_notices_nothing(tmp_path):
    model = build('llama')
    config, state = model.config.to_dict(), torch.get_rng_state()
    modules = {name: {**vars(module)} for name, module in model.named_modules()}
    save_folder(model, tmp_path)
    assert model.config.to_dict() == config and torch.equal(torch.get_rng_state(), state)
    assert {name: vars(module) for name, module in model.named_modules()} == modules


@pytest.mark.modern_only
@pytest.mark.skipif(not converts_weights(), reason='the installed transformers converts no weights')
@pytest.mark.parametrize('family', ['llava', 'paligemma'])
def test_names_that_only_transformers_5_reads_are_told(family, tmp_path, caplog):
    """A model built from its config gets them. One that was loaded from older names keeps those."""

    def warnings() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

    model = build(family)
    save_hf(model, tmp_path / 'built')
    said = f'save_hf: {type(model).__name__} was not loaded from a folder with the tensor names of the Hub, so '
    (warning,) = [one for one in warnings() if one.startswith(said)]
    assert "(without 'vision_model' in vision_tower)" in warning
    rename_tensors(tmp_path / 'built', 'vision_tower.', 'vision_tower.vision_model.')
    caplog.clear()
    save_hf(type(model).from_pretrained(tmp_path / 'built'), tmp_path / 'loaded')
    assert [one for one in warnings() if one.startswith(said)] == []
    assert folder_tensors(tmp_path / 'loaded').keys() == folder_tensors(tmp_path / 'built').keys()


@pytest.mark.modern_only
@pytest.mark.skipif(not converts_weights(), reason='the installed transformers converts no weights')
def test_towers_whose_names_did_not_change():
    """CLIPModel had its text model and its vision model under these names before."""
    assert prefixes_left_out(build('clip')) == {}


class WithRates(nn.Module):
    """As InternVL's vision model: ``[x.item() for x in torch.linspace(0, config.drop_path_rate, n_layers)]``."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2) for rate in torch.linspace(0, 0.1, 2) if rate.item() < 1])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer('n_steps', torch.tensor(7))
        self.register_buffer('none', None)
        if tied:
            self.layers[1].weight = self.layers[0].weight


def test_a_class_that_reads_values_while_it_is_built():
    model = call_on_meta(WithRates)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        **{f'layers.{n}.weight': (2, 3) for n in range(2)},
        **{f'layers.{n}.bias': (2,) for n in range(2)},
        'frozen': (2,),
        'n_steps': (),
    }
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.layers[0].weight is model.layers[1].weight
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ['frozen']
    assert not nn.Linear(1, 1).weight.is_meta  # everybody else's parameters are where they were


def test_a_class_that_cannot_be_built_says_why():
    def build_wrong() -> nn.Module:
        raise KeyError('hidden_size')

    with pytest.raises(KeyError, match='hidden_size'):
        call_on_meta(build_wrong)


def test_a_model_that_save_pretrained_has_saved_before(tmp_path):
    """With transformers 4.48, it resets in the live config that the parts' attention has been chosen."""
    model = build('donut')
    model.save_pretrained(tmp_path / 'expected')
    save_folder(model, tmp_path / 'hf_model')
    names = ('model.safetensors', 'config.json')
    assert all((tmp_path / 'hf_model' / n).read_bytes() == (tmp_path / 'expected' / n).read_bytes() for n in names)
