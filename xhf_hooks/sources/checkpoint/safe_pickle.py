"""Reads a pickle as data. Nothing is imported, called, or given to what it names.

A machine of our own instead of a ``pickle.Unpickler`` whose ``find_class`` is restricted: that one still
calls what lies on its stack, takes objects from ``copyreg``'s extension cache, sets attributes on what
``find_class`` returned, hashes keys of any depth, and reserves memory for any memo index. The opcodes are
those of ``pickletools``, from protocol 2 on (what ``torch.save`` writes) and GLOBAL.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from xhf_hooks.sources.checkpoint.build import Builder, UnsafePickle, as_key, kind_of
from xhf_hooks.sources.checkpoint.inert import Global, Inert
from xhf_hooks.sources.checkpoint.tensors import BadTensor, LazyTensor

#: Far beyond real checkpoints (about 60 instructions a parameter), and still less than a GB of objects.
MAX_INSTRUCTIONS = 20_000_000
_MAX_INT_NBYTES = 1024
_MARK = object()


def load_pickle(
    data: bytes | memoryview, persistent: Callable[[Any], Any], start: int = 0, limit: int = MAX_INSTRUCTIONS
) -> tuple[Any, int]:
    """Read one pickle.

    Args:
        persistent: Turns a persistent id (data, unchecked) into an object.
        start: Where in ``data`` it begins.
        limit: Instructions.

    Returns:
        The object: plain values and containers, :class:`LazyTensor`, :class:`Global` and :class:`Inert`. And
        the position behind the pickle.

    Raises:
        UnsafePickle: It ends early, has unknown instructions, or uses more than it may.
    """
    machine = _Machine(memoryview(data), persistent, start, limit)
    try:
        return machine.run(), machine.position
    except (UnsafePickle, BadTensor) as error:
        raise UnsafePickle(str(error)) from error
    # What Python raises on an instruction whose operands are not there or of another kind
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise UnsafePickle(f'damaged near byte {machine.position} ({type(error).__name__})') from error


class _Machine:
    def __init__(self, data: memoryview, persistent: Callable[[Any], Any], start: int, limit: int) -> None:
        self._data, self._persistent, self._limit = data, persistent, limit
        self.position = start
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._builder = Builder(max_copies=len(data) + 1000)

    def run(self) -> Any:
        stack, left = self._stack, self._limit
        while True:
            opcode = self._data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                return self._pop()
            left -= 1
            if left < 0:
                raise UnsafePickle(f'more than {self._limit} instructions')
            constant = _CONSTANTS.get(opcode, _MARK)
            if constant is not _MARK:
                stack.append(constant)
                continue
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise UnsafePickle(f'instruction {bytes([opcode])!r}, which torch.save never writes')
            handler(self)

    # --- what is read ---

    def _take(self, nbytes: int) -> memoryview:
        end = self.position + nbytes
        if end > len(self._data):
            raise UnsafePickle(f'{nbytes} bytes wanted at byte {self.position}, {len(self._data)} in all')
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        window = bytes(self._data[self.position : self.position + 1000])
        end = window.find(b'\n')
        if end < 0:
            raise UnsafePickle(f'a name without end at byte {self.position}')
        self.position += end + 1
        return window[:end].decode()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise UnsafePickle('an object is missing')
        return value

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise UnsafePickle('an object is missing')
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        found: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            found.append(value)
        found.reverse()
        return found

    # --- instructions ---

    def _proto(self) -> None:
        self._take(1)

    def _frame(self) -> None:
        self._number('<Q')  # only a hint

    def _long(self, layout: str) -> None:
        nbytes = self._number(layout)
        if not 0 <= nbytes <= _MAX_INT_NBYTES:
            raise UnsafePickle(f'an integer of {nbytes} bytes')
        self._push(int.from_bytes(self._take(nbytes), 'little', signed=True))

    def _text(self, layout: str, encoding: str = 'utf-8') -> None:
        data = self._take(self._number(layout))
        self._push(str(data, encoding, 'surrogatepass' if encoding == 'utf-8' else 'strict'))

    def _bytes(self, layout: str) -> None:
        self._push(bytes(self._take(self._number(layout))))

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        self._push(self._memo[index])

    def _tuple(self, size: int | None) -> None:
        items = self._pop_to_mark() if size is None else [self._pop() for _ in range(size)][::-1]
        self._push(tuple(items))

    def _append(self) -> None:
        value = self._pop()
        self._extend([value])

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Inert):
            target.items.extend(values)
        elif isinstance(target, set):
            target.update(as_key(value) for value in values)
        else:
            raise UnsafePickle(f'items are added to a {kind_of(target)}')

    def _set_items(self, flat: list[Any]) -> None:
        target = self._top()
        entries = target.entries if isinstance(target, Inert) else target
        if not isinstance(entries, dict) or len(flat) % 2:
            raise UnsafePickle(f'entries are set on a {kind_of(target)}')
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            entries[as_key(key)] = value

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _frozenset(self) -> None:
        self._push(frozenset(as_key(value) for value in self._pop_to_mark()))

    def _global(self) -> None:
        self._push(Global(self._line(), self._line()))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise UnsafePickle('a global is not named by text')
        self._push(Global(module, name))

    def _inst(self) -> None:
        made_by = Global(self._line(), self._line())
        self._push(self._builder.make(made_by, tuple(self._pop_to_mark())))

    def _obj(self) -> None:
        first, *args = self._pop_to_mark() or [None]
        self._push(self._builder.make(first, tuple(args)))

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        self._push(self._builder.make(function, args))

    def _new_with_keywords(self) -> None:
        keywords, args, cls = self._pop(), self._pop(), self._pop()
        made = self._builder.make(cls, args)
        if isinstance(made, Inert) and keywords:
            made.state = keywords
        self._push(made)

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, (dict, LazyTensor)):  # attributes of these hold nothing that we need
            raise UnsafePickle(f'a state is given to a {kind_of(target)}')

    def _persistent_id(self) -> None:
        self._push(self._persistent(self._pop()))


_CONSTANTS = {ord('N'): None, 0x88: True, 0x89: False}

_M = _Machine
_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    0x80: _M._proto,
    0x95: _M._frame,
    ord('('): lambda m: m._push(_MARK),
    ord('0'): lambda m: m._stack.pop(),
    ord('1'): lambda m: m._pop_to_mark(),
    ord('2'): lambda m: m._push(m._top()),
    ord('J'): lambda m: m._push(m._number('<i')),
    ord('K'): lambda m: m._push(m._number('<B')),
    ord('M'): lambda m: m._push(m._number('<H')),
    0x8A: lambda m: m._long('<B'),
    0x8B: lambda m: m._long('<i'),
    ord('G'): lambda m: m._push(m._number('>d')),
    ord('X'): lambda m: m._text('<I'),
    0x8C: lambda m: m._text('<B'),
    0x8D: lambda m: m._text('<Q'),
    ord('U'): lambda m: m._text('<B', 'latin1'),
    ord('T'): lambda m: m._text('<I', 'latin1'),
    ord('B'): lambda m: m._bytes('<I'),
    ord('C'): lambda m: m._bytes('<B'),
    0x8E: lambda m: m._bytes('<Q'),
    0x96: lambda m: m._bytes('<Q'),  # BYTEARRAY8
    ord('q'): lambda m: m._put(m._number('<B')),
    ord('r'): lambda m: m._put(m._number('<I')),
    0x94: lambda m: m._put(len(m._memo)),
    ord('h'): lambda m: m._get(m._number('<B')),
    ord('j'): lambda m: m._get(m._number('<I')),
    ord(')'): lambda m: m._push(()),
    ord(']'): lambda m: m._push([]),
    ord('}'): lambda m: m._push({}),
    0x8F: lambda m: m._push(set()),
    ord('t'): lambda m: m._tuple(None),
    0x85: lambda m: m._tuple(1),
    0x86: lambda m: m._tuple(2),
    0x87: lambda m: m._tuple(3),
    ord('l'): lambda m: m._push(m._pop_to_mark()),
    ord('a'): _M._append,
    ord('e'): lambda m: m._extend(m._pop_to_mark()),
    0x90: lambda m: m._extend(m._pop_to_mark()),
    ord('s'): _M._set_item,
    ord('u'): lambda m: m._set_items(m._pop_to_mark()),
    0x91: _M._frozenset,
    ord('c'): _M._global,
    0x93: _M._stack_global,
    ord('i'): _M._inst,
    ord('o'): _M._obj,
    ord('R'): _M._reduce,
    0x81: _M._reduce,  # NEWOBJ
    0x92: _M._new_with_keywords,
    ord('b'): _M._build,
    ord('Q'): _M._persistent_id,
}
