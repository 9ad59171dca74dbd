"""Who may import what (docs/how-it-works.md), read from the source: a breach names the file and the line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / 'xhf_hooks'
FILES = sorted(PACKAGE.rglob('*.py'))

#: Never need torch or mmengine, so that they can be understood and tested without.
PURE = (
    'planning/',
    'errors.py',
    'options.py',
    'format/safetensors.py',
    'system/calls.py',
    'system/installed.py',
    'system/threads.py',
    'integrity/',
    'places/checkpoint_folder.py',
    'places/store.py',
)
#: From the top: each imports from those below it, and from itself.
LAYERS = (
    '__init__', 'hooks', 'integrations', 'cli', 'saves', 'verify', 'convert', 'meta_model',
    'background', 'options', 'places', 'integrity', 'sources', 'exporters', 'writers', 'registry',
    'planning', 'collective', 'format', 'system', 'model', 'errors',
)  # fmt: skip
#: Neighbours in that order that know nothing of each other.
APART = [('sources', 'exporters'), ('sources', 'writers'), ('exporters', 'writers'), ('hooks', 'integrations')]
#: The only places that know MMEngine.
MMENGINE_USERS = ('hooks/', 'registry.py', 'cli/')


@dataclass(frozen=True)
class Import:
    """One imported module, absolute.

    Attributes:
        where: ``'module'``, ``'function'``, or ``'typing'`` (under ``if TYPE_CHECKING``).
    """

    module: str
    where: str
    line: int

    def is_of(self, *packages: str) -> bool:
        return any(self.module == package or self.module.startswith(f'{package}.') for package in packages)


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import of a file; none is relative. ``from a import b`` counts as ``a.b``, which may be a module."""
    return list(_walk(ast.parse(path.read_text(encoding='utf-8')), 'module'))


def _walk(node: ast.AST, where: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, where, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level
        yield from (Import(f'{node.module}.{alias.name}', where, node.lineno) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = 'function'
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith('TYPE_CHECKING') and child in node.body:
            inside = 'typing'
        yield from _walk(child, inside)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix('').parts[0]


def files_of(found: Import) -> list[Path]:
    """The files of the package that an import names: a module, or the package that it is in."""
    parts = found.module.split('.')
    for end in (len(parts), len(parts) - 1):
        place = ROOT.joinpath(*parts[:end])
        for candidate in (place.with_suffix('.py'), place / '__init__.py'):
            if candidate in FILES:
                return [candidate]
    return []


def files_in(*places: str) -> list[Path]:
    """Files and folders (with a final slash) of the package; all that exist."""
    return [path for path in FILES if relative(path).startswith(places)]


def breaches(paths: list[Path], forbidden: tuple[str, ...], where: tuple[str, ...]) -> list[str]:
    return [
        f'{relative(path)}:{found.line} imports {found.module} ({found.where} level)'
        for path in paths
        for found in imports_of(path)
        if found.where in where and found.is_of(*forbidden)
    ]


ANYWHERE = ('module', 'function', 'typing')


def imported_with(path: Path) -> set[Path]:
    """The files of the package that come along when ``path`` is imported, apart from ``__init__`` files."""
    found, todo = set(), [path]
    while todo:
        current = todo.pop()
        if current not in found and current.name != '__init__.py':
            found.add(current)
            todo += [file for new in imports_of(current) if new.where == 'module' for file in files_of(new)]
    return found


def test_pure_parts_need_neither_torch_nor_mmengine():
    """Nor does anything that they import."""
    for place in PURE:
        assert files_in(place), place
    paths = set().union(*map(imported_with, files_in(*PURE)))
    assert breaches(sorted(paths), ('torch', 'mmengine', 'transformers', 'deepspeed'), ANYWHERE) == []


def test_layers():
    """Whoever imports from layers below alone, and so do they, can be read without those above."""
    assert sorted({layer(path) for path in FILES}) == sorted(LAYERS)
    upwards = [
        f'{relative(path)}:{found.line} imports {found.module}, which is above {layer(path)}'
        for path in FILES
        for found in imports_of(path)
        for imported in files_of(found)
        if LAYERS.index(layer(imported)) < LAYERS.index(layer(path))
    ]
    assert upwards == []


def test_exporters_know_no_ranks():
    assert breaches(files_in('exporters/'), ('torch.distributed',), ANYWHERE) == []


def test_apart():
    for one, other in APART:
        assert breaches(files_in(f'{one}/'), (f'xhf_hooks.{other}',), ANYWHERE) == []


def test_mmengine_stays_at_the_doors():
    below = [path for path in FILES if path not in files_in(*MMENGINE_USERS)]
    assert PACKAGE / 'saves' / 'save.py' in below
    assert breaches(below, ('mmengine',), ANYWHERE) == []


def test_heavy_packages_are_imported_when_used():
    """Each integration is imported by those who have what it is for."""
    others = [path for path in FILES if path not in files_in('integrations/')]
    heavy = (
        'deepspeed',
        'transformers',
        'peft',
        'xtuner',
        'axolotl',
        'torch.distributed.fsdp',
        'torch.distributed.tensor',
    )
    assert breaches(others, heavy, ('module',)) == []


def test_nothing_is_imported_from_tests_or_tools():
    assert breaches(FILES, ('tests', 'tools'), ANYWHERE) == []
