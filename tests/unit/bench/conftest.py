"""``bench`` is what tools/bench.py imports from the folder beside it."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = Path(__file__).parents[3] / 'tools'
sys.path.append(str(TOOLS))
