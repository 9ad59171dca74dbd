"""What a conversion of weights must not do; that it gives the right bytes is shown by tests/distributed/test_zoo."""

import logging
from importlib import util

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import build
from tests.helpers.runs.engines import save_folder
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import prefixes_left_out
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.on_meta import call_on_meta
from xhf_hooks.exporters.weight_conversion import _first_of_run, _traced_meta, convert_specs
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.planning.types import TensorSpec

HAS_CONVERSION = util.find_spec('transformers.core_model_loading') is not None
PREFIX = 'llm.'  # names in the source are not the names in the model


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(PREFIX + name, tuple(t.shape), dtype_code(t.dtype)) for name, t in tensors.items()}


def on_meta(model):
    with torch.device('meta'):
        return type(model)(model.config)


if HAS_CONVERSION:

    def test_what_is_computed_is_no_run():
        """Transposed, or with another dtype: not the elements that are read, one after the other."""
        spec = TensorSpec('fused', (2, 3, 4), 'F32')
        fused = _traced_meta('fused', spec)
        assert _first_of_run(fused[1], [fused]) == 12
        assert _first_of_run(fused[:, 1:].contiguous()[1], [fused]) == 16
        assert _first_of_run(fused[1].contiguous().unflatten(0, (3, 1))[2], [fused]) == 20
        for other in (fused[:, 1:], fused[1].t(), fused[1].t().contiguous(), fused[1].bfloat16(), fused[1] * 2):
            assert _first_of_run(other, [fused]) is None
        assert _first_of_run(fused[1], [fused, _traced_meta('other', spec)]) is None
        assert _first_of_run(fused[1].view(torch.int32), [fused]) is None
        assert _first_of_run(fused[1].mul_(2), [fused]) is None

    def test_another_result_than_planned_is_refused():
        model = build('mixtral')
        tensors = model.state_dict()
        entries = convert_specs(on_meta(model), specs_of(tensors))
        group = next(entry for entry in entries if entry.combine is not None)
        (source,) = group.reads
        fewer_experts = tensors[source.removeprefix(PREFIX)][:2]
        with pytest.raises(ModelError, match='needs its own exporter'):
            group.combine({source: fewer_experts})

    @pytest.mark.parametrize('family', ['llava', 'paligemma'])
    def test_names_that_only_transformers_5_reads_are_told(family, tmp_path, caplog):
        """A model built from its config gets them. One that was loaded from older names keeps those."""

        def warnings() -> list[str]:
            return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

        model = build(family, models=MODELS)
        save_hf(model, tmp_path / 'built')
        said = f'save_hf: {type(model).__name__} was not loaded from a folder with the tensor names of the Hub, so '
        (warning,) = [one for one in warnings() if one.startswith(said)]
        assert "(without 'vision_model' in vision_tower)" in warning
        file = tmp_path / 'built' / 'model.safetensors'
        older = {name.replace('vision_tower.', 'vision_tower.vision_model.'): x for name, x in load_file(file).items()}
        assert older.keys() != load_file(file).keys()
        save_file(older, file, {'format': 'pt'})
        caplog.clear()
        save_hf(type(model).from_pretrained(file.parent), tmp_path / 'loaded')
        assert [one for one in warnings() if one.startswith(said)] == []
        assert load_file(tmp_path / 'loaded' / 'model.safetensors').keys() == older.keys()

    def test_towers_whose_names_did_not_change():
        """CLIPModel had its text model and its vision model under these names before."""
        assert prefixes_left_out(build('clip', models=MODELS)) == {}


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
    model = build('donut', models=MODELS)
    model.save_pretrained(tmp_path / 'expected')
    save_folder(model, tmp_path / 'hf_model')
    names = ('model.safetensors', 'config.json')
    assert all((tmp_path / 'hf_model' / n).read_bytes() == (tmp_path / 'expected' / n).read_bytes() for n in names)
