"""A program that a user may run for a save in a store: reads the pointer, and checks the save as ``xhf-verify`` does.

python on_stored_program.py URL OUTPUT STEP LAST_STEP

For all but the last step, it first waits until the pointer names a later save, so that retention has come by.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.helpers.stored_saves import download
from xhf_hooks.cli.verify import main as verify
from xhf_hooks.places.objects import open_store
from xhf_hooks.places.store import read_pointer


def main() -> None:
    url, output, step, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    place, _, prefix = url.rpartition('/')
    store = open_store(place)
    began_with = pointer = read_pointer(store, 'hf_model')
    while step < last and pointer.newest == prefix:
        time.sleep(0.1)
        pointer = read_pointer(store, 'hf_model')
    numbers = {
        'step': step,
        'is_listed': prefix in began_with.saves,
        'is_newest': pointer.newest == prefix,
        'verified': verify([str(download(store, prefix, output))]) == 0,
    }
    print(json.dumps(numbers), flush=True)


if __name__ == '__main__':
    main()
