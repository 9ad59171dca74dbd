"""Who may import what (docs/how-it-works.md), read from the source: a breach names the file and the line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / 'xhf_hooks'
FILES = sorted(PACKAGE.rglob('*.py'))

#: Never need torch or mmengine, so that they can be understood and tested without.
PURE = (
    'planning/',
    'errors.py',
    'options.py',
    'format/safetensors.py',
    'system.py',
    'threads.py',
    'integrity/',
    'places/checkpoint_folder.py',
    'places/store.py',
)
#: From the top: each imports from those below it, and from itself.
LAYERS = (
    '__init__', 'hooks', 'integrations', 'cli', 'api', 'manager', 'verify', 'convert', 'save', 'meta_model',
    'background', 'options', 'places', 'integrity', 'sources', 'exporters', 'writers', 'telemetry', 'host_memory',
    'threads', 'registry', 'planning', 'collective', 'format', 'system', 'model', 'installed', 'errors',
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


def imports_in(source: str, package: str) -> list[Import]:
    """Every import of a file. ``from a import b`` counts as ``a.b``, which may be a module.

    Args:
        package: That the file is in, to which relative imports are relative.
    """
    return list(_walk(ast.parse(source), package, 'module'))


def _walk(node: ast.AST, package: str, where: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, where, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ''
        if node.level:
            parents = package.split('.')[: len(package.split('.')) - node.level + 1]
            base = '.'.join([*parents, base] if base else parents)
        yield from (Import(f'{base}.{alias.name}', where, node.lineno) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
        '__import__',
        'import_module',
        'importlib.import_module',
    ):
        yield Import(ast.literal_eval(node.args[0]), where, node.lineno)
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = 'function'
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith('TYPE_CHECKING') and child in node.body:
            inside = 'typing'
        yield from _walk(child, package, inside)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding='utf-8'))


@cache
def imports_of(path: Path) -> list[Import]:
    return imports_in(path.read_text(encoding='utf-8'), '.'.join(path.relative_to(ROOT).parent.parts))


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
        if current in found:
            continue
        found.add(current)
        for imported in imports_of(current):
            parts = imported.module.split('.')
            candidates = [ROOT.joinpath(*parts[:end]).with_suffix('.py') for end in (len(parts), len(parts) - 1)]
            if imported.where == 'module':
                todo += [candidate for candidate in candidates if candidate in FILES]
    return found


def test_the_checker_sees_every_kind_of_import():
    source = """
import a.b as c
from d import e, f
from . import g
from .h import i
from ..j import k
if TYPE_CHECKING:
    import typed
else:
    import untyped
try:
    import tried
except ImportError:
    pass
class C:
    import in_class
    def f(self):
        if True:
            import inside
        import_module('dynamic')
"""
    found = {(imported.module, imported.where) for imported in imports_in(source, 'x.y')}
    module = ['a.b', 'd.e', 'd.f', 'x.y.g', 'x.y.h.i', 'x.j.k', 'untyped', 'tried', 'in_class']
    assert found == {
        *((name, 'module') for name in module),
        ('typed', 'typing'),
        ('inside', 'function'),
        ('dynamic', 'function'),
    }
    assert Import('torch.nn', 'module', 1).is_of('torch') and not Import('torchvision', 'module', 1).is_of('torch')


def test_the_package_is_there():
    assert len(FILES) > 25
    for place in ('planning/', 'errors.py', 'format/safetensors.py', 'places/', 'sources/', 'exporters/'):
        assert files_in(place), place


@pytest.mark.parametrize('path', files_in(*PURE), ids=relative)
def test_pure_parts_need_neither_torch_nor_mmengine(path):
    """Nor does anything that they import."""
    assert breaches(sorted(imported_with(path)), ('torch', 'mmengine', 'transformers', 'deepspeed'), ANYWHERE) == []


@pytest.mark.parametrize('path', FILES, ids=relative)
def test_layers(path):
    """Whoever imports from layers below alone, and so do they, can be read without those above."""
    own = LAYERS.index(layer(path))
    upwards = [
        f'{relative(path)}:{found.line} imports {found.module}, which is above {LAYERS[own]}'
        for found in imports_of(path)
        for imported in files_of(found)
        if LAYERS.index(layer(imported)) < own
    ]
    assert upwards == []


def test_every_layer_is_there():
    assert sorted({layer(path) for path in FILES}) == sorted(LAYERS)


def test_exporters_know_no_ranks():
    assert breaches(files_in('exporters/'), ('torch.distributed',), ANYWHERE) == []
    uses = [
        f'{relative(path)}:{node.lineno}'
        for path in files_in('exporters/')
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == 'torch.distributed'
    ]
    assert uses == []


@pytest.mark.parametrize(('one', 'other'), APART)
def test_apart(one, other):
    assert breaches(files_in(f'{one}/'), (f'xhf_hooks.{other}',), ANYWHERE) == []


def test_mmengine_stays_at_the_doors():
    below = [path for path in FILES if path not in files_in(*MMENGINE_USERS)]
    assert PACKAGE / 'save.py' in below
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


@pytest.mark.parametrize('path', FILES, ids=relative)
def test_no_assert_in_the_package(path):
    """``python -O`` removes them, and users deserve a message."""
    assert [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)] == []


def public_definitions(path: Path) -> list[ast.ClassDef | ast.FunctionDef]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in tree(path).body if isinstance(node, kinds) and not node.name.startswith('_')]


@pytest.mark.parametrize('path', FILES, ids=relative)
def test_public_names_are_explained(path):
    silent = [f'{relative(path)}:{n.lineno} {n.name}' for n in public_definitions(path) if not ast.get_docstring(n)]
    assert silent == []
