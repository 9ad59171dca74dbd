"""What we lay out is what the safetensors library writes, byte for byte."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from xhf_hooks.errors import IncompleteError, TensorError
from xhf_hooks.format.dtypes import TORCH_DTYPES, dtype_code, host_bytes
from xhf_hooks.format.safetensors import DTYPE_NBYTES, build_header, check_file

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


@pytest.mark.parametrize('code', CODES)
def test_one_element_type(code, tmp_path):
    tensors = {'w': random_tensor(code, (3, 5)), 'scalar': random_tensor(code, ()), 'none': random_tensor(code, (0, 2))}
    assert TORCH_DTYPES[code].itemsize == DTYPE_NBYTES[code]
    assert our_file(tensors) == library_file(tensors, tmp_path / 'f')


@pytest.mark.parametrize(
    'name', ['ü.weight', '权重', '😀', '\uffff', 'quote"back\\slash', 'new\nline', 'nul\x00', 'del\x7f', '\u2028', '']
)
def test_names_that_need_care_in_json(name, tmp_path):
    tensors = {name: random_tensor('F32', (2,)), 'a': random_tensor('F32', (2,)), '~': random_tensor('F32', (1,))}
    assert our_file(tensors) == library_file(tensors, tmp_path / 'f')


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


@pytest.fixture
def written(tmp_path):
    """A good file with its header and size."""
    tensors = {'a': random_tensor('F32', (4,)), 'b': random_tensor('I64', ())}
    data = our_file(tensors)
    header, _ = build_header([('a', 'F32', (4,)), ('b', 'I64', ())])
    path = tmp_path / 'model.safetensors'
    path.write_bytes(data)
    return path, header, len(data)


def test_check_file_missing(written):
    path, header, nbytes = written
    path.unlink()
    with pytest.raises(IncompleteError, match='missing') as caught:
        check_file(path, header, nbytes)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize('change', [-1, 1], ids=['short', 'long'])
def test_check_file_of_other_size(written, change):
    path, header, nbytes = written
    path.write_bytes((path.read_bytes() + b'x')[: nbytes + change])
    with pytest.raises(IncompleteError, match=f'expected {nbytes} bytes, found {nbytes + change}'):
        check_file(path, header, nbytes)


@pytest.mark.parametrize('at', [0, 8, -1], ids=['length', 'brace', 'last'])
def test_check_file_with_another_header(written, at):
    path, header, nbytes = written
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(header) - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IncompleteError, match='header'):
        check_file(path, header, nbytes)
