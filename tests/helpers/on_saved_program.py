"""A program that a user may run after each save: loads the folder, which must be complete, and prints numbers.

python on_saved_program.py PATH STEP OUTPUT [WAIT_FOR_ITERATION [load]]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def manifest_of(folder: Path) -> dict:
    try:
        return json.loads((folder / 'xhf_manifest.json').read_text())
    except OSError:  # between two names
        return {}


def main() -> None:
    path, step, output = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    while manifest_of(output.parents[1] / 'hf_model').get('iteration', 0) < int(*sys.argv[4:5]):
        time.sleep(0.05)
    loaded = {}
    if sys.argv[5:] == ['load']:
        from transformers import AutoModelForCausalLM

        model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        loaded = {'tensors': len(model.state_dict()), 'missing': len(found['missing_keys'])}
    print('a line before', flush=True)
    print('a line of errors', file=sys.stderr, flush=True)
    (output / 'own_file').write_text('from the command')
    numbers = {
        'iteration': manifest_of(path)['iteration'],
        'step': step,
        'loaded': loaded,
        'is_rank': 'RANK' in os.environ or 'MASTER_ADDR' in os.environ,
        'nice': os.nice(0),
    }
    print(json.dumps(numbers), flush=True)


if __name__ == '__main__':
    main()
