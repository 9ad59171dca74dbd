"""Which outputs are made from fp32 masters."""

import pytest

from xhf_hooks.planning.masters import specs_with_masters
from xhf_hooks.planning.types import ExportEntry, TensorSpec

TRAINED = TensorSpec('a', (4,), 'BF16', has_master=True)
FROZEN = TensorSpec('b', (4,), 'BF16')
COUNT = TensorSpec('n', (), 'I64')


@pytest.mark.parametrize(
    ('dtype', 'written', 'is_from_master'),
    [
        (None, 'BF16', False),
        ('BF16', 'BF16', False),
        ('F16', 'F16', True),
        ('F32', 'F32', True),
        ('BF16', 'F32', True),  # which the class keeps in fp32
    ],
)
def test_an_output_in_another_dtype_than_in_training(dtype, written, is_from_master):
    specs = [TRAINED, FROZEN, COUNT]
    dtypes = (written, written, 'I64')
    entries = [ExportEntry(s.name, s.shape, code, (s.name,)) for s, code in zip(specs, dtypes, strict=True)]
    found = specs_with_masters(specs, entries, dtype)
    assert [spec.from_master for spec in found] == [is_from_master, False, False]
    assert found[0].dtype == ('F32' if is_from_master else 'BF16')


def test_what_is_not_written_is_not_read():
    assert specs_with_masters([TRAINED], [], 'F32') == [TRAINED]
