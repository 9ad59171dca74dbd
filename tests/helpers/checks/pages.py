"""The pages, and the blocks of code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = {path.name: path.read_text(encoding='utf-8') for path in [ROOT / 'README.md', *(ROOT / 'docs').glob('*.md')]}


def blocks(language: str, page: str = 'README.md') -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```$', PAGES[page], flags=re.MULTILINE | re.DOTALL)


def code(containing: str, page: str = 'README.md') -> str:
    (found,) = [block for block in blocks('python', page) if containing in block]
    return found
