"""``xhf_manifest.json``: the file that makes a folder a checkpoint of ours. Written last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from xhf_hooks.records import SavePlan, Step

MANIFEST_NAME = 'xhf_manifest.json'
FORMAT_VERSION = 1


def write_manifest(folder: Path, plan: SavePlan, step: Step, facts: dict[str, Any]) -> None:
    """Describe a complete staged folder and flush the description to disk. Runs on: rank 0."""
    content = {
        'format_version': FORMAT_VERSION,
        'step': {'unit': step.unit, 'number': step.number},
        'iteration': step.iteration,
        **facts,
        'n_tensors': len(plan.placements),
        'files': {file.name: {'nbytes': file.nbytes} for file in plan.files},
    }
    with (folder / MANIFEST_NAME).open('w', encoding='utf-8') as file:
        json.dump(content, file, indent=2)
        file.write('\n')
        file.flush()
        os.fsync(file.fileno())


def read_step(folder: Path) -> Step | None:
    """The step that a folder of ours was saved at; None when it is not a whole folder of ours."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text(encoding='utf-8'))
        return Step(content['step']['unit'], int(content['step']['number']), int(content['iteration']))
    except (OSError, ValueError, KeyError, TypeError):
        return None
