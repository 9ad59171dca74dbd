"""Finds the config of a finished run, given by the user, in the checkpoint or beside it, and reads it.

A config is never executed, and nothing is imported from it. Configs dumped by MMEngine consist of literals and
``dict(...)``, with class names as dotted strings. Hand-written ones import names and refer to earlier fields: after
``from transformers import AutoModelForCausalLM``, that name means ``'transformers.AutoModelForCausalLM'``. Any other
expression becomes :class:`Unread`, which is an error only where the value is needed. A config whose statements may
change a value after its definition is refused: MMEngine dumps a plain one with every run.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import ConfigError
from xhf_hooks.format.loaded_files import CONFIGS
from xhf_hooks.format.text import error_text

#: Functions that change none of their arguments, besides ``dict``.
_CHANGE_NOTHING = ('float', 'int', 'len', 'list', 'max', 'min', 'range', 'repr', 'round', 'sorted', 'str', 'sum')
#: Expressions that give names to values, or call functions with values that have no name in the config.
_MAY_CHANGE = (ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.Yield)
#: The remedy where the config of the run is not named.
_DUMPED = 'give --config the config that MMEngine dumped into the work_dir'
#: Fields that say what model was trained, and with which tokenizer.
_COMPARED = ('model', 'tokenizer')


@dataclass(frozen=True)
class RunConfig:
    """The fields of a config, and its file for messages; both are empty if a run has no config."""

    where: str
    fields: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any]:
        """The field ``model`` if it has a ``type``, else an empty one."""
        model = self.fields.get('model')
        return model if isinstance(model, Mapping) and isinstance(model.get('type'), str) else {}

    def parts_with(self, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
        """Each part of the model whose config has a field of one of these names, and the value of that field.

        The path of the part, such as ``'llm.'``, comes first; '' is the model itself. Then its config.
        """
        return _parts_with(self.fields.get('model'), names, '')

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


def _parts_with(config: Any, names: Collection[str], path: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name in names:
            yield path, config, value
        yield from _parts_with(value, names, f'{path}{name}.')


def find_run_config(given: Path | None, in_checkpoint: str | None, checkpoint: Path) -> tuple[RunConfig, list[str]]:
    """The config of the run that wrote ``checkpoint``, an empty one if there is none; and notes for the user.

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
        try:
            candidates.append(_given(given))
        except NotPlainError as error:
            raise ConfigError(f'{error.problem}; {_dumped(in_checkpoint, checkpoint)}') from None
    if in_checkpoint:
        where = f'the config in {checkpoint}'
        try:
            candidates.append(RunConfig(where, parse_config(in_checkpoint, where)))
        except ConfigError as error:
            notes.append(f'not read: {error}')
    if not candidates:
        candidates, notes = _configs_beside(checkpoint, notes)
    if not candidates:
        return RunConfig('', {}), notes
    chosen, *further = candidates
    for other in further:
        fields, other_fields = ({name: one.fields.get(name) for name in _COMPARED} for one in (chosen, other))
        difference = _first_difference(fields, other_fields)
        if difference is not None:
            notes.append(f'{chosen.where} and {other.where} differ in {difference}: the first is taken')
            break
    return chosen, notes


class NotPlainError(ConfigError):
    """A config has statements that are not run.

    Attributes:
        problem: The message without the remedy.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f'{problem}; {_DUMPED}')
        self.problem = problem


def _dumped(in_checkpoint: str | None, checkpoint: Path) -> str:
    """The remedy that names the config which MMEngine dumped."""
    if in_checkpoint:
        return f'leave --config out: {checkpoint} has the config that MMEngine dumped'
    found, _ = _configs_beside(checkpoint, [])
    return f'give --config {found[0].where}, which MMEngine dumped' if found else _DUMPED


def _given(file: Path) -> RunConfig:
    config = _read(file)
    if not config.model:
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
    has_code = any((work_dir / name).is_file() for name in CONFIGS)
    found, notes = [], [*notes]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            config = _read(file)
        except ConfigError as error:
            notes += [] if has_code else [f'not read: {error}']
            continue
        if config.model:
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
    fields = parse_config(text, str(file))
    if isinstance(fields.get('model'), Unread):
        required(fields['model'], 'model', str(file))
    return RunConfig(str(file), fields)


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
        raise NotPlainError(f'{file}: it inherits from another config')
    return {str(name): value for name, value in fields.items()}


def required(value: Any, what: str, where: str) -> Any:
    """Return a value of the config that must be there."""
    if isinstance(value, Unread):
        raise ConfigError(
            f'{where}, line {value.line}: {what} is {value.text!r}, which is not run; {_DUMPED}, or --base'
        )
    if value is None:
        raise ConfigError(f'{where}: {what} is missing; name the model that training started from with --base')
    return value


def require_read(value: Any, what: str, where: str) -> None:
    """Refuse a value that is unread, or has a part that is."""
    if isinstance(value, Unread):
        required(value, what, where)
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        parts = value
    elif isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    for name, part in parts.items():
        require_read(part, f'{what}.{name}', where)


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
        ConfigError: It is not Python.
        NotPlainError: It inherits from another config, or may change a value after its definition.
    """
    names: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # invalid escape sequences
            tree = ast.parse(text)
        for statement in tree.body:
            if not _read_statement(statement, names):
                line = f'{where}, line {statement.lineno}'
                raise NotPlainError(f'{line}: {_unread(statement).text!r} is no plain assignment, and is not run')
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'{where}: not a config: {type(error).__name__}: {str(error)[:200]}; give another with --config'
        ) from None
    if '_base_' in names:
        raise NotPlainError(f'{where}: it inherits from another config')
    return {name: value for name, value in names.items() if not isinstance(value, _Imported)}


def _read_statement(node: ast.stmt, names: dict[str, Any]) -> bool:
    """Update what names mean; returns False for a statement that may change a value which another name holds."""
    match node:
        case ast.Import() | ast.ImportFrom():
            module = f'{node.module or ""}.' if isinstance(node, ast.ImportFrom) else ''
            for alias in node.names:
                name = alias.asname or alias.name.partition('.')[0]
                names[name] = _Imported(module + alias.name if module or alias.asname else name)
            return True
        case ast.Assign():
            return _assign(node.targets, node.value, names)
        case ast.AnnAssign(value=ast.expr() as value):
            return _assign([node.target], value, names)
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            old = names.get(name)  # custom_hooks += [...] changes the list itself, under each of its names
            is_held = any(_holds(other, old) for key, other in names.items() if key != name)
            names[name] = _unread(node)
            is_safe = isinstance(old, (int, float, str)) or (isinstance(old, list) and not is_held)
            return is_safe and _changes_nothing(value, names)
        case ast.If():
            before, is_safe = dict(names), _changes_nothing(node.test, names)
            is_safe = all([_read_statement(each, names) for each in (*node.body, *node.orelse)]) and is_safe
            changed = [name for name, value in names.items() if name not in before or value is not before[name]]
            names.update(dict.fromkeys(changed, _unread(node)))
            return is_safe
        case _:
            return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _assign(targets: Sequence[ast.expr], value: ast.expr, names: dict[str, Any]) -> bool:
    """Assign a value to names; see :func:`_read_statement`."""
    for target in targets:
        if not isinstance(target, ast.Name):
            return False
        found = _value(value, names)  # a field, even if its value is an imported name
        names[target.id] = str(found) if isinstance(found, _Imported) else found
    return _changes_nothing(value, names)


def _changes_nothing(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether an expression changes no value of the config, which functions may do with what they are given."""
    fields = {name for name, value in names.items() if not isinstance(value, _Imported)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and not _is_call_of_known(inner, names):
            if any(isinstance(part, ast.Name) and part.id in fields for part in ast.walk(inner)):
                return False
        elif isinstance(inner, _MAY_CHANGE):
            return False
    return True


def _is_call_of_known(call: ast.Call, names: Mapping[str, Any]) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else ''
    return _makes_dict(names.get(name, name)) or (name in _CHANGE_NOTHING and name not in names)


def _holds(value: Any, wanted: Any) -> bool:
    """Whether a value is, or contains, another."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return value is wanted or any(_holds(one, wanted) for one in inner)


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
                return owner[node.attr] if isinstance(owner, dict) else _unread(node)
            case ast.Subscript():
                owner = _value(node.value, names)
                is_container = isinstance(owner, (dict, list, tuple))
                return owner[ast.literal_eval(node.slice)] if is_container else _unread(node)
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
    return _unread(node)


def _makes_dict(function: Any) -> bool:
    return function == 'dict' or str(function).endswith('.ConfigDict')


def _unread(node: ast.AST) -> Unread:
    return Unread(ast.unparse(node).partition('\n')[0][:80], getattr(node, 'lineno', 0))
