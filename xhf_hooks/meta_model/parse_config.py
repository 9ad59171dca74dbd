"""Parses an MMEngine config into plain values, without running it.

A config is never executed, and nothing is imported from it. Configs dumped by MMEngine consist of literals and
``dict(...)``, with class names as dotted strings. Hand-written ones import names and refer to earlier fields: after
``from transformers import AutoModelForCausalLM``, that name means ``'transformers.AutoModelForCausalLM'``. Any other
expression becomes :class:`Unread`, which is an error only where the value is needed.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import Any

from xhf_hooks.errors import ConfigError


@dataclass(frozen=True)
class Unread:
    """An expression that is not evaluated, and its line."""

    text: str
    line: int


class _Imported(str):
    """The dotted path of an imported name, as MMEngine dumps it."""


def parse_config(text: str, where: str) -> dict[str, Any]:
    """The config's fields.

    Args:
        where: Its file, for messages.

    Raises:
        ConfigError: It is not Python, or inherits from another config.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # invalid escape sequences
            tree = ast.parse(text)
        reader = _Reader(text)
        for statement in tree.body:
            reader.read(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'{where}: not a config: {type(error).__name__}: {str(error)[:200]}; give another with --config'
        ) from None
    if '_base_' in reader.names:
        base = reader.names['_base_']
        shown = ascii(base[:80]) if isinstance(base, str) else 'others'
        raise ConfigError(
            f'{where}: it inherits from {shown}, and base configs are not read; give --config the complete config '
            f'that MMEngine dumped into the work_dir'
        )
    return {name: value for name, value in reader.names.items() if name not in reader.imports}


class _Reader:
    """Reads statements one after another.

    Attributes:
        names: What each name means so far.
        imports: Imported names, which are not fields.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.names: dict[str, Any] = {}
        self.imports: set[str] = set()

    def read(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f'{"." * node.level}{node.module or ""}.' if isinstance(node, ast.ImportFrom) else ''
            for alias in node.names:
                name = alias.asname or alias.name.partition('.')[0]
                whole = alias.asname is not None or bool(module)
                self.names[name] = _Imported(module + alias.name if whole else name)
                self.imports.add(name)
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            value = self._value(node.value)
            for target in node.targets:
                self._set(target, value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self._set(node.target, self._value(node.value))
        elif not isinstance(node, ast.Expr):
            for inner in ast.walk(node):  # what it may change
                if isinstance(inner, ast.Name) and inner.id in self.names and not isinstance(inner.ctx, ast.Load):
                    self._set(inner, self._unread(node))

    def _set(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            self.imports.discard(target.id)

    def _unread(self, node: ast.expr | ast.stmt) -> Unread:
        text = ast.get_source_segment(self._text, node) or ''
        return Unread(text.partition('\n')[0][:80], node.lineno)

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression, or :class:`Unread`."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.names:
                return self.names[node.id]
            case ast.Attribute():
                owner = self._value(node.value)
                if isinstance(owner, _Imported):
                    return _Imported(f'{owner}.{node.attr}')
                if isinstance(owner, dict) and node.attr in owner:
                    return owner[node.attr]
            case ast.List() | ast.Tuple() if not any(isinstance(item, ast.Starred) for item in node.elts):
                kind = list if isinstance(node, ast.List) else tuple
                return kind(self._value(item) for item in node.elts)
            case ast.Dict():
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                if len(keys) == len(node.keys):
                    return dict(zip(keys, map(self._value, node.values), strict=True))
            case ast.Call() if self._makes_dict(node):
                given = [self._value(argument) for argument in node.args]  # dict({'a-b': 1}): keys that are no names
                if all(isinstance(value, dict) for value in given):
                    named = {keyword.arg: self._value(keyword.value) for keyword in node.keywords}
                    return {name: value for values in (*given, named) for name, value in values.items()}
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand)
                if type(value) in (int, float):
                    return -value
            case ast.BinOp(op=ast.Add()):
                left, right = self._value(node.left), self._value(node.right)
                if type(left) is str and type(right) is str:
                    return left + right
        return self._unread(node)

    def _makes_dict(self, node: ast.Call) -> bool:
        """Whether it is ``dict(...)`` or MMEngine's ``ConfigDict(...)``, with plain arguments."""
        name = node.func.id if isinstance(node.func, ast.Name) else ''
        meant = self.names.get(name, name)
        is_dict = meant == 'dict' or (isinstance(meant, _Imported) and meant.endswith('.ConfigDict'))
        return is_dict and len(node.args) <= 1 and all(keyword.arg is not None for keyword in node.keywords)
