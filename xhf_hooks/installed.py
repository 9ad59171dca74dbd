"""The version of this package, and the oldest versions of others that work: older ones are refused by name."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from xhf_hooks.errors import InstalledError

__version__ = '0.1.0'

#: The oldest versions that work. docs/versions.md lists the sets that were tested together.
LEAST = {'torch': '2.4', 'transformers': '4.46', 'deepspeed': '0.14', 'mmengine': '0.10.4'}


def package_versions() -> dict[str, str]:
    """Versions of the packages in use, for the manifest."""
    return {'xhf_hooks': __version__, **{name: version(name) for name in ('torch', 'transformers')}}


def require_usable(*names: str) -> None:
    """Refuse versions that cannot work. A missing package is reported by what imports it.

    Raises:
        InstalledError: One of the packages ``names`` is too old.
    """
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if _parts(found) < _parts(LEAST[name]):
            raise InstalledError(
                f'installed packages: expected {name} {LEAST[name]} or newer, found {name} {found}; '
                f"pip install '{name}>={LEAST[name]}' (tested sets: docs/versions.md)"
            )


def _parts(text: str) -> tuple[int, ...]:
    """Major, minor and patch; without what a build adds, such as ``a0`` or ``+cu126``."""
    numbers = [int(digits) for digits in re.findall(r'\d+', text.partition('+')[0])]
    return (*numbers, 0, 0)[:3]
