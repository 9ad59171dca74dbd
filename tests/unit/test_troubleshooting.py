"""docs/troubleshooting.md quotes messages that the package really has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'troubleshooting.md').read_text(encoding='utf-8')
OURS = PAGE[: PAGE.index('## Not an error of this package')]
MESSAGES = re.findall(r'^\| `([^`]+)` \|', OURS, flags=re.MULTILINE)
#: What a value that varies may be: anything, but not what ends one message and begins the next.
VARIES = '…'


def texts() -> list[str]:
    """Every string of the package, with what varies in it as one sign."""
    found = []
    for path in (ROOT / 'xhf_hooks').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else VARIES for part in node.values]
                found.append(''.join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts()


@pytest.mark.parametrize('message', MESSAGES)
def test_the_message_is_one_of_the_package(message):
    fixed = [part.strip() for part in message.split(VARIES) if len(part.strip()) > 2]
    pattern = '.*?'.join(map(re.escape, fixed))
    assert any(re.search(pattern, text, flags=re.DOTALL) for text in TEXTS), f'no message of the package: {fixed}'


def test_there_are_many():
    assert len(MESSAGES) >= 30
