"""Mutations of pickles that follow the grammar: values, counts, nesting, sharing, names. Each has a number."""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

#: Largest result; a mutation that would exceed it is not applied.
MOST_NBYTES = 48 * 10**6
_MOST_PARSED_NBYTES = 10**6

#: The instructions that make one value: the first, and one past the last.
Span = tuple[int, int]


@dataclass
class Program:
    """A pickle cut into its instructions.

    Attributes:
        code: The bytes of each instruction.
        names: The names of their opcodes.
        values: Spans of instructions that push one value.
        entries: Spans that push a key and its value.
        numbers, texts, globals, puts, gets: Indices of such instructions.
    """

    code: list[bytes]
    names: list[str]
    values: list[Span] = field(default_factory=list)
    entries: list[Span] = field(default_factory=list)

    def places(self, *names: str) -> list[int]:
        return [at for at, name in enumerate(self.names) if name in names]

    def bytes_of(self, span: Span) -> bytes:
        return b''.join(self.code[span[0] : span[1]])


def parse(data: bytes) -> Program:
    """Cut a pickle, and find which instructions make which value.

    Raises:
        ValueError: It is not a pickle.
    """
    found = [(opcode, at) for opcode, _, at in pickletools.genops(data)]
    ends = [at for _, at in found[1:]] + [found[-1][1] + 1]
    program = Program(
        [data[at:end] for (_, at), end in zip(found, ends, strict=True)], [opcode.name for opcode, _ in found]
    )
    stack: list[int | None] = []  # where each value starts; None is a mark
    for at, (opcode, _) in enumerate(found):
        starts = [at]
        if pickletools.markobject in opcode.stack_before:
            items: list[int] = []
            while stack and (start := stack.pop()) is not None:
                items.append(start)
            items.reverse()
            starts += items
            if opcode.name == 'SETITEMS':
                program.entries += _pairs(items, at)
            taken = opcode.stack_before.index(pickletools.markobject)
            starts = [items[0] - 1 if items else at, *starts]  # the mark itself
        else:
            taken = len(opcode.stack_before)
            if opcode.name == 'SETITEM' and len(stack) >= 2 and stack[-2] is not None:
                program.entries.append((stack[-2], at))
        for _ in range(taken):
            if stack and (start := stack.pop()) is not None:
                starts.append(start)
        for pushed in opcode.stack_after:
            if pushed is pickletools.markobject:
                stack.append(None)
            else:
                stack.append(min(starts))
                program.values.append((min(starts), at + 1))
    return program


def _pairs(starts: list[int], end: int) -> list[Span]:
    stops = [*starts[2::2], end]
    return list(zip(starts[::2], stops, strict=False))


def mutated_pickle(data: bytes, number: int) -> bytes:
    """One to three edits of a pickle; the result may not be a pickle."""
    rng = random.Random(number)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if len(data) > _MOST_PARSED_NBYTES:
            break
        try:
            program = parse(data)
        except (ValueError, IndexError, UnicodeDecodeError):  # caused by the previous edit
            break
        edited = rng.choice(_EDITS)(program, rng)
        if edited is not None and len(edited) <= MOST_NBYTES:
            data = edited
    return data


# --- edits; each returns the new pickle, or None if there is nothing to edit ---


def _many(rng: random.Random) -> int:
    """A number from 10 to 20 million; large ones are rare."""
    return int(10 ** min(7.3, 1 + rng.expovariate(0.6)))


def _spliced(program: Program, span: Span, new: bytes) -> bytes:
    return b''.join([*program.code[: span[0]], new, *program.code[span[1] :]])


def _any_value(program: Program, rng: random.Random) -> Span:
    return rng.choice(program.values)


def _repeat(program: Program, rng: random.Random) -> bytes | None:
    """Repeat a value, an entry or any run of instructions many times."""
    count = _many(rng)
    kind = rng.randrange(4)
    if kind == 0 and program.entries:
        span = rng.choice(program.entries)
    elif kind == 1:
        start = rng.randrange(len(program.code))
        span = (start, min(len(program.code), start + rng.randint(1, 12)))
    else:
        span = _any_value(program, rng)
    what = program.bytes_of(span)
    count = min(count, MOST_NBYTES // max(1, len(what)))
    if kind == 3:
        return _spliced(program, span, what + (what + b'0') * (count - 1))  # and each is dropped
    return _spliced(program, span, what * count)


def _collect(program: Program, rng: random.Random) -> bytes | None:
    """Replace a value with a container of very many small ones."""
    small = rng.choice([b'N', b'K\x07', b']', b'}', b')', b'\x8f', b'G\x3f\xf0\0\0\0\0\0\0', b'h\x00', b']q\xff'])
    count, kind = _many(rng), rng.randrange(5)
    if kind == 0:
        new = b'](' + small * count + b'e'
    elif kind == 1:
        new = b'(' + small * count + b't'
    elif kind == 2:
        count = min(count, 10**6)
        new = b'}(' + b''.join(b'J' + struct.pack('<i', i) + small for i in range(count)) + b'u'
    elif kind == 3:
        period = (2**61 - 1) << rng.choice([0, 1, 8])
        keys = (period * i for i in range(1, min(count, 10**5)))  # all have the same hash
        new = b'}(' + b''.join(_long(key) + b'N' for key in keys) + b'u'
    else:
        new = b']' + (small + b'a') * count
    return _spliced(program, _any_value(program, rng), new)


def _nest(program: Program, rng: random.Random) -> bytes | None:
    """Nest a value in very many containers, or in copies of itself."""
    span, depth = _any_value(program, rng), _many(rng)
    what = program.bytes_of(span)
    kind = rng.randrange(5)
    if kind == 0:
        new = what + b'\x85' * depth
    elif kind == 1:
        new = b']' * depth + what + b'a' * depth
    elif kind == 2:
        new = b'}N' * depth + what + b's' * depth
    elif kind == 3:
        new = what + b'2\x86' * min(depth, 10**5)  # (x, x) of (x, x) of ...
    else:
        laugh = b'q\xfe0](' + b'h\xfe' * 10 + b'e'
        new = what + laugh * min(depth, 1000)
    return _spliced(program, span, new)


def _share(program: Program, rng: random.Random) -> bytes | None:
    """Change a memo index, share a value, or put a container into itself."""
    puts, gets = program.places('BINPUT', 'LONG_BINPUT'), program.places('BINGET', 'LONG_BINGET')
    kind = rng.randrange(4)
    if kind == 0 and puts and gets:
        at = rng.choice(puts + gets)
        index = rng.choice([0, 1, 5, 255, 2**31, 2**32 - 1, _index(program.code[rng.choice(puts)])])
        letter = b'r' if at in puts else b'j'
        return _spliced(program, (at, at + 1), letter + struct.pack('<I', index))
    if kind == 1 and puts:
        index = _index(program.code[rng.choice(puts)])
        return _spliced(program, _any_value(program, rng), b'j' + struct.pack('<I', index))
    if not puts:
        return None
    at = rng.choice(puts)
    me = b'j' + struct.pack('<I', _index(program.code[at]))
    before = program.names[at - 1]
    many = rng.choice([1, 1, 3, 1000])
    if before == 'EMPTY_LIST':
        new = (me + b'a') * many
    elif before == 'EMPTY_DICT':
        new = b''.join(_text(f'me{i}') + me + b's' for i in range(many))
    else:
        new = b'0' + me
    return _spliced(program, (at, at + 1), program.code[at] + new)


def _swap(program: Program, rng: random.Random) -> bytes | None:
    """Replace a value with one of another kind."""
    new = program.bytes_of(_any_value(program, rng)) if rng.random() < 0.4 else rng.choice(_CANNED)
    span = _any_value(program, rng)
    return _spliced(program, span, new)


def _number(program: Program, rng: random.Random) -> bytes | None:
    """Replace a number with an extreme one."""
    places = program.places('BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT')
    if not places:
        return None
    at = rng.choice(places)
    old = program.code[at]
    kind = rng.randrange(3)
    if kind == 0 and program.names[at] in _INTS:
        value = _INTS[program.names[at]](old)
        new = _long(rng.choice([value + 1, value - 1, value * 2, -value, value * 10**9, value // 2]))
    elif kind == 1:
        new = b'G' + struct.pack('>d', rng.choice([0.0, -1.0, 1e308, float('nan'), float('inf'), 0.5]))
    else:
        new = _long(rng.choice(_EXTREMES))
    return _spliced(program, (at, at + 1), new)


def _key(program: Program, rng: random.Random) -> bytes | None:
    """Replace or spoil a text or copy another one; repeat, remove or swap entries."""
    texts = program.places('BINUNICODE', 'SHORT_BINUNICODE')
    kind = rng.randrange(6)
    if kind == 0 and program.entries:
        span = rng.choice(program.entries)
        return _spliced(program, span, b'')
    if kind == 1 and len(program.entries) > 1:
        one, other = sorted(rng.sample(program.entries, 2))
        if one[1] <= other[0]:
            parts = [program.bytes_of((0, one[0])), program.bytes_of(other), program.bytes_of((one[1], other[0]))]
            return b''.join([*parts, program.bytes_of(one), program.bytes_of((other[1], len(program.code)))])
    if not texts:
        return None
    at = rng.choice(texts)
    if kind == 2:
        new = program.code[rng.choice(texts)]
    elif kind == 3:
        new = _text(rng.choice(_HOSTILE_TEXTS))
    else:
        old = _decoded(program.code[at])
        new = _text(rng.choice([f'{old}x', old[:-1], f'{old}.{old}', f'module.{old}', old.upper(), f'{old}\n{old}']))
    return _spliced(program, (at, at + 1), new)


def _global(program: Program, rng: random.Random) -> bytes | None:
    """Replace the name of a class or function."""
    places = program.places('GLOBAL')
    if not places:
        return None
    return _spliced(program, (at := rng.choice(places), at + 1), b'c' + rng.choice(_GLOBALS))


def _shuffle(program: Program, rng: random.Random) -> bytes | None:
    """Swap, remove or move instructions."""
    code = list(program.code)
    one, other = rng.randrange(len(code)), rng.randrange(len(code))
    kind = rng.randrange(3)
    if kind == 0:
        code[one], code[other] = code[other], code[one]
    elif kind == 1:
        del code[one]
    else:
        code.insert(other, code[one])
    return b''.join(code)


_EDITS: list[Callable[[Program, random.Random], bytes | None]] = [
    _repeat, _collect, _nest, _share, _share, _swap, _swap, _number, _number, _key, _key, _global, _shuffle,
]  # fmt: skip

# --- instructions ---

_INTS: dict[str, Callable[[bytes], int]] = {
    'BININT': lambda code: struct.unpack('<i', code[1:])[0],
    'BININT1': lambda code: code[1],
    'BININT2': lambda code: struct.unpack('<H', code[1:])[0],
    'LONG1': lambda code: int.from_bytes(code[2:], 'little', signed=True),
}
_EXTREMES = [0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 2**5000]
_HOSTILE_TEXTS = [
    '', '\n', '\x1b[2J\x1b[31mfine', 'a\0b', '\ud800', '../../../etc/passwd', '/etc/passwd', 'x' * 10**5, '\n' * 10**5,
    '%s%n{0}', '0', 'zero_stage', 'module', 'state_dict', 'ema_state_dict', 'optimizer', '.', 'llm.', '\u202egnp',
    '9' * 5000,
]  # fmt: skip
_GLOBALS = [
    b'os\nsystem\n', b'builtins\neval\n', b'builtins\ngetattr\n', b'builtins\nset\n', b'builtins\ndict\n',
    b'collections\nOrderedDict\n', b'collections\ndefaultdict\n', b'collections\nCounter\n', b'torch\nSize\n',
    b'torch\nFloatStorage\n', b'torch\nBFloat16Storage\n', b'torch\nHalfStorage\n', b'torch\nByteStorage\n',
    b'torch\nQInt8Storage\n', b'torch\nfloat32\n', b'torch._utils\n_rebuild_tensor_v2\n', b'torch\ndevice\n',
    b'torch._utils\n_rebuild_parameter\n', b'torch._utils\n_rebuild_sparse_tensor\n', b'numpy\nndarray\n',
    b'torch._utils\n_rebuild_meta_tensor_no_storage\n', b'tests\nno_such\x1b[2J\n', b'x' * 900 + b'\ny\n',
]  # fmt: skip


def _long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, 'little', signed=True)
    return b'\x8a' + bytes([len(data)]) + data if len(data) < 256 else b'\x8b' + struct.pack('<i', len(data)) + data


def _text(text: str) -> bytes:
    data = text.encode('utf-8', 'surrogatepass')
    return b'X' + struct.pack('<I', len(data)) + data


def _decoded(code: bytes) -> str:
    return code[5 if code[:1] == b'X' else 2 :].decode('utf-8', 'surrogatepass')


def _index(code: bytes) -> int:
    return code[1] if len(code) == 2 else struct.unpack('<I', code[1:])[0]


_CANNED = [
    b'N', b'\x88', b'\x89', b'K\x00', b'K\x07', _long(-1), _long(2**64), b'G\x7f\xf8\0\0\0\0\0\0', _text(''),
    _text('F32'),
    b'C\x01x', b')', b'K\x00\x85', b']', b'}', b'\x8f', b'(N\x91', b'](K\x01K\x02e', b'}' + _text('a') + b'Ns',
    b'ccollections\nOrderedDict\n)R', b'ctorch\nSize\n(K\x02t\x85R', b'ctorch\nfloat16\n', b'cos\nsystem\n', b'h\x00',
]  # fmt: skip
