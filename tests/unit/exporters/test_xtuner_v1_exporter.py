"""Models of XTuner V1: what goes out is what their ``load_spec_mapping`` says, and refused is what it does not."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.helpers.checks.compare import assert_loads_clean, assert_same_tensors, folder_tensors
from tests.helpers.models import xtuner_v1, zoo
from tests.helpers.models.adapted import planned
from tests.helpers.models.model_folder import edit_json
from tests.helpers.runs.engines import save_folder
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.xtuner import XtunerV1Exporter

pytestmark = pytest.mark.modern_only  # the stand-in has Qwen3's names


@pytest.fixture(autouse=True)
def v1():
    with xtuner_v1.imported():
        yield


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Folders of transformers, in bfloat16 as V1's are."""
    root = tmp_path_factory.mktemp('folders')
    for family in ('qwen3', 'qwen3_moe'):
        zoo.build(family).to(torch.bfloat16).save_pretrained(root / family)
    return root


@pytest.mark.parametrize('family', ['qwen3', 'qwen3_moe'])
def test_the_folder_is_that_of_transformers(folders, tmp_path, family):
    model = xtuner_v1.of_folder(folders / family).float()  # V1 trains in fp32
    plan, committed = save_folder(model, tmp_path / 'hf_model')
    assert_same_tensors(folder_tensors(committed.path), folder_tensors(folders / family))
    assert_loads_clean(committed.path, AutoModelForCausalLM)
    assert all(one.source_offset is not None for one in plan.placements), 'ranges of what ranks hold are not gathered'


def test_names_and_dtypes_are_v1s(folders):
    model = xtuner_v1.of_folder(folders / 'qwen3_moe').float()
    model.norm.register_buffer('steps', torch.ones(2))
    model.config.hf_save_cfg.fp32_keys_pattern = [r'mlp\.gate\.weight$', r'experts\.1\.down_proj']
    model.load_spec_mapping['lm_head.weight'].global_hf_keys = ['head.weight']  # as hf_key_mapping makes it
    of_steps = dict(name='norm.steps', global_hf_keys=['model.norm.steps'], shards=[])
    model.load_spec_mapping['norm.steps'] = SimpleNamespace(**of_steps)
    dtypes = {one.hf_name: one.dtype for one in planned(model).entries}
    assert (dtypes['head.weight'], dtypes['model.norm.steps']) == ('BF16', 'F32')
    assert dtypes['model.layers.0.mlp.gate.weight'] == 'F32'
    # V1 asks for the first name of a fused tensor
    assert dtypes['model.layers.0.mlp.experts.1.down_proj.weight'] == 'BF16'


def test_what_param_to_safetensor_does_is_done(folders, tmp_path):
    class Transposing(xtuner_v1.Model):
        def param_to_safetensor(self, safetensor, hf_param_name):
            if 'experts' not in hf_param_name:
                return safetensor
            return safetensor.reshape(2, -1, safetensor.shape[1]).transpose(1, 2).contiguous()

    model = xtuner_v1.of_folder(folders / 'qwen3_moe', Transposing)
    model.config.hf_config.architectures = None  # no class of transformers reads this
    _, committed = save_folder(model, tmp_path / 'hf_model')
    expected = {
        name: Transposing.param_to_safetensor(model, one, name)
        for name, one in folder_tensors(folders / 'qwen3_moe').items()
    }
    assert_same_tensors(folder_tensors(committed.path), expected)
    assert planned(model).combine_nbytes > 0


def test_of_tensors_with_one_name_the_first_is_written_and_the_other_is_told(folders):
    model = xtuner_v1.of_folder(folders / 'qwen3')
    model.load_spec_mapping['lm_head.weight'].global_hf_keys = ['model.embed_tokens.weight']
    order = ['lm_head.weight', *(name for name in model.load_spec_mapping if name != 'lm_head.weight')]
    model.load_spec_mapping = {name: model.load_spec_mapping[name] for name in order}
    found = planned(model)
    reads = {one.hf_name: one.reads for one in found.entries}
    assert reads['model.embed_tokens.weight'] == ('lm_head.weight',) and 'lm_head.weight' not in reads
    assert found.left_out == ['embed_tokens.weight'], 'where V1 ties them, they are one tensor of the source'


def test_parts_of_a_composed_model_have_names_of_their_own(folders, tmp_path):
    class Tower(xtuner_v1.Model):
        prefix = 'vision.'

    language, tower = (xtuner_v1.of_folder(folders / 'qwen3', kind) for kind in (xtuner_v1.Model, Tower))
    model = xtuner_v1.Composed(language_model=language, vision_tower=tower, other=nn.Linear(2, 2))
    model._hf_path = tmp_path / 'base'  # whose files other than weights are copied
    shutil.copytree(folders / 'qwen3', model._hf_path)
    edit_json(model._hf_path / 'config.json', architectures=['NotOfTransformers'])
    _, committed = save_folder(model, tmp_path / 'hf_model')
    stored = folder_tensors(folders / 'qwen3')
    of_tower = {f'vision.{name}': one for name, one in stored.items()}
    assert_same_tensors(folder_tensors(committed.path), {**stored, **of_tower})
    assert (committed.path / 'config.json').read_bytes() == (model._hf_path / 'config.json').read_bytes()
    assert planned(model).left_out == ['other.weight', 'other.bias']


def test_what_cannot_be_saved_right_is_refused(folders):
    def refusal(change, dtype=None):
        model = xtuner_v1.of_folder(folders / 'qwen3')
        change(model)
        with pytest.raises((ModelError, OptionError)) as caught:
            planned(model, dtype)
        return str(caught.value)

    def trained_in_fp8(model):
        model.config.float8_cfg = SimpleNamespace(enable_float8=True)

    def split_inside_of_experts(model):
        model.load_spec_mapping['norm.weight'].shards = [SimpleNamespace(interleave_factor=4)]

    assert 'float8_cfg' in refusal(trained_in_fp8)
    assert 'norm.weight is split by expert tensor parallelism' in refusal(split_inside_of_experts)
    assert 'found added in one of the two' in refusal(lambda model: model.register_buffer('added', torch.ones(1)))
    assert 'fp32_keys_pattern' in refusal(lambda model: None, 'F32')

    class OwnSave(xtuner_v1.Model):
        def save_hf(self, hf_dir):
            pass

    with pytest.raises(ModelError, match='a save_hf of its own'):
        planned(xtuner_v1.of_folder(folders / 'qwen3', OwnSave))


def test_it_is_chosen_for_v1_alone(folders):
    model = xtuner_v1.of_folder(folders / 'qwen3')
    assert type(exporter_for(model, None)) is XtunerV1Exporter
    with pytest.raises(OptionError, match='lora'):
        exporter_for(model, None, lora='merge')
    assert not XtunerV1Exporter.accepts(zoo.build('qwen3'), None)
