"""Who may import what (docs/how-it-works.md), read from the source: a breach names the file and the line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from xhf_hooks.system.versions import LEAST, version_numbers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / 'xhf_hooks'
FILES = sorted(PACKAGE.rglob('*.py'))

#: Never need torch or mmengine, so that they can be understood and tested without.
PURE = (
    'planning/',
    'errors.py',
    'options.py',
    'format/safetensors.py',
    'system/files.py',
    'system/linux_calls.py',
    'system/versions.py',
    'system/threads.py',
    'files/check.py',
    'files/checksums.py',
    'files/manifest.py',
    'places/checkpoint_folder.py',
    'places/store.py',
)
#: From the top: each imports from those below it, and from itself.
LAYERS = (
    '__init__', 'extending', 'xtuner', 'integrations', 'runs', 'offline', 'options', 'places', 'files',
    'sources', 'exporters', 'planning', 'ranks', 'registry', 'format', 'system', 'model', 'compat', 'errors',
)  # fmt: skip


class Import(NamedTuple):
    """One imported module, absolute; ``at_once``: neither in a function nor under ``if TYPE_CHECKING``."""

    module: str
    line: int
    at_once: bool


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import of a file; none is relative. ``from a import b`` counts as ``a.b``, which may be a module."""
    return list(_walk(ast.parse(path.read_text(encoding='utf-8')), True))


def _walk(node: ast.AST, at_once: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_once) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level
        yield from (Import(f'{node.module}.{alias.name}', node.lineno, at_once) for alias in node.names)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        at_once = False
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith('TYPE_CHECKING') and child in node.body
        yield from _walk(child, at_once and not is_typing)


@cache
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
    """Those of these files and folders (with a final slash) of the package."""
    return [path for path in FILES if relative(path).startswith(places)]


def all_but(*places: str) -> list[Path]:
    return [path for path in FILES if path not in files_in(*places)]


def breaches(paths: list[Path], forbidden: tuple[str, ...], at_once: bool = False) -> list[str]:
    """Imports of these packages, or those among them that happen when the file is imported."""
    return [
        f'{relative(path)}:{found.line} imports {found.module}'
        for path in paths
        for found in imports_of(path)
        if found.at_once >= at_once and f'{found.module}.'.startswith(tuple(f'{package}.' for package in forbidden))
    ]


def imported_with(path: Path) -> set[Path]:
    """The files of the package that come along when ``path`` is imported, apart from ``__init__`` files."""
    found, todo = set(), [path]
    while todo:
        current = todo.pop()
        if current not in found and current.name != '__init__.py':
            found.add(current)
            todo += [file for new in imports_of(current) if new.at_once for file in files_of(new)]
    return found


def test_pure_parts_need_neither_torch_nor_mmengine():
    """Nor does anything that they import."""
    for place in PURE:
        assert files_in(place), place
    paths = set().union(*map(imported_with, files_in(*PURE)))
    assert breaches(sorted(paths), ('torch', 'mmengine', 'transformers', 'deepspeed')) == []


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


HEAVY = ('deepspeed', 'transformers', 'peft', 'xtuner', 'axolotl', 'torch.distributed.fsdp', 'torch.distributed.tensor')
#: Files, and what they must not import.
FORBIDDEN = {
    'exporters know no ranks': (files_in('exporters/', 'xtuner/'), ('torch.distributed',)),
    'sources apart': (files_in('sources/', 'offline/checkpoint/'), ('xhf_hooks.exporters', 'xhf_hooks.files')),
    'exporters apart': (files_in('exporters/', 'xtuner/'), ('xhf_hooks.files',)),
    'own extensions are known to the registry alone': (all_but('xtuner/'), ('xhf_hooks.xtuner',)),
    'mmengine at the doors': (all_but('integrations/mmengine/', 'registry.py', 'offline/commands/'), ('mmengine',)),
    'neither tests nor tools are there': (FILES, ('tests', 'tools')),
}


def test_what_older_readers_need_ends_with_transformers_4():
    needed = version_numbers(LEAST['transformers']) < (5,)
    for file in ('exporters/assets/older_readers.py', 'exporters/older_tensors.py'):
        assert (PACKAGE / file).exists() == needed, 'the first lines of older_readers.py say what goes with it'


@pytest.mark.parametrize('rule', FORBIDDEN)
def test_forbidden(rule):
    files, packages = FORBIDDEN[rule]
    assert files and breaches(files, packages) == []


def test_saves_name_no_training_engine():
    """What they need to know of one, its source says. A command of on_saved gets no launcher's variables."""
    named = [relative(path) for path in files_in('runs/') if 'deepspeed' in path.read_text(encoding='utf-8').lower()]
    assert named == ['runs/ends/on_saved.py']


def test_one_room_knows_xtuner():
    """Besides it: its frontend, options that only its models have, and the list of the package's own extensions."""
    named = [relative(path) for path in all_but('xtuner/') if 'xtuner' in path.read_text(encoding='utf-8').lower()]
    assert named == ['integrations/xtuner_v1.py', 'options.py', 'registry.py']


def test_heavy_packages_are_imported_when_used():
    """Each integration is imported by those who have what it is for."""
    assert breaches(all_but('integrations/'), HEAVY, at_once=True) == []


#: Methods that open, connect, start, handle or communicate.
ACTS = (
    'start', 'connect', 'open', 'stage', 'from_rank0', 'signal', 'register', 'register_after_fork', 'mkdir', 'acquire',
)  # fmt: skip
#: MMEngine builds the hook, and then a loop that starts data loader workers, before it calls the hook.
MUST_ACT = ['integrations/mmengine/hf_checkpoint_hook.py: SignalProofChildren.start']


def test_constructors_only_store():
    acting = [
        f'{relative(path)}: {ast.unparse(call.func)}'
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8')))
        if isinstance(node, ast.FunctionDef) and node.name in ('__init__', '__post_init__')
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition('.')[2] in ACTS
    ]
    assert acting == MUST_ACT


#: Attributes of modules and of configs that every user of torch and transformers knows.
WELL_KNOWN = ('_parameters', '_buffers', '_modules', '_name_or_path', '_commit_hash', '_exit')


def names_of_the_package() -> set[str]:
    """What the package itself defines: functions, classes, variables, attributes of its objects."""
    found = set()
    for node in (node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding='utf-8')))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target).rpartition('.')[2])
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == 'self':
            found.add(node.attr)
    return found


def private_names_in(path: Path) -> set[str]:
    """The private names that a file asks other objects for, or imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ('getattr', 'hasattr', 'setattr'):
            found.update(part.value for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant))
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
    return {name for name in found if re.match('_[^_]', str(name))}


def test_each_private_name_of_a_library_stands_in_one_file():
    """There it can be looked after: which versions have it, and what happens without."""
    ours = names_of_the_package() | {*WELL_KNOWN}
    places: dict[str, list[str]] = {}
    for path in FILES:
        for name in private_names_in(path) - ours:
            places.setdefault(name, []).append(relative(path))
    assert {'_z3_optimizer', '_hp_mapping', '_weight_conversions'} <= places.keys()
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_layers_are_those_that_imports_are_checked_by():
    page = (ROOT / 'docs' / 'how-it-works.md').read_text(encoding='utf-8')
    table = page.partition('## Layers')[2].partition('## Invariants')[0]
    cells = re.findall(r'^\| (`[^|]+) \|', table, flags=re.MULTILINE)
    told = [name.removesuffix('/').removesuffix('.py') for cell in cells for name in re.findall('`([^`]+)`', cell)]
    assert told == [*LAYERS[1:]]


def test_what_test_modules_share_is_in_helpers():
    files = sorted((ROOT / 'tests').rglob('*.py'))
    imports = {f'{path.name}, line {one.line}': one.module for path in files for one in imports_of(path)}
    assert len(files) > 200
    assert [at for at, name in imports.items() if re.match(r'tests\.(.+\.)?(test_|conftest\b)', name)] == []


def test_the_quick_tier_names_what_is_there():
    """pytest says nothing of a path in ``testpaths`` that matches nothing."""
    listed = re.search(r'^testpaths = \[\n(.+?)^\]', (ROOT / 'pyproject.toml').read_text(), re.MULTILINE | re.DOTALL)
    patterns = re.findall(r'"([^"]+)"', listed[1])
    assert len(patterns) > 10 and [pattern for pattern in patterns if not [*ROOT.glob(pattern)]] == []
