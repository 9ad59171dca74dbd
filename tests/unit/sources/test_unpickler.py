"""Pickles as data: honest ones come out whole, hostile ones do nothing.

Each hostile pickle would, under pickle.load, leave a file behind, or change an object of this process. None may do
that here; each is refused in one line that names the file, or is plain data without effect.
"""

import collections
import os
import sys

import pytest
import torch

from tests.helpers.faults.hostile_pickles import HOSTILE, TRACE
from tests.helpers.runs.torch_zip import write_torch_zip
from xhf_hooks.errors import CheckpointError
from xhf_hooks.offline.checkpoint.torch_file import load_torch_file
from xhf_hooks.offline.checkpoint.unpickler import _CONSTRUCTORS, Inert, _Function, as_int


def functions() -> dict:
    return {name: getattr(found, '_function', None) for name, found in _CONSTRUCTORS.items()}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile(tmp_path, name):
    file = write_torch_zip(tmp_path / 'model.pth', HOSTILE[name], {'0': bytes(16)})
    known, before = dict(_CONSTRUCTORS), functions()
    try:
        load_torch_file(file)
    except CheckpointError as error:
        assert str(error).startswith(f'{file}: ') and '\n' not in str(error) and len(str(error)) < 500
    assert not os.path.exists(TRACE), 'a pickle ran'
    assert known == _CONSTRUCTORS and before == functions()
    assert 'antigravity' not in sys.modules


class Wrapped(dict):
    """As MMEngine's ConfigDict."""


def load(tmp_path, value, protocol=2):
    path = tmp_path / 'honest.pth'
    torch.save(value, path, pickle_protocol=protocol)
    return load_torch_file(path)


@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
def test_plain_data_comes_out_equal(tmp_path, protocol):
    value = {
        'none': None, 'truth': [True, False],
        'numbers': (0, 1, 255, 256, 65536, -1, 2**40, -(2**70), 1.5, float('inf')),
        'text': 'ä' * 300, 'empty': ((), [], {}, ''), 'deep': [{'a': [({'b': 1},)]}],
        'ordered': collections.OrderedDict(a=1, b=2), 'sets': [{1, 2}, frozenset({'x'})], 3: 'three', ('a', 1): 'pair',
        'default': collections.defaultdict(list, {'k': [1]}), 'size': torch.Size([2, 3]), 'dtype': torch.float32,
    }  # fmt: skip
    assert load(tmp_path, value, protocol) == value


def test_strangers_become_inert(tmp_path):
    wrapped = Wrapped(a=1)
    wrapped.note = 'kept'
    found = load(tmp_path, {'wrapped': wrapped, 'device': torch.device('cpu'), 'queue': collections.deque([1])})
    assert isinstance(found['wrapped'], Inert)
    assert dict(found['wrapped']) == {'a': 1} and found['wrapped'].state == {'note': 'kept'}
    assert repr(found['device']) == '<torch.device>' and found['device'].args == ('cpu',)


def test_stages_of_zero_are_numbers():
    stage = type('ZeroStageEnum', (Inert,), {'__slots__': ()})
    assert as_int(stage(3)) == 3
    assert isinstance(_CONSTRUCTORS['builtins', 'getattr'], _Function)
    assert _CONSTRUCTORS['builtins', 'getattr'](stage, 'gradients') == 2  # Python 3.11
    assert [as_int(v) for v in (2, True, '3', None, stage(), 2**63)] == [2, None, None, None, None, None]


def test_parameters_and_tensors_with_attributes(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tagged = torch.arange(4, dtype=torch.int16)
    tagged.tag = 'x'
    tagged_parameter = torch.nn.Parameter(torch.ones(2))
    tagged_parameter.ds_id = 7
    found = load(tmp_path, [parameter, tagged, tagged_parameter])
    for tensor, expected in zip(found, [parameter, tagged, tagged_parameter], strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
