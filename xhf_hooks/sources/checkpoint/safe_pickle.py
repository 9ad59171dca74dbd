"""Parses a pickle as data, without importing or calling anything.

A ``pickle.Unpickler`` with a restricted ``find_class`` would not do: it still calls objects on its stack, uses
``copyreg``'s extension cache, sets attributes on what ``find_class`` returned, hashes keys of any depth, and allocates
memory for any memo index. The opcodes are those of ``pickletools``: protocol 2 and later, as ``torch.save`` writes, and
GLOBAL.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xhf_hooks.sources.checkpoint.build import Builder
from xhf_hooks.sources.checkpoint.inert import Inert
from xhf_hooks.sources.checkpoint.limits import ITEM_NBYTES, Budget, UnsafePickle, kind_of
from xhf_hooks.sources.checkpoint.tensors import LazyTensor

_MOST_INT_NBYTES = 64
#: The cost of every opcode, which limits the time. Slow opcodes, and those that make large objects, cost more.
_STEP_NBYTES = 50


def load_pickle(
    data: bytes | memoryview, persistent: Callable[[Any], Any], start: int = 0, budget: Budget | None = None
) -> tuple[Any, int]:
    """Parse one pickle.

    Args:
        persistent: Turns a persistent id (untrusted data) into an object.
        start: Its offset in ``data``.
        budget: Limit on the memory of its objects.

    Returns:
        The object, made of plain values and containers, :class:`LazyTensor`, :class:`Global` and :class:`Inert`; and
        the offset after the pickle.

    Raises:
        UnsafePickle: It is truncated, has unknown opcodes, or exceeds a limit.
    """
    machine = _Machine(memoryview(data), persistent, start, budget or Budget())
    try:
        with _no_collections():
            return machine.run(), machine.position
    # Raised by opcodes whose operands are missing or of another type
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise UnsafePickle(f'damaged near byte {machine.position} ({type(error).__name__})') from error


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn the garbage collector off: it would scan millions of new objects many times, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Machine:
    def __init__(self, data: memoryview, persistent: Callable[[Any], Any], start: int, budget: Budget) -> None:
        self.data, self.position = data, start
        self._persistent, self._budget = persistent, budget
        self.stack: list[Any] = []
        self._marked: list[list[Any]] = []  # the stack below each mark
        self._memo: dict[int, Any] = {}
        self._builder = Builder(budget)

    def run(self) -> Any:
        data, budget = self.data, self._budget
        while True:
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            instruction = _INSTRUCTIONS.get(opcode)
            if instruction is None:
                raise UnsafePickle(f'opcode {bytes([opcode])!r}, which torch.save never writes')
            nbytes, act = instruction
            budget.left -= nbytes
            if budget.left < 0:
                raise budget.exceeded()
            act(self)

    # --- reading ---

    def _take(self, nbytes: int, cost: int = 0) -> memoryview:
        end = self.position + nbytes
        if end > len(self.data):
            raise UnsafePickle(f'truncated: {nbytes} bytes expected at byte {self.position} of {len(self.data)}')
        self._budget.spend(cost)
        taken, self.position = self.data[self.position : end], end
        return taken

    def _line(self) -> str:
        window = bytes(self.data[self.position : self.position + 1000])
        end = window.find(b'\n')
        if end < 0:
            raise UnsafePickle(f'an unterminated name at byte {self.position}')
        self.position += end + 1
        return window[:end].decode()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marked:
            raise UnsafePickle('a mark is missing')
        found, self.stack = self.stack, self._marked.pop()
        return found

    # --- opcodes ---

    def _mark(self) -> None:
        self._marked.append(self.stack)
        self.stack = []

    def _drop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._pop_to_mark()

    def _long(self, nbytes: int) -> None:
        if not 0 <= nbytes <= _MOST_INT_NBYTES:
            raise UnsafePickle(f'an integer of {nbytes} bytes')
        self.stack.append(int.from_bytes(self._take(nbytes), 'little', signed=True))

    def _text(self, nbytes: int) -> None:
        taken = self._take(nbytes, 4 * nbytes)  # one wide character makes every character take four bytes
        self.stack.append(str(taken, 'utf-8', 'surrogatepass'))

    def _latin1(self, nbytes: int) -> None:
        self.stack.append(str(self._take(nbytes, nbytes), 'latin1'))

    def _bytes(self, nbytes: int) -> None:
        self.stack.append(bytes(self._take(nbytes, nbytes)))

    def _put(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def _tuple(self, size: int) -> None:
        stack = self.stack
        if len(stack) < size:
            raise UnsafePickle('an object is missing')
        stack[-size:] = [tuple(stack[-size:])]

    def _list(self) -> None:
        items = self._pop_to_mark()
        self._budget.spend(ITEM_NBYTES * len(items))
        self.stack.append(items)

    def _long_tuple(self) -> None:
        self._list()
        self.stack[-1] = tuple(self.stack[-1])

    def _append(self) -> None:
        value = self.stack.pop()
        target = self.stack[-1]
        if type(target) is list:
            target.append(value)
        else:
            self._extend([value])

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, set):
            self._builder.add(target, values)
        elif isinstance(target, (list, Inert)):
            self._budget.spend(ITEM_NBYTES * len(values))
            (target if isinstance(target, list) else target.items).extend(values)
        else:
            raise UnsafePickle(f'items are added to a {kind_of(target)}')

    def _set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        entries = target.entries if isinstance(target, Inert) else target
        if not isinstance(entries, dict) or len(flat) % 2:
            raise UnsafePickle(f'entries are set on a {kind_of(target)}')
        self._builder.fill(entries, zip(flat[::2], flat[1::2], strict=True), len(flat) // 2)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _frozenset(self) -> None:
        members: set[Any] = set()
        self._builder.add(members, self._pop_to_mark())
        self.stack.append(frozenset(members))

    def _global(self) -> None:
        self.stack.append(self._builder.name(self._line(), self._line()))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UnsafePickle('a global whose name is not a str')
        self.stack.append(self._builder.name(module, name))

    def _inst(self) -> None:
        made_by = self._builder.name(self._line(), self._line())
        args = tuple(self._pop_to_mark())
        self.stack.append(self._builder.make(made_by, args))

    def _obj(self) -> None:
        first, *args = self._pop_to_mark() or [None]
        self.stack.append(self._builder.make(first, tuple(args)))

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._builder.make(function, args))

    def _new_with_keywords(self) -> None:
        keywords, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        made = self._builder.make(cls, args)
        if isinstance(made, Inert) and keywords:
            made.state = keywords
        self.stack.append(made)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, (dict, LazyTensor)):  # attributes of these are not needed
            raise UnsafePickle(f'a state is given to a {kind_of(target)}')

    def _persistent_id(self) -> None:
        self.stack.append(self._persistent(self.stack.pop()))


_Action = Callable[[_Machine], None]


def _with(layout: str, act: Callable[[_Machine, Any], None]) -> _Action:
    """An opcode followed by a number."""
    number = struct.Struct(f'<{layout}' if layout != 'd' else '>d')

    def read_and_act(machine: _Machine) -> None:
        (value,) = number.unpack_from(machine.data, machine.position)
        machine.position += number.size
        act(machine, value)

    return read_and_act


def _number(layout: str) -> _Action:
    return _with(layout, lambda m, value: m.stack.append(value))


def _unused(layout: str) -> _Action:
    """An opcode whose number is only a hint."""
    return _with(layout, lambda m, value: None)


_M = _Machine
_MEMO_NBYTES = 100
#: Opcode to (cost, without that of its operands; function).
_INSTRUCTIONS: dict[int, tuple[int, _Action]] = {
    code if isinstance(code, int) else ord(code): (_STEP_NBYTES + nbytes, act)
    for code, nbytes, act in (
        (0x80, 0, _unused('B')),  # PROTO
        (0x95, 0, _unused('Q')),  # FRAME
        ('N', 0, lambda m: m.stack.append(None)),
        (0x88, 0, lambda m: m.stack.append(True)),
        (0x89, 0, lambda m: m.stack.append(False)),
        ('(', 50, _M._mark),
        ('0', 0, _M._drop),
        ('1', 0, lambda m: m._pop_to_mark()),
        ('2', 0, lambda m: m.stack.append(m.stack[-1])),
        ('J', 0, _number('i')),
        ('K', 0, _number('B')),
        ('M', 0, _number('H')),
        (0x8A, 70, _with('B', _M._long)),
        (0x8B, 70, _with('i', _M._long)),
        ('G', 0, _number('d')),
        ('X', 60, _with('I', _M._text)),
        (0x8C, 60, _with('B', _M._text)),
        (0x8D, 60, _with('Q', _M._text)),
        ('U', 60, _with('B', _M._latin1)),
        ('T', 60, _with('I', _M._latin1)),
        ('B', 60, _with('I', _M._bytes)),
        ('C', 60, _with('B', _M._bytes)),
        (0x8E, 60, _with('Q', _M._bytes)),
        (0x96, 60, _with('Q', _M._bytes)),  # BYTEARRAY8
        ('q', 0, _with('B', _M._put)),
        ('r', _MEMO_NBYTES, _with('I', _M._put)),
        (0x94, _MEMO_NBYTES, lambda m: m._put(len(m._memo))),
        ('h', 0, _with('B', _M._get)),
        ('j', 0, _with('I', _M._get)),
        (')', 0, lambda m: m.stack.append(())),
        (']', 100, lambda m: m.stack.append([])),
        ('}', 100, lambda m: m.stack.append({})),
        (0x8F, 200, lambda m: m.stack.append(set())),
        ('t', 30, _M._long_tuple),
        (0x85, 30, lambda m: m._tuple(1)),
        (0x86, 40, lambda m: m._tuple(2)),
        (0x87, 50, lambda m: m._tuple(3)),
        ('l', 50, _M._list),
        ('a', 0, _M._append),
        ('e', 0, lambda m: m._extend(m._pop_to_mark())),
        (0x90, 0, lambda m: m._extend(m._pop_to_mark())),
        ('s', 0, _M._set_item),
        ('u', 0, lambda m: m._set_items(m._pop_to_mark())),
        (0x91, 200, _M._frozenset),
        ('c', 100, _M._global),
        (0x93, 0, _M._stack_global),
        ('i', 100, _M._inst),
        ('o', 0, _M._obj),
        ('R', 0, _M._reduce),
        (0x81, 0, _M._reduce),  # NEWOBJ
        (0x92, 0, _M._new_with_keywords),
        ('b', 0, _M._build),
        ('Q', 200, _M._persistent_id),
    )
}
