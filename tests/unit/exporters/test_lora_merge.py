"""A merged model is the one that peft's merge makes, rounded once; what cannot be merged is refused by name."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.helpers.adapted import (
    ATTENTION,
    KINDS,
    adapt,
    adapted,
    adapter_kinds,
    around,
    assert_rounded_once,
    merged_by_peft,
    refusal,
)
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.config_fields import assert_same_config
from tests.helpers.engines import save_folder
from tests.helpers.zoo import build
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import with_computed
from xhf_hooks.exporters.lora.merge import WeightMerge
from xhf_hooks.planning.types import ExportEntry
from xhf_hooks.sources import source_for

BF16 = torch.bfloat16

#: Where peft adds up in another order in fp32: by a convolution, or along the other axis of a transposed weight.
OTHER_ORDER = ('conv', 'conv_dora', 'conv1d_weights_dora', 'embedding_dora')


def exact_merge(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """peft's merge of the same weights in float64."""
    return copy.deepcopy(model).double().merge_and_unload().state_dict()


@pytest.mark.parametrize('kind', adapter_kinds())
def test_merge_in_fp32_has_pefts_bits(kind, tmp_path):
    family, lora = KINDS[kind]
    model = adapted(family, **lora)
    merged_by_peft(model, tmp_path / 'expected')
    _, committed = save_folder(around(llm=model), tmp_path / 'hf_model', lora='merge')
    if kind in OTHER_ORDER:
        pefts = folder_tensors(tmp_path / 'expected')
        assert_rounded_once(folder_tensors(committed.path), {name: tensor.double() for name, tensor in pefts.items()})
    else:
        assert_same_folder_tensors(tmp_path / 'expected', committed.path)
    assert_same_config(committed.path, tmp_path / 'expected')
    for path in (tmp_path / 'expected').glob('generation_config.json'):
        assert json.loads((committed.path / path.name).read_text()) == json.loads(path.read_text())
    assert_loads_clean(committed.path, type(model.get_base_model()))


@pytest.mark.parametrize('kind', adapter_kinds())
def test_merge_in_bf16_is_rounded_once(kind, tmp_path):
    family, lora = KINDS[kind]
    model = adapted(family, BF16, **lora)
    save_folder(model, tmp_path / 'hf_model', lora='merge')
    exact = copy.deepcopy(model).double().merge_and_unload()
    exact.save_pretrained(tmp_path / 'exact')
    saved, exact = folder_tensors(tmp_path / 'hf_model'), folder_tensors(tmp_path / 'exact')
    assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} <= {BF16, torch.float32}
    assert_rounded_once(saved, exact)


def test_one_rounding_is_nearer_than_pefts_several(tmp_path):
    model = adapted('llama', BF16, target_modules='all-linear')
    save_folder(model, tmp_path / 'hf_model', lora='merge')
    merged_by_peft(model, tmp_path / 'peft')
    exact = exact_merge(model)
    ours, pefts = folder_tensors(tmp_path / 'hf_model'), folder_tensors(tmp_path / 'peft')
    for name in (name for name in exact if 'proj' in name):
        errors = [(tensors[name].double() - exact[name]).abs().mean() for tensors in (ours, pefts)]
        assert errors[0] < errors[1], name


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_merge_is_cast_once(dtype, tmp_path):
    model = adapted('llama', use_dora=True)
    save_folder(model, tmp_path / 'hf_model', lora='merge', dtype=dtype)
    assert_rounded_once(folder_tensors(tmp_path / 'hf_model'), exact_merge(model))


def test_fp32_adapter_on_a_16_bit_base(tmp_path):
    """What peft's autocast makes of a model that was loaded in bf16, and no engine has cast."""
    model = adapt(build('llama').to(BF16))
    assert {parameter.dtype for parameter in model.parameters()} == {BF16, torch.float32}
    save_folder(model, tmp_path / 'hf_model', lora='merge')
    found = folder_tensors(tmp_path / 'hf_model')
    assert {tensor.dtype for tensor in found.values()} == {BF16}
    assert_rounded_once(found, exact_merge(model))


def test_merge_before_a_conversion():
    """Weights that transformers stacks, splits or transposes on the way out are merged first."""
    merge = WeightMerge('w', 'a', 'b', None, 2.0, transposed=False)
    tensors = {'w': torch.randn(4, 3), 'a': torch.randn(2, 3), 'b': torch.randn(4, 2), 'v': torch.randn(4, 3)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    entry = ExportEntry('stacked', (2, 4, 3), 'F32', ('w', 'v'), lambda t: {'stacked': torch.stack([t['w'], t['v']])})
    (derived,) = with_computed([entry], {'w': merge})
    assert derived.reads == ('w', 'v', 'a', 'b')
    made = derived.combine(tensors)
    expected = tensors['w'] + tensors['b'] @ tensors['a'] * 2.0
    assert torch.equal(made['stacked'], torch.stack([expected, tensors['v']]))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_merged_entries_stand_where_the_base_weights_do(tmp_path):
    """Shards and index are those of the merged model."""
    model = adapted('llama', target_modules='all-linear')
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / 'expected', max_shard_size='20KB')
    save_folder(model, tmp_path / 'hf_model', lora='merge', max_shard_size=20_000)
    expected = {path.name: path.read_bytes() for path in (tmp_path / 'expected').glob('model*')}
    assert len(expected) > 3
    assert {path.name: path.read_bytes() for path in (tmp_path / 'hf_model').glob('model*')} == expected


def test_merge_reads_each_weight_with_its_own_factors(tmp_path):
    """Memory stays that of one weight: no group holds more."""
    plan, _ = save_folder(adapted('llama', use_dora=True), tmp_path / 'hf_model', lora='merge')
    merged = [group for bucket in plan.buckets for group in bucket.groups if len(group.reads) > 1]
    assert len(merged) == 2 * len(ATTENTION)
    for group in merged:
        assert len(group.placements) == 1 and len(group.reads) == 4
        assert len({spec.name.rpartition('_proj.')[0] for spec in group.reads}) == 1


# What is refused


def test_quantized_base():
    model = adapted('llama')
    model.get_base_model().quantization_method = 'bitsandbytes'  # what HfQuantizer.preprocess_model sets
    for lora in ('merge', 'both'):
        found = refusal(model, lora)
        assert 'quantized (bitsandbytes)' in found and "set lora to 'adapter'" in found
    exporter_for(model, None).entries(source_for(model).specs(), None)


UNMERGEABLE = {
    'tied': (dict(target_modules=['embed_tokens']), 'is tied to a layer'),
    'both_of_tied': (dict(target_modules=['embed_tokens', 'lm_head']), 'is tied to a layer'),
    'trainable_tokens': (dict(trainable_token_indices=[1, 2]), 'TrainableTokensWrapper is not supported'),
    'mica': (dict(init_lora_weights='mica'), 'MiCALinearVariant is not supported'),
    'lora_bias_alone': (dict(target_modules=['o_proj'], lora_bias=True), 'without a bias'),
}


@pytest.mark.parametrize('kind', UNMERGEABLE)
def test_unmergeable(kind, tmp_path):
    lora, reason = UNMERGEABLE[kind]
    model = adapted('qwen2', **lora)
    found = refusal(model, 'merge')
    assert reason in found and "set lora to 'adapter'" in found
    save_folder(model, tmp_path / 'hf_model')
    model.save_pretrained(tmp_path / 'expected')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')


@pytest.mark.modern_only  # in transformers 4 experts are linear layers
def test_adapted_expert_parameters():
    lora = dict(target_modules=[], target_parameters=['experts.gate_up_proj'], task_type='CAUSAL_LM')
    assert 'ParamWrapper is not supported' in refusal(adapted('qwen3_moe', **lora), 'merge')


def test_merged_live():
    model = adapted('llama')
    model.merge_adapter()
    assert 'already merged into the live model' in refusal(model, 'merge')


def test_memory_of_a_merge_is_told(tmp_path):
    """fp32, its cast, and the cast before that is still being written, of the largest adapted weight."""
    from xhf_hooks.collective import Collective
    from xhf_hooks.config.options import SaveOptions
    from xhf_hooks.save import Saver

    model = adapted('llama', BF16, target_modules=['q_proj', 'up_proj'])
    expected = {}
    for lora in ('adapter', 'merge', 'both'):
        collective = Collective(timeout_secs=60)
        saver = Saver(model, SaveOptions(lora=lora), collective, writer='gather')
        saver.prepare()
        collective.close()
        expected[lora] = saver.exporter.combine_nbytes
        assert saver.expected_extra_nbytes == saver.plan.largest_bucket_nbytes + expected[lora]
    assert expected == {'adapter': 0, 'merge': 77 * 35 * 8, 'both': 77 * 35 * 8}
