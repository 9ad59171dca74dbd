"""Adds HFCheckpointHook to the text of an MMEngine config, which is parsed but never run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from xhf_hooks.errors import ConfigError
from xhf_hooks.files.regular_files import open_regular

HOOK = 'HFCheckpointHook'
_MOST_NBYTES, _MOST_BASES = 1_000_000, 100
_IMPORT = f'from xhf_hooks import {HOOK}'
#: The type in configs without imports; MMEngine imports dotted names.
_DOTTED = f'xhf_hooks.{HOOK}'
_HOOKS = 'custom_hooks'


def read_config_text(file: Path) -> str:
    """The text of a config with its line ends.

    Raises:
        ConfigError: It cannot be read, or is not a Python config.
    """
    try:
        with open_regular(file) as opened:
            data = opened.read(_MOST_NBYTES + 1)
        text = data.decode('utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file}: cannot be read ({error}); give a config file') from None
    if len(data) > _MOST_NBYTES or file.suffix != '.py':
        raise ConfigError(f'{file}: expected a config in Python (.py) of at most {_MOST_NBYTES} bytes')
    return text


def with_hook(text: str, file: Path) -> str:
    """The config with HFCheckpointHook of this package; unchanged if it already has the hook.

    XTuner's hook of the same name is replaced. Base configs are read only if the config has no ``custom_hooks``.

    Args:
        file: The file that the text was read from.

    Raises:
        ConfigError: It is not a config, or cannot be edited safely.
    """
    config = _Config(text, file)
    if 'training_args' in config.fields:
        raise ConfigError(
            f'{file}: this config trains with transformers.Trainer, which does not run MMEngine hooks; add '
            f'xhf_hooks.integrations.transformers.HFCheckpointCallback to the Trainer'
        )
    edits = _Edits(text)
    if not any(config.is_ours(kind) for kind in config.types):
        replaced = _replace_xtuners(config, edits)
        if not replaced:
            _add(config, edits)
    return edits.applied()


def bases_of(text: str, file: Path) -> list[str]:
    """The base configs, as written in the config."""
    return [str(path) for path in _Config(text, file).bases]


class _Config:
    """A parsed config."""

    def __init__(self, text: str, file: Path) -> None:
        self.text, self.file = text, file
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # invalid escape sequences
                self.tree = ast.parse(text)
            self.nodes = list(ast.walk(self.tree))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f'{file}: not a config: {type(error).__name__}: {str(error)[:200]}') from None

    @cached_property
    def fields(self) -> set[str]:
        """All assigned names."""
        return {node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

    @cached_property
    def imports(self) -> list[tuple[ast.ImportFrom, ast.alias]]:
        """Imports of a class named HFCheckpointHook."""
        import_froms = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        return [(node, alias) for node in import_froms for alias in node.names if alias.name == HOOK]

    @cached_property
    def types(self) -> list[ast.expr]:
        """The value of each ``type`` of a ``dict(...)`` or ``{...}``."""
        found = [k.value for node in self.nodes if isinstance(node, ast.Call) for k in node.keywords if k.arg == 'type']
        for node in self.nodes:
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found += [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == 'type']
        return found

    @property
    def is_lazy(self) -> bool:
        """Whether MMEngine treats it as a lazy-import config (``Config._is_lazy_import``)."""
        if '_base_' in self.fields:
            return False
        return any(isinstance(node, (ast.Import, ast.ImportFrom, ast.With)) for node in self.tree.body)

    @cached_property
    def bases(self) -> list[Path | str]:
        """Base configs: a Path relative to the config's folder, or a string for those of installed packages."""
        found: list[Path | str] = []
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == '_base_' for t in node.targets):
                try:
                    value = ast.literal_eval(node.value)
                except ValueError:
                    value = ast.unparse(node.value)
                texts = [value] if isinstance(value, str) else list(value)
                found += [text if '::' in text else Path(text) for text in map(str, texts)]
            elif isinstance(node, ast.With):
                for inner in node.body:
                    if isinstance(inner, ast.ImportFrom):
                        found.append(_imported_file(inner))
        return found

    def is_ours(self, kind: ast.expr) -> bool:
        """Whether it names the hook of this package."""
        if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
            if kind.value == HOOK:  # registered through custom_imports
                return any(isinstance(node, ast.Constant) and node.value == 'xhf_hooks' for node in self.nodes)
            return kind.value.startswith('xhf_hooks.') and kind.value.endswith(f'.{HOOK}')
        names = {a.asname or a.name for node, a in self.imports if _is_in(node, 'xhf_hooks')}
        return isinstance(kind, ast.Name) and kind.id in names

    def is_xtuners(self, kind: ast.expr) -> bool:
        """Whether it names XTuner's hook."""
        if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
            return kind.value == HOOK or re.fullmatch(rf'xtuner\..*\.{HOOK}', kind.value) is not None
        names = {a.asname or a.name for node, a in self.imports if _is_in(node, 'xtuner')}
        return isinstance(kind, ast.Name) and kind.id in names


def _is_in(node: ast.ImportFrom, package: str) -> bool:
    return node.level == 0 and (node.module or '').partition('.')[0] == package


def _imported_file(node: ast.ImportFrom) -> Path | str:
    if not node.level:
        return f'{node.module}'
    return Path(*['..'] * (node.level - 1), *(node.module or '').split('.')).with_suffix('.py')


@dataclass
class _Edits:
    """Replacements in the text: (start, end, new text)."""

    text: str
    pieces: list[tuple[int, int, str]] = field(default_factory=list)

    @cached_property
    def starts(self) -> list[int]:
        """Offsets of the line starts and of the end; lines as Python counts them."""
        return [0, *(match.end() for match in re.finditer('\r\n|\r|\n', self.text)), len(self.text)]

    @property
    def line_end(self) -> str:
        return '\r\n' if '\r\n' in self.text else '\n'

    def at(self, line: int, column: int) -> int:
        """The offset of an ast position, whose column counts bytes."""
        start = self.starts[line - 1]
        rest = self.text[start : self.starts[line]]
        return start + len(rest.encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def insert(self, at: int, text: str) -> None:
        self.pieces.append((at, at, text))

    def insert_line(self, before: int, text: str) -> None:
        """Insert a line before this one (counted from 1); ends the line above if necessary."""
        start = self.starts[min(before - 1, len(self.starts) - 1)]
        open_end = start > 0 and self.text[start - 1] not in '\r\n'
        self.insert(start, f'{self.line_end if open_end else ""}{text}{self.line_end}')

    def applied(self) -> str:
        """The edited text; insertions at the same place keep the order of the calls."""
        parts, done = [], 0
        for start, end, new in sorted(self.pieces, key=lambda piece: piece[:2]):
            parts += [self.text[done:start], new]
            done = end
        return ''.join([*parts, self.text[done:]])


def _replace_xtuners(config: _Config, edits: _Edits) -> bool:
    """Replace XTuner's hook.

    Returns:
        Whether the config has it.
    """
    for node, alias in config.imports:
        if _is_in(node, 'xtuner'):
            _import_from_us(config, edits, node, alias)
    used = [kind for kind in config.types if config.is_xtuners(kind)]
    for kind in used:
        if isinstance(kind, ast.Constant):
            edits.pieces.append((*edits.span(kind), repr(_DOTTED)))
    return bool(used)


def _import_from_us(config: _Config, edits: _Edits, node: ast.ImportFrom, alias: ast.alias) -> None:
    line = f'{_IMPORT} as {alias.asname}' if alias.asname else _IMPORT
    if len(node.names) == 1:
        edits.pieces.append((*edits.span(node), line))
        return
    at = node.names.index(alias)
    (start, end) = edits.span(alias)
    if at + 1 < len(node.names):
        end = edits.span(node.names[at + 1])[0]
    else:
        start = edits.span(node.names[at - 1])[1]
    edits.pieces.append((start, end, ''))
    edits.insert_line(_line_of_import(config), line)


def _line_of_import(config: _Config) -> int:
    """The line for the import: before XTuner's imports, as isort sorts, else after all imports."""
    imports = [node for node in config.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in imports:
        if isinstance(node, ast.ImportFrom) and _is_in(node, 'xtuner'):
            return node.lineno
    return imports[-1].end_lineno + 1 if imports else 1


def _add(config: _Config, edits: _Edits) -> None:
    item = f"dict(type='{_DOTTED}')"
    if config.is_lazy:
        item = f'dict(type={HOOK})'
        ours = [alias for node, alias in config.imports if _is_in(node, 'xhf_hooks')]
        others = [
            node for node, alias in config.imports if not _is_in(node, 'xhf_hooks') and not _is_in(node, 'xtuner')
        ]
        if others or HOOK in config.fields:
            raise ConfigError(
                f'{config.file}: {HOOK} is the name of another class; add the hook by hand, as in README.md'
            )
        if ours:
            item = f'dict(type={ours[0].asname or HOOK})'
        elif not config.imports:  # an unused import of XTuner's hook was replaced already
            edits.insert_line(_line_of_import(config), _IMPORT)
    value = _last_value(config)
    if isinstance(value, ast.List):
        _append(edits, value, item)
    elif isinstance(value, ast.Constant) and value.value is None:
        edits.pieces.append((*edits.span(value), f'[{item}]'))
    else:
        before = [] if value is None and not _inherits_hooks(config, _MOST_BASES) else [f'*{_inherited_name(config)}']
        edits.insert_line(len(edits.starts), f'{_HOOKS} = [{", ".join([*before, item])}]')


def _inherited_name(config: _Config) -> str:
    return _HOOKS if config.is_lazy or _HOOKS in config.fields else f'_base_.{_HOOKS}'


def _last_value(config: _Config) -> ast.expr | None:
    """The last value assigned to ``custom_hooks``; None if there is none."""
    last: ast.expr | None = None
    for node in config.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == _HOOKS for t in node.targets):
            last = node.value
        elif any(_sets_hooks(inner) for inner in ast.walk(node)):
            last = ast.Name(_HOOKS)  # known only at run time
    return last


def _sets_hooks(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return any(isinstance(target, ast.Name) and target.id == _HOOKS for target in targets)


def _append(edits: _Edits, value: ast.List, item: str) -> None:
    """Append to the list in its own layout: on one line, or one item per line."""
    close = edits.span(value)[1] - 1
    if not value.elts:
        edits.insert(close, item)
        return
    first, last = value.elts[0], value.elts[-1]
    last_end = edits.span(last)[1]
    tail = edits.text[last_end:close]
    has_comma = ',' in re.sub(r'#[^\r\n]*', '', tail)
    if '\n' in tail or '\r' in tail:
        if not has_comma:
            edits.insert(last_end, ',')
        indent = edits.text[edits.starts[first.lineno - 1] : edits.span(first)[0]]
        indent = indent if not indent.strip() else ' ' * 4
        edits.insert_line(value.end_lineno, f'{indent}{item},')
    elif value.lineno == value.end_lineno:
        edits.insert(close, f' {item}' if has_comma else f', {item}')
    else:
        indent = ' ' * len(edits.text[edits.starts[first.lineno - 1] : edits.span(first)[0]])
        edits.insert(close, f'{"" if has_comma else ","}{edits.line_end}{indent}{item}')


def _inherits_hooks(config: _Config, left: int) -> bool:
    """Whether a base config has ``custom_hooks``, which an assignment in this config would replace."""
    return any(_HOOKS in base.fields or _inherits_hooks(base, left - 1) for base in _opened_bases(config, left))


def _opened_bases(config: _Config, left: int) -> Iterator[_Config]:
    for base in config.bases:
        file = config.file.parent / base if isinstance(base, Path) else None
        if file is None or not left or not file.is_file():
            raise ConfigError(
                f'{config.file}: inherits from {str(base)[:80]!r}, which cannot be read, so its hooks could be '
                f'lost. Set {_HOOKS} in the config itself'
            )
        yield _Config(read_config_text(file), file)
