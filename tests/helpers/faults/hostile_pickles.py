"""Pickles that would run code under ``pickle.load``, or change what reads them."""

import builtins
import collections
import os
import struct

from tests.helpers.runs.torch_zip import Call, pickled

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


#: None of them may run anything or change what reads it; each is refused, or data without effect.
HOSTILE: dict[str, bytes] = {
    # --- calls of what the file names
    'os.system': pickled(Call(os.system, TOUCH)),
    'eval': pickled(Call(builtins.eval, f'__import__("os").system("{TOUCH}")')),
    'import': pickled(Call(builtins.__import__, 'antigravity')),
    'as a key': pickled({Call(os.system, TOUCH): 1}),
    'protocol 4': pickled(Call(os.system, TOUCH), protocol=4),
    'protocol 0': b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.",
    'INST': proto(b'(' + short(TOUCH) + b'ios\nsystem\n'),
    'OBJ': proto(b'(' + SYSTEM + short(TOUCH) + b'o'),
    'NEWOBJ': proto(SYSTEM + short(TOUCH) + b'\x85\x81'),
    'NEWOBJ_EX': proto(SYSTEM + short(TOUCH) + b'\x85}\x92'),
    'STACK_GLOBAL': proto(short('os') + short('system') + b'\x93' + short(TOUCH) + b'\x85R'),
    # --- ways around a restricted find_class
    'getattr': proto(
        named('builtins', 'getattr') + named('os', 'path') + short('system') + b'\x86R' + short(TOUCH) + b'\x85R'
    ),
    'getattr of getattr': proto(
        named('builtins', 'getattr')
        + named('torch', 'Size')
        + short('__class__')
        + b'\x86R'
        + short('__subclasses__')
        + b'\x86\x85'
    ),
    'dotted name': proto(named('torch', 'serialization.os.system') + short(TOUCH) + b'\x85R'),
    'a call of a call': proto(named('operator', 'attrgetter') + short('system') + b'\x85R' + SYSTEM + b'\x85R'),
    'EXT1': proto(b'\x82\x01' + short(TOUCH) + b'\x85R'),
    'EXT4': proto(b'\x84\x01\x00\x00\x00)R'),
    'BUILD on a name': proto(named('torch', 'Size') + b'}' + short('__new__') + SYSTEM + b'sb'),
    'BUILD with setstate': pickled(Call(collections.Counter, state={'__setstate__': Call(os.system, TOUCH)})),
    'BUILD of a dict': proto(named('collections', 'OrderedDict') + b')R}' + short('get') + SYSTEM + b'sb'),
    'factory of a defaultdict': proto(
        named('collections', 'defaultdict') + SYSTEM + b'\x85R' + short(TOUCH) + b'h\x00s'
    ),
    'tensor rebuilt by a stranger': proto(
        named('torch._tensor', '_rebuild_from_type_v2') + b'(' + SYSTEM + SYSTEM + short(TOUCH) + b'\x85}tR'
    ),
    # --- persistent ids
    'storage by a name of code': proto(b'(' + short('storage') + SYSTEM + short('0') + short('cpu') + b'K\x04tQ'),
    'persistent id in a persistent id': proto(
        b'(' + short('storage') + STORAGE + short('0') + short('cpu') + b'K\x04tQ'
    ),
    'persistent id of text': proto(short('../../etc/passwd') + b'Q'),
    'text persistent id': proto(b'P../../etc/passwd\n'),
    'storage by a path': proto(
        b'(' + short('storage') + named('torch', 'FloatStorage') + short('../data.pkl') + short('cpu') + b'K\x04tQ'
    ),
    # --- absurd sizes
    'tensor beyond its storage': proto(tensor(shape=b'K\x05\x85')),
    'offset beyond its storage': proto(tensor(start=b'K\x01')),
    'stride beyond its storage': proto(tensor(shape=b'K\x02\x85', stride=b'K\x04\x85')),
    'negative offset': proto(tensor(start=b'J\xff\xff\xff\xff')),
    'negative stride': proto(tensor(stride=b'J\xff\xff\xff\xff\x85')),
    'shape of text': proto(tensor(shape=short('abc'))),
    'storage larger than the file': proto(tensor(storage=STORAGE.replace(b'K\x04', b'J\x00\x00\x00\x7f'))),
    'tensor without storage': proto(REBUILD + b'(K\x01K\x02K\x03K\x04tR'),
    # --- states for what a pickle may call, or what was made
    'BUILD on a function': proto(REBUILD + b'}' + short('__defaults__') + b')sb'),
    'BUILD with slots on a function': proto(REBUILD + b'N}' + short('_make') + SYSTEM + b's\x86b'),
    'BUILD on a class': proto(SYSTEM + b'N}' + short('name') + short('x') + b's\x86b'),
    'BUILD on a class of plain data': proto(named('collections', 'OrderedDict') + b'}' + short('a') + b'Nsb'),
    'BUILD on a tensor': proto(tensor() + b'N}' + short('storage') + short('/etc/passwd') + b's\x86b'),
    'BUILD on a storage': proto(STORAGE + b'}' + short('file') + short('/etc/passwd') + b'sb'),
    'BUILD on an object, by slots': proto(SYSTEM + b')R' + b'N}' + short('__class__') + SYSTEM + b's\x86b'),
    'NEWOBJ of a function': proto(REBUILD + b')\x81'),
    'getattr of a function': proto(named('builtins', 'getattr') + REBUILD + short('__globals__') + b'\x86R'),
    'getattr of an object': proto(named('builtins', 'getattr') + SYSTEM + b')R' + short('__class__') + b'\x86R'),
    'setattr': proto(named('builtins', 'setattr') + b'(' + REBUILD + short('_make') + SYSTEM + b'tR'),
}
