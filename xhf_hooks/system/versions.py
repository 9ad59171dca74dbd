"""The version of this package, and the oldest versions of other packages that work."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata, util
from importlib.metadata import PackageNotFoundError

from xhf_hooks.errors import InstalledError

__version__ = '0.2.0'

#: Parses a file, which takes milliseconds; each object with options and each call of save_hf asks several times.
version = cache(metadata.version)
#: The oldest versions that work.
LEAST = {'torch': '2.1', 'transformers': '4.36', 'deepspeed': '0.13', 'mmengine': '0.10.3'}


def package_versions() -> dict[str, str]:
    """Versions of the packages in use, for the manifest."""
    return {'xhf_hooks': __version__, **{name: version(name) for name in ('torch', 'transformers')}}


def require_packages(*names: str) -> None:
    """Refuse to work without these packages, or with versions that cannot work.

    Raises:
        InstalledError: One of them is missing or too old.
    """
    for name in names:
        try:
            found = f'{name} {version(name)}'
            remedy = 'upgrade it, or install a tested set if other packages need an older one (docs/versions.md)'
        except PackageNotFoundError:
            if util.find_spec(name) is not None:  # a clone on PYTHONPATH, which has no metadata
                continue
            found, remedy = 'none', f"pip install '{name}>={LEAST[name]}' (tested sets: docs/versions.md)"
        if version_numbers(found) < version_numbers(LEAST[name]):  # none: 0.0.0
            raise InstalledError(f'installed packages: expected {name} {LEAST[name]} or newer, found {found}; {remedy}')


def version_numbers(text: str) -> tuple[int, ...]:
    """Major, minor and patch; without what a build adds, such as ``a0`` or ``+cu126``."""
    numbers = [int(digits) for digits in re.findall(r'\d+', text.partition('+')[0])]
    return (*numbers, 0, 0)[:3]
