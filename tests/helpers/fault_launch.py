"""Runs scenarios on ranks with the fault layer: python -m tests.helpers.fault_launch MODULE FOLDER.

The layer must be loaded when a process starts, so this starts a new server for the ranks to be forked from. MODULE has
``scenarios(root)``; their outcomes are written to FOLDER/outcomes.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

from tests.helpers import fault_layer
from tests.helpers.ranks import python_path
from tests.helpers.scenarios import Outcome, run_scenarios

WORLD_SIZE = 2


def launch(module: str, root: Path, layer: Path) -> dict[str, list[Outcome]]:
    """Run it in a separate process.

    Args:
        layer: A folder for the compiled layer.
    """
    environment = {**os.environ, **fault_layer.environment(layer), 'PYTHONPATH': python_path()}
    command = [sys.executable, '-m', 'tests.helpers.fault_launch', module, str(root)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return pickle.loads((root / 'outcomes').read_bytes())


def main() -> None:
    module, root = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
    outcomes = run_scenarios(module.scenarios(root), WORLD_SIZE)
    (root / 'outcomes').write_bytes(pickle.dumps(outcomes))


if __name__ == '__main__':
    main()
