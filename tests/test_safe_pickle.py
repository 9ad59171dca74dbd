"""Pickles as data: honest ones come out whole, hostile ones do nothing.

Each hostile pickle would, under pickle.load, leave a file behind, hang, or take all memory. None may do that
here; each is refused in one line that names the file, or is plain data without effect.
"""

from __future__ import annotations

import builtins
import collections
import enum
import os
import pickle
import pickletools
import resource
import struct
import subprocess
import time

import pytest
import torch

from tests.helpers.torch_zip import Call, pickled, write_torch_zip
from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.inert import Global, Inert, as_int
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file

TRACE = '/tmp/xhf_hostile_pickle_ran'
TOUCH = f'touch {TRACE}'
MB = 2**20


def short(text: str) -> bytes:
    return b'X' + struct.pack('<I', len(text)) + text.encode()


def named(module: str, name: str) -> bytes:
    return f'c{module}\n{name}\n'.encode()


def proto(body: bytes) -> bytes:
    return b'\x80\x02' + body + b'.'


SYSTEM = named('os', 'system')
STORAGE = b'(' + short('storage') + named('torch', 'FloatStorage') + short('0') + short('cpu') + b'K\x04tQ'
REBUILD = named('torch._utils', '_rebuild_tensor_v2')


def tensor(
    start: bytes = b'K\x00', shape: bytes = b'K\x04\x85', stride: bytes = b'K\x01\x85', storage=STORAGE
) -> bytes:
    return REBUILD + b'(' + storage + start + shape + stride + b'\x89' + b'}' + b'tR'


def big_int(value: int) -> bytes:
    data = value.to_bytes(40, 'little', signed=True)
    return b'\x8a' + bytes([len(data)]) + data


#: Each with part of the message that refuses it; '' where it is data without effect.
HOSTILE: dict[str, tuple[bytes, str]] = {
    # --- calls of what the file names
    'os.system': (pickled(Call(os.system, TOUCH)), ''),
    'posix.system': (proto(named('posix', 'system') + short(TOUCH) + b'\x85R'), ''),
    'subprocess': (pickled(Call(subprocess.Popen, ['touch', TRACE])), ''),
    'eval': (pickled(Call(builtins.eval, f'__import__("os").system("{TOUCH}")')), ''),
    'exec': (pickled(Call(builtins.exec, f'open("{TRACE}", "w")')), ''),
    'import': (pickled(Call(builtins.__import__, 'antigravity')), ''),
    'open for writing': (pickled(Call(builtins.open, TRACE, 'w')), ''),
    'inside a state dict': (pickled({'state_dict': {'w': Call(os.system, TOUCH)}, 'meta': {}}), ''),
    'as a key': (pickled({Call(os.system, TOUCH): 1}), ''),
    'protocol 4': (pickled(Call(os.system, TOUCH), protocol=4), ''),
    'protocol 0': (b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.", 'never writes'),
    'INST': (proto(b'(' + short(TOUCH) + b'ios\nsystem\n'), ''),
    'OBJ': (proto(b'(' + SYSTEM + short(TOUCH) + b'o'), ''),
    'NEWOBJ': (proto(SYSTEM + short(TOUCH) + b'\x85\x81'), ''),
    'NEWOBJ_EX': (proto(SYSTEM + short(TOUCH) + b'\x85}\x92'), ''),
    'STACK_GLOBAL': (proto(short('os') + short('system') + b'\x93' + short(TOUCH) + b'\x85R'), ''),
    # --- ways around a restricted find_class
    'getattr': (pickled(Call(getattr, os, 'system')) if False else proto(
        named('builtins', 'getattr') + named('os', 'path') + short('system') + b'\x86R' + short(TOUCH) + b'\x85R'), ''),
    'getattr of getattr': (proto(
        named('builtins', 'getattr') + named('torch', 'Size') + short('__class__') + b'\x86R'
        + short('__subclasses__') + b'\x86\x85'), ''),
    'dotted name': (proto(named('torch', 'serialization.os.system') + short(TOUCH) + b'\x85R'), ''),
    'a call of a call': (proto(named('operator', 'attrgetter') + short('system') + b'\x85R' + SYSTEM + b'\x85R'), 'is called'),
    'a call of data': (proto(short('text') + short(TOUCH) + b'\x85R'), 'is called'),
    'EXT1': (proto(b'\x82\x01' + short(TOUCH) + b'\x85R'), 'never writes'),
    'EXT4': (proto(b'\x84\x01\x00\x00\x00)R'), 'never writes'),
    'BUILD on a name': (proto(named('torch', 'Size') + b'}' + short('__new__') + SYSTEM + b'sb'), 'state is given'),
    'BUILD with setstate': (pickled(Call(collections.Counter, state={'__setstate__': Call(os.system, TOUCH)})), ''),
    'BUILD of a dict': (proto(named('collections', 'OrderedDict') + b')R}' + short('get') + SYSTEM + b'sb'), ''),
    'factory of a defaultdict': (proto(named('collections', 'defaultdict') + SYSTEM + b'\x85R' + short(TOUCH) + b'h\x00s'
                                       ), 'damaged'),
    'tensor rebuilt by a stranger': (proto(
        named('torch._tensor', '_rebuild_from_type_v2') + b'(' + SYSTEM + SYSTEM + short(TOUCH) + b'\x85}tR'), ''),
    'reconstructing by loads': (pickled(Call(pickle.loads, pickled(Call(os.system, TOUCH)))), ''),
    'torch.load inside': (proto(named('torch', 'load') + short('/etc/passwd') + b'\x85R'), ''),
    # --- persistent ids
    'storage by a name of code': (proto(b'(' + short('storage') + SYSTEM + short('0') + short('cpu') + b'K\x04tQ'), ''),
    'persistent id in a persistent id': (proto(b'(' + short('storage') + STORAGE + short('0') + short('cpu') + b'K\x04tQ'),
                                         'storage is described'),
    'persistent id of text': (proto(short('../../etc/passwd') + b'Q'), 'persistent id'),
    'text persistent id': (proto(b'P../../etc/passwd\n'), 'never writes'),
    'storage by a path': (proto(b'(' + short('storage') + named('torch', 'FloatStorage') + short('../data.pkl')
                                + short('cpu') + b'K\x04tQ'), 'not in the file'),
    # --- absurd sizes
    'tensor beyond its storage': (proto(tensor(shape=b'K\x05\x85')), 'needs 20 bytes of a storage of 16'),
    'offset beyond its storage': (proto(tensor(start=b'K\x01')), 'needs 20 bytes'),
    'stride beyond its storage': (proto(tensor(shape=b'K\x02\x85', stride=b'K\x04\x85')), 'needs 20 bytes'),
    'tensor of 2**200 elements': (proto(tensor(shape=big_int(2**200) + b'\x85')), 'negative or odd'),
    'product overflow': (proto(tensor(shape=b'J\x00\x00\x00\x7f' * 3 + b'\x87', stride=b'K\x00' * 3 + b'\x87')), ''),
    'negative offset': (proto(tensor(start=b'J\xff\xff\xff\xff')), 'negative'),
    'negative stride': (proto(tensor(stride=b'J\xff\xff\xff\xff\x85')), 'negative'),
    'shape of text': (proto(tensor(shape=short('abc'))), 'no proper shape'),
    'storage larger than the file': (proto(tensor(storage=STORAGE.replace(b'K\x04', b'J\x00\x00\x00\x7f'))), '16 bytes'),
    'tensor without storage': (proto(REBUILD + b'(K\x01K\x02K\x03K\x04tR'), 'no storage'),
    'text of 2**62 bytes': (proto(b'\x8d' + struct.pack('<Q', 2**62) + b'x'), 'wanted'),
    'bytes of 2**62 bytes': (proto(b'\x8e' + struct.pack('<Q', 2**62) + b'x'), 'wanted'),
    'bytearray of 2**40 bytes': (proto(b'\x96' + struct.pack('<Q', 2**40)), 'wanted'),
    'integer of 2**31 bytes': (proto(b'\x8b' + struct.pack('<i', 2**31 - 1) + b'x'), 'integer'),
    'integer of -1 bytes': (proto(b'\x8b' + struct.pack('<i', -1)), 'integer'),
    'memo index 2**32': (proto(b'Nr' + struct.pack('<I', 2**32 - 1)), ''),
    # --- time and depth
    'nested a million deep': (proto(b'N' + b'\x85' * 10**6), ''),
    'deep key': (proto(b'}N' + b'\x85' * 10**5 + b'Ns'), 'as a key'),
    'key that doubles 60 times': (proto(b'}N\x85' + b'2\x86' * 60 + b'Ns'), 'as a key'),
    'list in itself': (proto(b']q\x00h\x00a'), ''),
    'dict in itself': (proto(b'}q\x00' + short('me') + b'h\x00s'), ''),
    'copies of copies': (proto(b']q\x00(' + b'N' * 10_000 + b'e0(' + (named('builtins', 'tuple') + b'h\x00\x85R') * 2000
                               + b't'), 'copies'),
    'names of names': (proto(named('builtins', 'getattr') + b'q\x000' + short('x' * 1000) + b'q\x010'
                             + named('a', 'b') + (b'q\x02h\x00h\x02h\x01\x86R') * 5000), 'copies'),
    'keys of one hash': (proto(b'}(' + b''.join(big_int((2**61 - 1) * i) + b'N' for i in range(2, 2000)) + b'u'), 'as a key'),
    # --- damage
    'empty': (b'', 'damaged'),
    'no end': (b'\x80\x02}', 'damaged'),
    'nothing on the stack': (proto(b''), 'damaged'),
    'mark on the stack': (proto(b'('), 'missing'),
    'pop of nothing': (proto(b'0'), 'damaged'),
    'unknown memo': (proto(b'h\x07'), 'damaged'),
    'unknown instruction': (proto(b'\xff'), 'never writes'),
    'text that is not text': (proto(b'X\x01\x00\x00\x00\xff'), 'damaged'),
    'append to a number': (proto(b'K\x01K\x02a'), 'added to a int'),
    'name without end': (proto(b'c' + b'x' * 2000), 'without end'),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_runs():
    """Without this, a pickle that ran under another test would be blamed on this one."""
    if os.path.exists(TRACE):
        os.remove(TRACE)
    yield
    assert not os.path.exists(TRACE), 'a pickle ran'


def peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile(tmp_path, name):
    data, refusal = HOSTILE[name]
    file = write_torch_zip(tmp_path / 'model.pth', data, {'0': bytes(16)})
    before, started = peak_nbytes(), time.monotonic()
    if refusal:
        with pytest.raises(CheckpointError) as caught:
            load_torch_file(file)
        message = str(caught.value)
        assert refusal in message
        assert message.startswith(f'{file}: ') and '\n' not in message and len(message) < 500
    else:
        load_torch_file(file)
    assert peak_nbytes() - before < 300 * MB
    assert time.monotonic() - started < 60  # those that hang would do so for years


def test_the_hostile_ones_are_hostile(tmp_path):
    """Some of them, in a process of their own, under pickle itself: the tests above can fail."""
    for name in (
        'os.system',
        'posix.system',
        'INST',
        'OBJ',
        'STACK_GLOBAL',
        'protocol 0',
        'protocol 4',
        'open for writing',
    ):
        subprocess.run(['python', '-c', 'import pickle, sys; pickle.load(sys.stdin.buffer)'], input=HOSTILE[name][0])
        assert os.path.exists(TRACE), name
        os.remove(TRACE)


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
        'none': None, 'truth': [True, False], 'numbers': (0, 1, 255, 256, 65536, -1, 2**40, -(2**70), 1.5, float('inf')),
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
    assert found['wrapped'].entries == {'a': 1} and found['wrapped'].state == {'note': 'kept'}
    assert found['dtype'] == Global('torch', 'float32')
    assert repr(found['device']) == '<torch.device>' and found['device'].args == ('cpu',)


def test_stages_of_zero_are_numbers():
    made_by = Global('deepspeed.runtime.zero.config', 'ZeroStageEnum')
    assert as_int(Inert(made_by, (3,))) == 3
    assert as_int(Global(made_by.module, 'ZeroStageEnum.gradients')) == 2  # Python 3.11
    assert as_int(2) == 2
    assert [as_int(v) for v in (True, '3', None, Inert(made_by, ()), Global('x', 'Other.weights'))] == [None] * 5


def test_parameters_and_tensors_with_attributes(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tagged = torch.arange(4, dtype=torch.int16)
    tagged.tag = 'x'
    tagged_parameter = torch.nn.Parameter(torch.ones(2))
    tagged_parameter.ds_id = 7
    found = load(tmp_path, [parameter, tagged, tagged_parameter])
    assert [type(t) for t in found] == [LazyTensor] * 3
    assert [(t.shape, t.dtype) for t in found] == [((2, 3), 'F32'), ((4,), 'I16'), ((2,), 'F32')]


def test_opcodes_of_pickle_are_all_known_or_refused():
    """A new opcode is refused, not skipped."""
    from xhf_hooks.sources.checkpoint.safe_pickle import _CONSTANTS, _HANDLERS

    known = {chr(code) for code in (*_HANDLERS, *_CONSTANTS)} | {'.'}
    refused = {op.name for op in pickletools.opcodes if op.code not in known}
    assert refused == {
        'INT', 'LONG', 'FLOAT', 'STRING', 'UNICODE', 'GET', 'PUT', 'PERSID', 'DICT',
        'EXT1', 'EXT2', 'EXT4', 'NEXT_BUFFER', 'READONLY_BUFFER',
    }  # fmt: skip
