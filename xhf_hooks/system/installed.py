"""The version of this package, and which versions of others work: the rest is refused, or named as never tested."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from xhf_hooks.errors import InstalledError

__version__ = '0.1.0'

#: The oldest versions that work.
LEAST = {'torch': '2.4', 'transformers': '4.46', 'deepspeed': '0.14', 'mmengine': '0.10.4'}

#: What tools/test.sh and tools/matrix.sh test together (docs/versions.md). What is most often a cause comes first.
TESTED: tuple[Mapping[str, str], ...] = tuple(
    dict(zip(('transformers', 'deepspeed', 'torch', 'mmengine'), versions, strict=True))
    for versions in (
        ('5.23.0', '0.19.6', '2.13.0', '0.10.7'),
        ('4.48.0', '0.16.2', '2.13.0', '0.10.6'),
        ('4.48.0', '0.16.2', '2.5.1', '0.10.6'),
        ('4.57.6', '0.18.9', '2.6.0', '0.10.7'),
        ('5.14.1', '0.18.9', '2.11.0', '0.10.7'),
        ('5.24.0', '0.19.6', '2.15.0', '0.10.7'),
        ('4.46.3', '0.15.4', '2.4.1', '0.10.5'),
    )
)


def installed_versions() -> dict[str, str]:
    """Package to version, of those that matter and are installed. Imports none of them."""
    found = {}
    for name in TESTED[0]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages in use, for the manifest."""
    return {'xhf_hooks': __version__, **{name: version(name) for name in ('torch', 'transformers')}}


def require_usable(*names: str) -> None:
    """Refuse versions that cannot work. A missing package is reported by what imports it.

    Raises:
        InstalledError: One of the packages ``names`` is too old.
    """
    for name, found in installed_versions().items():
        if name in names and _parts(found) < _parts(LEAST[name]):
            raise InstalledError(
                f'installed packages: expected {name} {LEAST[name]} or newer, found {name} {found}; '
                f"pip install '{name}>={LEAST[name]}' (tested sets: docs/versions.md)"
            )


def untested_set() -> str | None:
    """One line for the log if the versions of this environment were never tested together; None if they were."""
    found = installed_versions()
    nearest = min(TESTED, key=lambda tested: [_distance(found[name], tested[name]) for name in tested if name in found])
    if all(_parts(found[name]) == _parts(nearest[name]) for name in found):
        return None
    sets = [', '.join(f'{name} {versions[name]}' for name in nearest if name in found) for versions in (found, nearest)]
    return f'these versions were never tested together: {sets[0]}; the nearest tested set is {sets[1]}'


def _parts(text: str) -> tuple[int, ...]:
    """Major, minor and patch; without what a build adds, such as ``a0`` or ``+cu126``."""
    numbers = [int(digits) for digits in re.findall(r'\d+', text.partition('+')[0])]
    return (*numbers, 0, 0)[:3]


def _distance(one: str, other: str) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(_parts(one), _parts(other), strict=True))
