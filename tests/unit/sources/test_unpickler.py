"""Pickles as data: honest ones come out whole, hostile ones do nothing.

Each hostile pickle would, under pickle.load, leave a file behind, or change an object of this process. None may do
that here; each is refused in one line that names the file, or is plain data without effect.
"""

from __future__ import annotations

import collections
import enum
import os

import pytest
import torch

from tests.helpers.hostile_pickles import HOSTILE, TRACE
from tests.helpers.torch_zip import write_torch_zip
from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file
from xhf_hooks.sources.checkpoint.unpickler import _CONSTRUCTORS, Global, Inert, LazyTensor, as_int

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture(autouse=True)
def nothing_runs():
    """Without this, a pickle that ran under another test would be blamed on this one."""
    if os.path.exists(TRACE):
        os.remove(TRACE)
    yield
    assert not os.path.exists(TRACE), 'a pickle ran'


@pytest.fixture(autouse=True)
def nothing_changes():
    """What a pickle may call is the same for the next one."""
    before = {name: (found, found._make) for name, found in _CONSTRUCTORS.items()}
    yield
    assert before == {name: (found, found._make) for name, found in _CONSTRUCTORS.items()}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile(tmp_path, name):
    data, refusal = HOSTILE[name]
    file = write_torch_zip(tmp_path / 'model.pth', data, {'0': bytes(16)})
    if refusal:
        with pytest.raises(CheckpointError) as caught:
            load_torch_file(file)
        message = str(caught.value)
        assert refusal in message
        assert message.startswith(f'{file}: ') and '\n' not in message and len(message) < 500
    else:
        load_torch_file(file)


def test_there_are_enough():
    assert len(HOSTILE) >= 60


class Stage(enum.IntEnum):
    """As DeepSpeed has it."""

    one = 1


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
        'default': collections.defaultdict(list, {'k': [1]}), 'size': torch.Size([2, 3]),
    }  # fmt: skip
    assert load(tmp_path, value, protocol) == value


def test_one_object_stays_one(tmp_path):
    inner = [1]
    found = load(tmp_path, {'a': inner, 'b': inner})
    assert found['a'] is found['b']


def test_strangers_become_inert(tmp_path):
    wrapped = Wrapped(a=1)
    wrapped.note = 'kept'
    found = load(tmp_path, {'wrapped': wrapped, 'dtype': torch.float32, 'device': torch.device('cpu')})
    assert isinstance(found['wrapped'], Inert)
    assert dict(found['wrapped']) == {'a': 1} and found['wrapped'].state == {'note': 'kept'}
    assert found['dtype'] == Global('torch', 'float32')
    assert repr(found['device']) == '<torch.device>' and found['device'].args == ('cpu',)


def test_stages_of_zero_are_numbers():
    made_by = Global('deepspeed.runtime.zero.config', 'ZeroStageEnum')
    assert as_int(made_by(3)) == 3
    assert as_int(Global(made_by.module, 'ZeroStageEnum.gradients')) == 2  # Python 3.11
    assert as_int(2) == 2
    assert [as_int(v) for v in (True, '3', None, made_by(), Global('x', 'Other.weights'), 2**63)] == [None] * 6


def test_dicts_of_other_classes_are_dicts():
    """As MMEngine's ConfigDict, which is made from a dict."""
    made = Global('mmengine.config.config', 'ConfigDict')({'a': [1]})
    assert isinstance(made, dict) and made.get('a') == [1]


def test_parameters_and_tensors_with_attributes(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tagged = torch.arange(4, dtype=torch.int16)
    tagged.tag = 'x'
    tagged_parameter = torch.nn.Parameter(torch.ones(2))
    tagged_parameter.ds_id = 7
    found = load(tmp_path, [parameter, tagged, tagged_parameter])
    assert [type(t) for t in found] == [LazyTensor] * 3
    assert [(t.shape, t.dtype) for t in found] == [((2, 3), 'F32'), ((4,), 'I16'), ((2,), 'F32')]
