"""Pickles that would run code under ``pickle.load``, or change what reads them, and the messages that refuse them."""

from __future__ import annotations

import builtins
import collections
import os
import pickle
import struct
import subprocess

from tests.helpers.torch_zip import Call, pickled

#: The file that the pickles that run code would create.
#: A name for this process only, since two test runs may be active at once.
TRACE = f'/tmp/xhf_hostile_pickle_ran_{os.getpid()}'
TOUCH = f'touch {TRACE}'


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


#: Each with part of the message that refuses it; '' if it is data without effect.
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
    'protocol 0': (b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.", ''),
    'INST': (proto(b'(' + short(TOUCH) + b'ios\nsystem\n'), ''),
    'OBJ': (proto(b'(' + SYSTEM + short(TOUCH) + b'o'), ''),
    'NEWOBJ': (proto(SYSTEM + short(TOUCH) + b'\x85\x81'), ''),
    'NEWOBJ_EX': (proto(SYSTEM + short(TOUCH) + b'\x85}\x92'), ''),
    'STACK_GLOBAL': (proto(short('os') + short('system') + b'\x93' + short(TOUCH) + b'\x85R'), ''),
    # --- ways around a restricted find_class
    'getattr': (proto(
        named('builtins', 'getattr') + named('os', 'path') + short('system') + b'\x86R' + short(TOUCH) + b'\x85R'), ''),
    'getattr of getattr': (proto(
        named('builtins', 'getattr') + named('torch', 'Size') + short('__class__') + b'\x86R'
        + short('__subclasses__') + b'\x86\x85'), 'an attribute of a'),
    'dotted name': (proto(named('torch', 'serialization.os.system') + short(TOUCH) + b'\x85R'), ''),
    'a call of a call': (proto(
        named('operator', 'attrgetter') + short('system') + b'\x85R' + SYSTEM + b'\x85R'), 'damaged'),
    'a call of data': (proto(short('text') + short(TOUCH) + b'\x85R'), 'damaged'),
    'EXT1': (proto(b'\x82\x01' + short(TOUCH) + b'\x85R'), 'damaged'),
    'EXT4': (proto(b'\x84\x01\x00\x00\x00)R'), 'damaged'),
    'BUILD on a name': (proto(named('torch', 'Size') + b'}' + short('__new__') + SYSTEM + b'sb'), 'state is given'),
    'BUILD with setstate': (pickled(Call(collections.Counter, state={'__setstate__': Call(os.system, TOUCH)})), ''),
    'BUILD of a dict': (proto(named('collections', 'OrderedDict') + b')R}' + short('get') + SYSTEM + b'sb'), ''),
    'factory of a defaultdict': (proto(
        named('collections', 'defaultdict') + SYSTEM + b'\x85R' + short(TOUCH) + b'h\x00s'
                                       ), 'damaged'),
    'tensor rebuilt by a stranger': (proto(
        named('torch._tensor', '_rebuild_from_type_v2') + b'(' + SYSTEM + SYSTEM + short(TOUCH) + b'\x85}tR'), ''),
    'reconstructing by loads': (pickled(Call(pickle.loads, pickled(Call(os.system, TOUCH)))), ''),
    'torch.load inside': (proto(named('torch', 'load') + short('/etc/passwd') + b'\x85R'), ''),
    # --- persistent ids
    'storage by a name of code': (proto(b'(' + short('storage') + SYSTEM + short('0') + short('cpu') + b'K\x04tQ'), ''),
    'persistent id in a persistent id': (proto(
        b'(' + short('storage') + STORAGE + short('0') + short('cpu') + b'K\x04tQ'),
                                         'storage without type'),
    'persistent id of text': (proto(short('../../etc/passwd') + b'Q'), 'persistent id'),
    'text persistent id': (proto(b'P../../etc/passwd\n'), 'persistent id'),
    'storage by a path': (proto(b'(' + short('storage') + named('torch', 'FloatStorage') + short('../data.pkl')
                                + short('cpu') + b'K\x04tQ'), 'not in the file'),
    # --- absurd sizes
    'tensor beyond its storage': (proto(tensor(shape=b'K\x05\x85')), 'needs 20 bytes, but its storage has 16'),
    'offset beyond its storage': (proto(tensor(start=b'K\x01')), 'needs 20 bytes'),
    'stride beyond its storage': (proto(tensor(shape=b'K\x02\x85', stride=b'K\x04\x85')), 'needs 20 bytes'),
    'tensor of 2**200 elements': (proto(tensor(shape=big_int(2**200) + b'\x85')), 'negative or too large'),
    'product overflow': (proto(tensor(shape=b'J\x00\x00\x00\x7f' * 3 + b'\x87', stride=b'K\x00' * 3 + b'\x87')), ''),
    'negative offset': (proto(tensor(start=b'J\xff\xff\xff\xff')), 'negative'),
    'negative stride': (proto(tensor(stride=b'J\xff\xff\xff\xff\x85')), 'negative'),
    'shape of text': (proto(tensor(shape=short('abc'))), 'invalid shape'),
    'storage larger than the file': (proto(
        tensor(storage=STORAGE.replace(b'K\x04', b'J\x00\x00\x00\x7f'))), '16 bytes'),
    'tensor without storage': (proto(REBUILD + b'(K\x01K\x02K\x03K\x04tR'), 'without a storage'),
    'text of 2**62 bytes': (proto(b'\x8d' + struct.pack('<Q', 2**62) + b'x'), 'damaged'),
    'bytes of 2**62 bytes': (proto(b'\x8e' + struct.pack('<Q', 2**62) + b'x'), 'damaged'),
    'bytearray of 2**40 bytes': (proto(b'\x96' + struct.pack('<Q', 2**40)), 'damaged'),
    'integer of 2**31 bytes': (proto(b'\x8b' + struct.pack('<i', 2**31 - 1) + b'x'), 'integer'),
    'integer of -1 bytes': (proto(b'\x8b' + struct.pack('<i', -1)), 'integer'),
    # --- data without end
    'list in itself': (proto(b']q\x00h\x00a'), ''),
    'dict in itself': (proto(b'}q\x00' + short('me') + b'h\x00s'), ''),
    # --- states for what a pickle may call, or what was made
    'BUILD on a function': (proto(REBUILD + b'}' + short('__defaults__') + b')sb'), 'state is given to a name'),
    'BUILD with slots on a function': (
        proto(REBUILD + b'N}' + short('_make') + SYSTEM + b's\x86b'), 'state is given to a name'),
    'BUILD on a class': (proto(SYSTEM + b'N}' + short('name') + short('x') + b's\x86b'), 'damaged'),
    'BUILD on a class of plain data': (proto(named('collections', 'OrderedDict') + b'}' + short('a') + b'Nsb'),
                                       'state is given to a name'),
    'BUILD on a tensor': (proto(tensor() + b'N}' + short('storage') + short('/etc/passwd') + b's\x86b'),
                          'state is given to a LazyTensor'),
    'BUILD on a storage': (proto(STORAGE + b'}' + short('file') + short('/etc/passwd') + b'sb'),
                           'state is given to a Storage'),
    'BUILD on an object, by slots': (
        proto(SYSTEM + b')R' + b'N}' + short('__class__') + SYSTEM + b's\x86b'), ''),
    'NEWOBJ of a function': (proto(REBUILD + b')\x81'), 'damaged'),
    'getattr of a function': (
        proto(named('builtins', 'getattr') + REBUILD + short('__globals__') + b'\x86R'), 'an attribute of a'),
    'getattr of an object': (
        proto(named('builtins', 'getattr') + SYSTEM + b')R' + short('__class__') + b'\x86R'), 'an attribute of a'),
    'setattr': (proto(named('builtins', 'setattr') + b'(' + REBUILD + short('_make') + SYSTEM + b'tR'), ''),
    # --- damage
    'empty': (b'', 'damaged'),
    'no end': (b'\x80\x02}', 'damaged'),
    'nothing on the stack': (proto(b''), 'damaged'),
    'mark on the stack': (proto(b'('), 'damaged'),
    'pop of nothing': (proto(b'0'), 'damaged'),
    'unknown memo': (proto(b'h\x07'), 'damaged'),
    'unknown instruction': (proto(b'\xff'), 'damaged'),
    'text that is not text': (proto(b'X\x01\x00\x00\x00\xff'), 'damaged'),
    'append to a number': (proto(b'K\x01K\x02a'), 'damaged'),
    'name without end': (proto(b'c' + b'x' * 2000), 'damaged'),
}  # fmt: skip
