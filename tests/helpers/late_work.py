"""Background work that needs its threads while the interpreter is shutting down.

python tests/helpers/late_work.py RESULT raise|exit|end

It needs only the standard library, so that any Python can run it. Used by tests/stress/test_late_work.py.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[2] / 'xhf_hooks'


def load(name: str) -> ModuleType:
    """Load a module from its file, since the package imports torch."""
    spec = importlib.util.spec_from_file_location(name, PACKAGE / f'{name}.py')
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    result, how = Path(sys.argv[1]), sys.argv[2]
    threads = load('threads')

    def work() -> None:
        while threading.main_thread().is_alive():  # until the interpreter shuts down
            time.sleep(0.001)
        result.write_text(str(sum(threads.WorkerThreads(1).run([lambda n=n: n for n in range(100)]))))

    background = threads.Background(work, 'late')
    threads.ExitWait(lambda: background.wait(60))
    if how == 'raise':
        raise RuntimeError('training failed')
    if how == 'exit':
        sys.exit(3)


if __name__ == '__main__':
    main()
