"""What a conversion of weights must not do; that it gives the right bytes is shown by tests/distributed/test_zoo."""

from __future__ import annotations

from importlib import util

import pytest
import torch

from tests.helpers.models.zoo import build
from xhf_hooks.errors import ModelError
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
