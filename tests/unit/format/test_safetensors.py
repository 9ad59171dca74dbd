"""What we lay out is what the safetensors library writes, byte for byte."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from xhf_hooks.errors import TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, dtype_code, host_bytes
from xhf_hooks.format.safetensors import DTYPE_NBYTES, build_header

CODES = [code for code in DTYPE_NBYTES if code in TORCH_DTYPES]


def random_tensor(code: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes, NaNs among them, so that a changed bit of any kind shows."""
    if code == 'BOOL':
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    n_elements = torch.Size(shape).numel()
    raw = torch.randint(
        256, (n_elements * DTYPE_NBYTES[code],), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(TORCH_DTYPES[code]).reshape(shape)


def our_file(tensors: dict[str, torch.Tensor]) -> bytes:
    header, entries = build_header([(n, dtype_code(t.dtype), tuple(t.shape)) for n, t in tensors.items()])
    data = bytearray(header)
    for entry in entries:
        assert entry.start == len(data)
        data += host_bytes(tensors[entry.name])
        assert entry.end == len(data)
    return bytes(data)


def library_file(tensors: dict[str, torch.Tensor], path: Path) -> bytes:
    save_file(tensors, path, metadata={'format': 'pt'})
    return path.read_bytes()


names = st.text(
    st.one_of(st.sampled_from(string.printable), st.characters(blacklist_categories=['Cs'])), max_size=12
).filter(lambda name: name != '__metadata__')
tensor_kinds = st.tuples(st.sampled_from(CODES), st.lists(st.integers(0, 4), max_size=3).map(tuple))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, tensor_kinds, min_size=1, max_size=12))
@example({'z': ('F32', ()), 'a': ('BOOL', (3,)), 'é': ('BF16', (0,)), 'A': ('F32', (2, 2))})
def test_any_set_of_tensors(tmp_path, kinds):
    tensors = {name: random_tensor(code, shape, seed) for seed, (name, (code, shape)) in enumerate(kinds.items())}
    ours = our_file(tensors)
    assert ours == library_file(tensors, tmp_path / 'library')
    (tmp_path / 'ours').write_bytes(ours)
    loaded = load_file(tmp_path / 'ours')
    assert {n: bytes(host_bytes(t)) for n, t in loaded.items()} == {n: bytes(host_bytes(t)) for n, t in tensors.items()}


def test_a_type_without_code_is_refused():
    with pytest.raises(TensorError, match='complex128'):
        dtype_code(torch.complex128)
