"""Parses an MMEngine config into plain values, without running it.

A config in a checkpoint is untrusted: it is never executed, and nothing is imported from it. Configs dumped by MMEngine
consist of literals, ``dict(...)`` and lists, with class names as dotted strings. Hand-written ones import names and
refer to earlier fields: after ``from transformers import AutoModelForCausalLM``, that name means
``'transformers.AutoModelForCausalLM'``. Any other expression becomes :class:`Unread`, which is an error only where the
value is needed.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xhf_hooks.errors import ConfigError

_MOST_CHARACTERS = 1_000_000  # a dumped config with a thousand classes has about 100,000
_MOST_DIGITS = 30  # of a computed number
_MOST_VALUES = 1_000_000  # in all fields; a few lines can describe exponentially nested lists
_MOST_COPIED = 10_000_000  # characters and items copied by ``+``, dotted names and ``dict(...)``
_MOST_NUMBER_KEYS = 1000  # per dict: hash collisions of numbers can be constructed
_CHANGES = (ast.Store, ast.Del)
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Unread:
    """An expression that is not evaluated, and its line."""

    text: str
    line: int


@dataclass(frozen=True)
class _Imported:
    """An imported name and its dotted path."""

    path: str


def parse_config(text: str, where: str) -> dict[str, Any]:
    """The config's fields.

    Args:
        where: Its file, for messages.

    Raises:
        ConfigError: It is not Python, or inherits from another config.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f'{where}: {len(text)} characters; expected at most {_MOST_CHARACTERS}')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # invalid escape sequences
            tree = ast.parse(text)
        names = _Reader(text).read(tree)
        if '_base_' not in names:
            dump = _Dumper()
            return {name: dump(value) for name, value in names.items()}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'{where}: not a config: {type(error).__name__}: {str(error)[:200]}; give another with --config'
        ) from None
    base = names['_base_']
    shown = ascii(base[:80]) if isinstance(base, str) else 'others'
    raise ConfigError(
        f'{where}: it inherits from {shown}, and base configs are not read; give --config the complete config '
        f'that MMEngine dumped into the work_dir'
    )


class _Reader:
    def __init__(self, text: str) -> None:
        self._lines = text.encode().splitlines()  # ast counts columns in bytes
        self._copies_left = _MOST_COPIED
        self._names: dict[str, Any] = {}
        self._modules: set[str] = set()  # imported names, which are not fields

    def read(self, tree: ast.Module) -> dict[str, Any]:
        for statement in tree.body:
            self._statement(statement)
        return {name: value for name, value in self._names.items() if name not in self._modules}

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom):
            prefix = '.' * node.level + (node.module or '')
            for alias in node.names:
                name = alias.asname or alias.name
                self._names[name] = _Imported(f'{prefix}.{alias.name}')
                self._modules.add(name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition('.')[0]
                self._names[name] = _Imported(alias.name if alias.asname else name)
                self._modules.add(name)
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            value = self._value(node.value)
            for name in (target.id for target in node.targets if isinstance(target, ast.Name)):
                self._names[name] = value
                self._modules.discard(name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self._names[node.target.id] = self._value(node.value)
        elif not isinstance(node, ast.Expr):  # names that it may change become unread
            unread = self._unread(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id in self._names and isinstance(inner.ctx, _CHANGES):
                    self._names[inner.id] = unread

    def _value(self, node: ast.expr) -> Any:
        read = getattr(self, f'_{type(node).__name__.lower()}', None)
        found = None if read is None else read(node)
        return found[0] if found is not None else self._unread(node)

    def _unread(self, node: ast.expr | ast.stmt) -> Unread:
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        text = self._lines[node.lineno - 1][node.col_offset : end]
        return Unread(text[:320].decode(errors='ignore')[:80], node.lineno)

    def _copy(self, n_items: int) -> None:
        self._copies_left -= n_items
        if self._copies_left < 0:
            raise ValueError(f'copies of more than {_MOST_COPIED} characters and items')

    # Each of these returns a tuple of one value, or None for an expression that is not evaluated.

    def _constant(self, node: ast.Constant) -> tuple[Any] | None:
        return (node.value,)

    def _name(self, node: ast.Name) -> tuple[Any] | None:
        return (self._names[node.id],) if node.id in self._names else None

    def _attribute(self, node: ast.Attribute) -> tuple[Any] | None:
        owner = self._value(node.value)
        if isinstance(owner, _Imported):
            self._copy(len(owner.path) + len(node.attr))
            return (_Imported(f'{owner.path}.{node.attr}'),)
        return (owner[node.attr],) if isinstance(owner, dict) and node.attr in owner else None

    def _subscript(self, node: ast.Subscript) -> tuple[Any] | None:
        owner, key = self._value(node.value), self._value(node.slice)
        if isinstance(owner, dict) and isinstance(key, str) and key in owner:
            return (owner[key],)
        if isinstance(owner, (list, tuple)) and type(key) is int and -len(owner) <= key < len(owner):
            return (owner[key],)
        return None

    def _list(self, node: ast.List) -> tuple[Any] | None:
        return None if _has_star(node.elts) else ([self._value(item) for item in node.elts],)

    def _tuple(self, node: ast.Tuple) -> tuple[Any] | None:
        return None if _has_star(node.elts) else (tuple(self._value(item) for item in node.elts),)

    def _dict(self, node: ast.Dict) -> tuple[Any] | None:
        keys = [None if key is None else self._value(key) for key in node.keys]
        if not all(isinstance(key, (str, int, float)) for key in keys):
            return None
        if sum(type(key) is not str for key in keys) > _MOST_NUMBER_KEYS:
            return None
        return (dict(zip(keys, map(self._value, node.values), strict=True)),)

    def _call(self, node: ast.Call) -> tuple[Any] | None:
        name = node.func.id if isinstance(node.func, ast.Name) else ''
        imported = self._names.get(name)
        is_dict = name == 'dict' and imported is None
        is_dict |= isinstance(imported, _Imported) and imported.path.endswith('.ConfigDict')
        if not is_dict or any(keyword.arg is None for keyword in node.keywords):
            return None
        given = [self._value(argument) for argument in node.args]  # for keys that are not identifiers: dict({'a-b': 1})
        if len(given) > 1 or not all(isinstance(value, dict) for value in given):
            return None
        named = {keyword.arg: self._value(keyword.value) for keyword in node.keywords}
        self._copy(sum(map(len, given)))
        return ({**(given[0] if given else {}), **named},)

    def _ifexp(self, node: ast.IfExp) -> tuple[Any] | None:
        test = self._value(node.test)
        return (self._value(node.body if test else node.orelse),) if isinstance(test, (bool, type(None))) else None

    def _unaryop(self, node: ast.UnaryOp) -> tuple[Any] | None:
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not) and isinstance(value, bool):
            return (not value,)
        is_number = type(value) in (int, float)
        return (-value,) if is_number and isinstance(node.op, ast.USub) else None

    def _binop(self, node: ast.BinOp) -> tuple[Any] | None:
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, (str, list, tuple)):
            if len(left) + len(right) > _MOST_VALUES:
                return None
            self._copy(len(left) + len(right))
            return (left + right,)
        if not all(type(side) in (int, float) and abs(side) < 10**_MOST_DIGITS for side in (left, right)):
            return None
        compute = _ARITHMETIC.get(type(node.op))
        divides_by_zero = not right and isinstance(node.op, (ast.Div, ast.FloorDiv))
        return None if compute is None or divides_by_zero else (compute(left, right),)


def _has_star(items: list[ast.expr]) -> bool:
    return any(isinstance(item, ast.Starred) for item in items)


class _Dumper:
    """Replaces imported names by dotted strings, as MMEngine dumps them."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f'more than {_MOST_VALUES} values')
        if isinstance(value, _Imported):
            return value.path
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self(item) for item in value)
        return value
