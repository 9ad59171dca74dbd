"""Removes credentials from URLs, options and messages of libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_SECRET_NAMES = re.compile(r'key|secret|token|passw|credential|sas|auth|connection_string', re.IGNORECASE)
_IN_URL = re.compile(r'(?<=://)[^/\s@]*@|(?<=[^\s?])\?[^\s\'"<>]+=[^\s\'"<>]*')
_LEAST_LENGTH = 4  # shorter values are not replaced everywhere


def without_secrets(text: str, options: Mapping[str, Any] | None = None) -> str:
    """The text without user names, passwords and queries in URLs, and without secret values of ``options``."""
    for secret in sorted(_secrets_in(options or {}), key=len, reverse=True):
        text = text.replace(secret, '***')
    return _IN_URL.sub('', text)


def has_secrets(url: str) -> bool:
    """Whether a URL contains credentials: ``s3://key:secret@bucket``, or a signed query."""
    return '@' in urlsplit(url).netloc or bool(urlsplit(url).query)


def _secrets_in(options: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _secrets_in(value)
        elif isinstance(value, str) and _SECRET_NAMES.search(name) and len(value) >= _LEAST_LENGTH:
            found.add(value)
    return found
