"""Finds the config of a finished run, given by the user, in the checkpoint or beside it, and reads it.

A config is never executed, and nothing is imported from it. Configs dumped by MMEngine consist of literals and
``dict(...)``, with class names as dotted strings. Hand-written ones import names and refer to earlier fields: after
``from transformers import AutoModelForCausalLM``, that name means ``'transformers.AutoModelForCausalLM'``. Any other
expression becomes :class:`Unread`, which is an error only where the value is needed. So does each value that a later
statement may have changed, under whatever name.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.errors import ConfigError
from xhf_hooks.format.text import error_text

#: Functions that change none of their arguments, besides ``dict``.
_CHANGE_NOTHING = ('len', 'max', 'min', 'print', 'range', 'repr', 'sorted', 'str', 'sum')
#: Functions with which code reaches every name.
_REACH_ALL = ('eval', 'exec', 'globals', 'locals', 'vars')
#: Fields that say what model was trained, and with which tokenizer.
_COMPARED = ('model', 'tokenizer')


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

    def fields_named(self, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        """The path, as ``'model.llm.type'``, and the value of each field of the model with a name, at any depth."""
        return _fields_named(self.fields.get('model'), names, 'model')

    def field_at(self, path: Sequence[str]) -> Mapping[str, Any]:
        """The config of a part of the model.

        Args:
            path: The names of the fields that lead to it; empty for the model itself.
        """
        found: Any = self.fields['model']
        for name in path:
            found = found[name]
        return found

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


def _fields_named(config: Any, names: Collection[str], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name in names:
            yield f'{path}.{name}', value
        yield from _fields_named(value, names, f'{path}.{name}')


def find_run_config(
    given: Path | None, in_checkpoint: str | None, checkpoint: Path
) -> tuple[RunConfig | None, list[str]]:
    """The config of the run that wrote ``checkpoint``, None if there is none; and notes for the user.

    Args:
        given: The file that the user names; None: the one in the checkpoint, or beside it.
        in_checkpoint: The text of the checkpoint's ``meta.cfg``.
        checkpoint: The tag folder or file; configs beside it are read.

    Raises:
        ConfigError: The given file is not the config of a run. A file that was not named is passed over with a note.
    """
    notes: list[str] = []
    candidates: list[RunConfig] = []
    if given is not None:
        candidates.append(_given(given))
    if in_checkpoint:
        where = f'the config in {checkpoint}'
        try:
            candidates.append(RunConfig(where, parse_config(in_checkpoint, where)))
        except ConfigError as error:
            notes.append(f'not read: {error}')
    if not candidates:
        candidates, notes = _configs_beside(checkpoint, notes)
    if not candidates:
        return None, notes
    chosen, *further = candidates
    for other in further:
        fields, other_fields = ({name: one.fields.get(name) for name in _COMPARED} for one in (chosen, other))
        difference = _first_difference(fields, other_fields)
        if difference is not None:
            notes.append(f'{chosen.where} and {other.where} differ in {difference}: the first is taken')
            break
    return chosen, notes


def _given(file: Path) -> RunConfig:
    config = _read(file)
    if isinstance(config.fields.get('model'), Unread):
        required(config.fields['model'], 'model', str(file))
    if config.model is None:
        raise ConfigError(f'{file}: has no model with a type; give --config the config of the run, or leave it out')
    return config


def _configs_beside(checkpoint: Path, notes: list[str]) -> tuple[list[RunConfig], list[str]]:
    """Configs with a model that MMEngine dumped into the work_dir and each ``<timestamp>/vis_data``, newest first.

    Notes on files that cannot be read are for runs without a config: else these files are not needed.
    """
    work_dir = checkpoint.parent
    files = [*work_dir.glob('*.py'), *work_dir.glob('*/vis_data/config.py')]
    files = [file for file in files if file.name != 'zero_to_fp32.py']
    # Trainer puts custom code of the model beside its config.json
    has_code = any((work_dir / name).is_file() for name in ('config.json', 'adapter_config.json'))
    found, notes = [], [*notes]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            config = _read(file)
            if isinstance(config.fields.get('model'), Unread):
                required(config.fields['model'], 'model', str(file))
        except ConfigError as error:
            notes += [] if has_code else [f'not read: {error}']
            continue
        if config.model is not None:
            found.append(config)
    return found, [] if found else notes


def _first_difference(a: Any, b: Any, path: str = '') -> str | None:
    """The first field in which two configs differ, with both values; None if there is none, or it is unread."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        differences = (_first_difference(a.get(name), b.get(name), f'{path}.{name}') for name in [*a, *b])
        return next((found for found in differences if found is not None), None)
    is_unread = isinstance(a, Unread) or isinstance(b, Unread)
    same = is_unread or a == b or (isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and list(a) == list(b))
    return None if same else f'{path[1:]} ({str(a)[:80]} and {str(b)[:80]})'


def _read(file: Path) -> RunConfig:
    try:
        text = file.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file}: cannot be read ({error}); give --config the config that the run dumped') from None
    if file.suffix in ('.json', '.yaml', '.yml'):
        return RunConfig(str(file), _parse_data(text, file))
    return RunConfig(str(file), parse_config(text, str(file)))


def _parse_data(text: str, file: Path) -> dict[str, Any]:
    """The fields of a config in JSON or YAML."""
    try:
        if file.suffix == '.json':
            fields = json.loads(text)
        else:
            import yaml  # transformers requires it

            fields = yaml.safe_load(text)
    except Exception as error:  # yaml raises its own types, and a recursion may be too deep
        raise ConfigError(f'{file}: not a config: {error_text(error)}; give another with --config') from None
    if not isinstance(fields, dict):
        raise ConfigError(f'{file}: not a config: expected fields, found a {type(fields).__name__}')
    if '_base_' in fields:
        raise _inherits(str(file))
    return {str(name): value for name, value in fields.items()}


def _inherits(where: str) -> ConfigError:
    return ConfigError(
        f'{where}: it inherits from another config, and base configs are not read; give --config the complete config '
        f'that MMEngine dumped into the work_dir'
    )


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
    """An expression that is not evaluated, and its line.

    Attributes:
        mentions: Values of the names in it. The expression may be one of them, or contain it.
    """

    text: str
    line: int
    mentions: tuple[Any, ...] = field(default=(), compare=False, repr=False)


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
    if '_base_' in names or any(map(_reads_base, tree.body)):
        raise _inherits(where)
    return {name: value for name, value in names.items() if not isinstance(value, _Imported)}


def _reads_base(node: ast.stmt) -> bool:
    """Whether the statement is ``with read_base():`` of MMEngine's lazy configs."""
    return isinstance(node, ast.With) and any('read_base' in ast.dump(item.context_expr) for item in node.items)


def _read_statement(node: ast.stmt, names: dict[str, Any]) -> None:
    """Update what names mean. Those that it may change, other than by ``name = value``, become :class:`Unread`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        module = f'{node.module or ""}.' if isinstance(node, ast.ImportFrom) else ''
        for alias in node.names:
            name = alias.asname or alias.name.partition('.')[0]
            names[name] = _Imported(module + alias.name if module or alias.asname else name)
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if targets and node.value is not None and all(isinstance(target, ast.Name) for target in targets):  # type: ignore[attr-defined]
        value = _value(node.value, names)  # type: ignore[attr-defined]
        _forget_changed(node.value, names)  # type: ignore[attr-defined]
        for target in targets:  # a field, even if its value is an imported name
            names[target.id] = str(value) if isinstance(value, _Imported) else value  # type: ignore[attr-defined]
    else:
        _forget_changed(node, names)


def _forget_changed(node: ast.AST, names: dict[str, Any]) -> None:
    """Make :class:`Unread` what a statement or an expression may change, by each name that it has.

    It changes the names that it stores, and what is in the values of those whose items or attributes it sets or that
    it gives to a function. A block is taken as if all of it ran.
    """
    stored, changed, touched = set[str](), set[str](), set[int]()
    is_block = any(isinstance(inner, ast.stmt) for inner in ast.walk(node) if inner is not node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            stored.add(inner.id)
        elif isinstance(inner, (ast.Subscript, ast.Attribute)) and not isinstance(inner.ctx, ast.Load):
            owner = None if is_block else _value(inner.value, names)  # in a block, names may mean something else
            if isinstance(owner, (dict, list)):
                touched.add(id(owner))  # what is in it stays as it is
            else:
                changed |= _loaded(inner)
        elif isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
            # custom_hooks += [...] gives the list more items, and those that it has stay as they are
            touched.add(id(names.get(inner.target.id)))
        elif isinstance(inner, ast.Call) and not _changes_nothing(inner.func, names):
            changed |= _loaded(inner)
    if changed.intersection(_REACH_ALL):
        changed |= names.keys()
    unread = _unread(node, names)
    values = [names[name] for name in changed if name in names]
    names.update(dict.fromkeys(stored, unread))
    values += [names[name] for name in changed & stored]  # of a loop, for example
    touched |= {number for value in values for number in _parts(value)}
    for name, value in names.items():
        if not touched.isdisjoint(_parts(value)):
            names[name] = unread


def _loaded(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}


def _changes_nothing(function: ast.expr, names: Mapping[str, Any]) -> bool:
    if not isinstance(function, ast.Name):
        return False
    return _makes_dict(names.get(function.id, function.id)) or (
        function.id in _CHANGE_NOTHING and function.id not in names
    )


def _parts(value: Any) -> Iterator[int]:
    """Identities of the lists and dicts in a value, those that an unread expression may hold included."""
    if isinstance(value, (dict, list)):
        yield id(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for one in value.mentions if isinstance(value, Unread) else inner:
        yield from _parts(one)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression, which may consist of values and of what is :class:`Unread`."""
    with suppress(KeyError, IndexError, TypeError, ValueError):
        match node:
            case ast.Name():
                return names[node.id]
            case ast.Attribute():
                owner = _value(node.value, names)
                if isinstance(owner, _Imported):
                    return _Imported(f'{owner}.{node.attr}')
                return owner[node.attr] if isinstance(owner, dict) else _unread(node, names)
            case ast.Subscript():
                owner = _value(node.value, names)
                is_container = isinstance(owner, (dict, list, tuple))
                return owner[ast.literal_eval(node.slice)] if is_container else _unread(node, names)
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
    return _unread(node, names)


def _makes_dict(function: Any) -> bool:
    return function == 'dict' or str(function).endswith('.ConfigDict')


def _unread(node: ast.AST, names: Mapping[str, Any]) -> Unread:
    mentions = tuple(names[name] for name in sorted(_loaded(node)) if name in names)
    line = getattr(node, 'lineno', 0)
    return Unread(ast.unparse(node).partition('\n')[0][:80], line, mentions)
