"""Un-fusing found out on meta tensors is what transformers does to the whole state dict.

transformers < 5 stores every tensor as it is in memory; there the specs must come out unchanged.
"""

from __future__ import annotations

from importlib import import_module, util
from unittest import mock

import pytest
import torch

from tests.helpers.compare import folder_tensors
from tests.helpers.zoo import build
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.weight_conversion import _connected, _first_of_run, _traced_meta, convert_specs
from xhf_hooks.format.dtypes import dtype_code, host_bytes
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import ExportEntry, TensorSpec

HAS_CONVERSION = util.find_spec('transformers.core_model_loading') is not None
PREFIX = 'llm.'  # names in the source are not the names in the model


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(PREFIX + name, tuple(t.shape), dtype_code(t.dtype)) for name, t in tensors.items()}


def on_meta(model):
    with torch.device('meta'):
        return type(model)(model.config)


def unchanged(specs: dict[str, TensorSpec]) -> list[ExportEntry]:
    return [ExportEntry(name, spec.shape, spec.dtype, (spec.name,)) for name, spec in specs.items()]


@pytest.mark.parametrize('family', ['llama', 'gpt2'])
def test_models_stored_as_they_are(family):
    model = build(family)
    specs = specs_of(model.state_dict())
    assert convert_specs(on_meta(model), specs) == unchanged(specs)


@pytest.mark.parametrize(
    ('sources', 'expected'),
    [
        ({}, []),
        ({'a': {'1'}, 'b': {'2'}}, [({'1'}, ['a']), ({'2'}, ['b'])]),
        ({'a': {'1'}, 'b': {'1'}}, [({'1'}, ['a', 'b'])]),
        ({'a': {'1', '2'}, 'b': {'2', '3'}, 'c': {'3', '4'}}, [({'1', '2', '3', '4'}, ['a', 'b', 'c'])]),
        # c joins two sets that had nothing in common until then; d finds the joined one.
        (
            {'a': {'1'}, 'b': {'2'}, 'x': {'9'}, 'c': {'1', '2'}, 'd': {'2'}},
            [({'9'}, ['x']), ({'1', '2'}, ['a', 'b', 'c', 'd'])],
        ),
    ],
)
def test_connected(sources, expected):
    found = _connected({name: frozenset(names) for name, names in sources.items()})
    assert [(together, sorted(names)) for together, names in found] == expected


if HAS_CONVERSION:
    revert_weight_conversion = import_module('transformers.core_model_loading').revert_weight_conversion

    def apply_groups(entries: list[ExportEntry], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each group by itself, given its own tensors and no other, as when a bucket at a time is gathered."""
        made = {}
        for entry in entries:
            reads = {name: tensors[name.removeprefix(PREFIX)] for name in entry.reads}
            if entry.combine is None:
                (made[entry.hf_name],) = reads.values()
            elif entry.hf_name not in made:
                made.update(entry.combine(reads))
        return made

    @pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize('family', ['qwen3_moe', 'mixtral', 'deepseek_v3', 'llava', 'qwen2_vl', 't5'])
    def test_same_as_the_conversion_of_the_whole(family, dtype):
        model = build(family).to(dtype)
        tensors = model.state_dict()
        expected = revert_weight_conversion(model, dict(tensors))
        entries = convert_specs(on_meta(model), specs_of(tensors))
        found = apply_groups(entries, tensors)

        assert [entry.hf_name for entry in entries] == list(expected)
        assert sorted(found) == sorted(expected)
        for entry in entries:
            name, tensor = entry.hf_name, expected[entry.hf_name]
            assert (entry.shape, entry.dtype) == (tuple(tensor.shape), dtype_code(tensor.dtype)), name
            assert found[name].shape == tensor.shape, name
            assert host_bytes(found[name]) == host_bytes(tensor), name
            if entry.source_offset is not None:  # nothing need be made: it is a run of what is read
                read = tensors[entry.reads[0].removeprefix(PREFIX)].reshape(-1)
                run = read[entry.source_offset : entry.source_offset + tensor.numel()]
                assert host_bytes(run) == host_bytes(tensor), name

    @pytest.mark.parametrize('family', ['qwen3_moe', 'mixtral', 'deepseek_v3'])
    def test_experts_are_made_layer_by_layer(family):
        """The groups stay small: each is made of one fused tensor, so memory follows the bucket."""
        model = build(family)
        entries = convert_specs(on_meta(model), specs_of(model.state_dict()))
        experts = [entry for entry in entries if '.experts.' in entry.hf_name]
        assert experts and all(entry.combine is not None for entry in experts)
        assert {len(entry.reads) for entry in experts} == {1}
        assert all(entry.source_offset is not None for entry in experts), 'and can be written without gathering it'
        assert all(entry.combine is None for entry in entries if '.experts.' not in entry.hf_name)

    def test_fused_experts_are_read_in_slices():
        model = build('mixtral')
        specs = specs_of(model.state_dict())
        entries = convert_specs(on_meta(model), specs)
        plan = make_plan(entries, list(specs.values()), max_shard_nbytes=10**9, bucket_nbytes=1, in_place=True)
        assert not plan.buckets
        assert sum(len(group.placements) for group in plan.sliced) == len(entries) > len(plan.sliced)

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

else:

    @pytest.mark.parametrize('family', ['mixtral', 'qwen2_vl'])
    def test_names_are_those_of_save_pretrained(family, tmp_path):
        model = build(family)
        model.save_pretrained(tmp_path)
        expected = folder_tensors(tmp_path)
        entries = convert_specs(on_meta(model), specs_of(model.state_dict()))
        assert {entry.hf_name for entry in entries} == set(expected)
        for entry in entries:
            assert torch.equal(model.state_dict()[entry.reads[0].removeprefix(PREFIX)], expected[entry.hf_name])

    def test_a_model_that_cannot_be_saved_is_refused(monkeypatch):
        model = build('llama')
        specs = specs_of(model.state_dict())
        with monkeypatch.context() as patch, pytest.raises(ModelError, match=r'does not write \S*lm_head.weight'):
            patch.setattr(type(model), '_keys_to_ignore_on_save', ['lm_head.weight'])
            convert_specs(on_meta(model), specs)
        monkeypatch.setattr(type(model), 'save_pretrained', mock.Mock(side_effect=OSError('no space')))
        with pytest.raises(ModelError, match=r"save_pretrained of LlamaForCausalLM failed .*OSError\('no space'\)"):
            convert_specs(on_meta(model), specs)
