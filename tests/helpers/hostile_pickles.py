"""Pickles that would run code, hang or exhaust memory under ``pickle.load``, and the messages that refuse them."""

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
    'protocol 0': (b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.", 'never writes'),
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
        + short('__subclasses__') + b'\x86\x85'), ''),
    'dotted name': (proto(named('torch', 'serialization.os.system') + short(TOUCH) + b'\x85R'), ''),
    'a call of a call': (proto(
        named('operator', 'attrgetter') + short('system') + b'\x85R' + SYSTEM + b'\x85R'), 'is called'),
    'a call of data': (proto(short('text') + short(TOUCH) + b'\x85R'), 'is called'),
    'EXT1': (proto(b'\x82\x01' + short(TOUCH) + b'\x85R'), 'never writes'),
    'EXT4': (proto(b'\x84\x01\x00\x00\x00)R'), 'never writes'),
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
    'text persistent id': (proto(b'P../../etc/passwd\n'), 'never writes'),
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
    'text of 2**62 bytes': (proto(b'\x8d' + struct.pack('<Q', 2**62) + b'x'), 'truncated: '),
    'bytes of 2**62 bytes': (proto(b'\x8e' + struct.pack('<Q', 2**62) + b'x'), 'truncated: '),
    'bytearray of 2**40 bytes': (proto(b'\x96' + struct.pack('<Q', 2**40)), 'truncated: '),
    'integer of 2**31 bytes': (proto(b'\x8b' + struct.pack('<i', 2**31 - 1) + b'x'), 'integer'),
    'integer of -1 bytes': (proto(b'\x8b' + struct.pack('<i', -1)), 'integer'),
    'memo index 2**32': (proto(b'Nr' + struct.pack('<I', 2**32 - 1)), ''),
    # --- time and depth
    'nested deep': (proto(b'N' + b'\x85' * 200_000), ''),
    'deep key': (proto(b'}N' + b'\x85' * 10**5 + b'Ns'), 'as a key'),
    'key that doubles 60 times': (proto(b'}N\x85' + b'2\x86' * 60 + b'Ns'), 'as a key'),
    'list in itself': (proto(b']q\x00h\x00a'), ''),
    'dict in itself': (proto(b'}q\x00' + short('me') + b'h\x00s'), ''),
    'copies of copies': (proto(b']q\x00(' + b'N' * 10_000 + b'e0(' + (named('builtins', 'tuple') + b'h\x00\x85R') * 2000
                               + b't'), ''),
    'names of names': (proto(named('builtins', 'getattr') + b'q\x000' + short('x' * 1000) + b'q\x010'
                             + named('a', 'b') + (b'q\x02h\x00h\x02h\x01\x86R') * 5000), 'a name of'),
    'keys of one hash': (proto(
        b'}(' + b''.join(big_int((2**61 - 1) * i) + b'N' for i in range(2, 2000)) + b'u'), 'as a key'),
    # --- damage
    'empty': (b'', 'damaged'),
    'no end': (b'\x80\x02}', 'damaged'),
    'nothing on the stack': (proto(b''), 'damaged'),
    'mark on the stack': (proto(b'('), 'damaged'),
    'pop of nothing': (proto(b'0'), 'mark is missing'),
    'unknown memo': (proto(b'h\x07'), 'damaged'),
    'unknown instruction': (proto(b'\xff'), 'never writes'),
    'text that is not text': (proto(b'X\x01\x00\x00\x00\xff'), 'damaged'),
    'append to a number': (proto(b'K\x01K\x02a'), 'added to a int'),
    'name without end': (proto(b'c' + b'x' * 2000), 'unterminated name'),
}  # fmt: skip
