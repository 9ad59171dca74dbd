"""Finds the config of a finished run, given by the user, in the checkpoint or beside it, and reads it.

A config is never executed, and nothing is imported from it. Configs dumped by MMEngine consist of literals and
``dict(...)``, with class names as dotted strings. Hand-written ones import names and refer to earlier fields: after
``from transformers import AutoModelForCausalLM``, that name means ``'transformers.AutoModelForCausalLM'``. Any other
expression becomes :class:`Unread`, which is an error only where the value is needed.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import ConfigError


@dataclass(frozen=True)
class RunConfig:
    """The fields of a config, and its file for messages."""

    where: str
    fields: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any] | None:
        """The field ``model``, if it has a ``type``."""
        model = self.fields.get('model')
        return model if isinstance(model, Mapping) and isinstance(model.get('type'), str) else None

    @property
    def averages(self) -> bool:
        """Whether an EMAHook averages the weights."""
        hooks = self.fields.get('custom_hooks')
        return any(_is_named(hook, 'EMAHook') for hook in hooks) if isinstance(hooks, (list, tuple)) else False

    @property
    def uses_deepspeed(self) -> bool:
        """Whether its checkpoints are written by MMEngine's DeepSpeedStrategy."""
        return _is_named(self.fields.get('strategy'), 'DeepSpeedStrategy')


def _is_named(config: Any, name: str) -> bool:
    """Whether the config's type is a class of this name, in any module."""
    kind = config.get('type') if isinstance(config, Mapping) else None
    return isinstance(kind, str) and kind.rpartition('.')[2] == name


def find_run_config(given: Path | None, in_checkpoint: str | None, checkpoint: Path) -> RunConfig | None:
    """The config of the run that wrote ``checkpoint``; None if there is none.

    Args:
        in_checkpoint: The text of the checkpoint's ``meta.cfg``.
        checkpoint: The tag folder or file; configs beside it are read.

    Raises:
        ConfigError: The given file, or the one in or beside the checkpoint, is not the config of a run.
    """
    if given is not None:
        config = _read(given)
        if config.model is None:
            raise ConfigError(
                f'{given}: has no model with a type; give --config the config of the run, or leave it out'
            )
        return config
    if in_checkpoint:
        where = f'the config in {checkpoint}'
        return RunConfig(where, parse_config(in_checkpoint, where))
    has_code = any((checkpoint.parent / name).is_file() for name in ('config.json', 'adapter_config.json'))
    for file in _beside(checkpoint):
        try:
            config = _read(file)
        except ConfigError:
            if has_code:  # custom code of the model, which Trainer puts beside its config.json
                continue
            raise
        if config.model is not None:
            return config
    return None


def _beside(checkpoint: Path) -> list[Path]:
    """Configs that MMEngine dumped into the work_dir and each ``<timestamp>/vis_data``, newest first."""
    work_dir = checkpoint.parent
    found = [*work_dir.glob('*.py'), *work_dir.glob('*/vis_data/config.py')]
    found = [file for file in found if file.name != 'zero_to_fp32.py']
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


def _read(file: Path) -> RunConfig:
    try:
        text = file.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file}: cannot be read ({error}); name the config that the run dumped') from None
    return RunConfig(str(file), parse_config(text, str(file)))


def required(value: Any, what: str, where: str) -> Any:
    """Return a value of the config that must be there."""
    if isinstance(value, Unread):
        raise ConfigError(
            f'{where}, line {value.line}: {what} is {value.text!r}, which is not run; give --config the config that '
            f'MMEngine dumped into the work_dir, or --base'
        )
    if value is None:
        raise ConfigError(f'{where}: {what} is missing; name the model that training started from with --base')
    return value


@dataclass(frozen=True)
class Unread:
    """An expression that is not evaluated, and its line."""

    text: str
    line: int


class _Imported(str):
    """The dotted path of an imported name, as MMEngine dumps it."""


def parse_config(text: str, where: str) -> dict[str, Any]:
    """The config's fields.

    Raises:
        ConfigError: It is not Python, or inherits from another config.
    """
    names: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # invalid escape sequences
            tree = ast.parse(text)
        for statement in tree.body:
            _read_statement(statement, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'{where}: not a config: {type(error).__name__}: {str(error)[:200]}; give another with --config'
        ) from None
    if '_base_' in names:
        raise ConfigError(
            f'{where}: it inherits from another config, and base configs are not read; give --config the complete '
            f'config that MMEngine dumped into the work_dir'
        )
    return {name: value for name, value in names.items() if not isinstance(value, _Imported)}


def _read_statement(node: ast.stmt, names: dict[str, Any]) -> None:
    """Update what names mean. Those that it may change, other than by ``name = value``, become :class:`Unread`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        module = f'{node.module or ""}.' if isinstance(node, ast.ImportFrom) else ''
        for alias in node.names:
            name = alias.asname or alias.name.partition('.')[0]
            names[name] = _Imported(module + alias.name if module or alias.asname else name)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        value = _value(node.value, names)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):  # a field, even if its value is an imported name
                names[target.id] = str(value) if isinstance(value, _Imported) else value
    elif not isinstance(node, ast.Expr):
        stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
        names.update((inner.id, _unread(node)) for inner in stored if not isinstance(inner.ctx, ast.Load))


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression, which may consist of values and of what is :class:`Unread`."""
    try:
        match node:
            case ast.Name():
                return names[node.id]
            case ast.Attribute():
                owner = _value(node.value, names)
                return _Imported(f'{owner}.{node.attr}') if isinstance(owner, _Imported) else _unread(node)
            case ast.List():
                return [_value(item, names) for item in node.elts]
            case ast.Tuple():
                return tuple(_value(item, names) for item in node.elts)
            case ast.Dict():
                keys = [_value(key, names) for key in node.keys if key is not None]  # None: {**other}
                return dict(zip(keys, (_value(item, names) for item in node.values), strict=True))
            case ast.Call(func=ast.Name(id=name)) if _makes_dict(names.get(name, name)):
                # MMEngine dumps dict({'a-b': 1}) where keys are no names
                given = [_value(argument, names) for argument in node.args]
                named = {word.arg: _value(word.value, names) for word in node.keywords}
                return dict(*given, **named)  # type: ignore[arg-type]
        return ast.literal_eval(node)
    except (KeyError, TypeError, ValueError):
        return _unread(node)


def _makes_dict(function: Any) -> bool:
    return function == 'dict' or str(function).endswith('.ConfigDict')


def _unread(node: ast.AST) -> Unread:
    return Unread(ast.unparse(node).partition('\n')[0][:80], getattr(node, 'lineno', 0))
