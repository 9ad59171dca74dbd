"""How the benchmark starts its processes: as in the virtual environment of this Python, entered or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Billions of parameters to the number of layers; all else is equal, so the largest tensor is too. Here, since the
#: worker imports DeepSpeed, which prints a warning to standard output, and that is for the table alone.
LAYERS = {0.2: 1, 0.8: 14, 1.6: 30}


def torchrun(n_processes: int) -> list[str]:
    """The command, up to the script."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--local-addr', 'localhost']
    return [*command, '--nproc_per_node', str(n_processes)]


def environment(**variables: str) -> dict[str, str]:
    """No GPU; and what ``use_env`` in env.sh sets: DeepSpeed compiles with the ninja that lies beside this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [os.environ.get('PATH')])])
    packages = [str(Path(__file__).parents[1]), variables.pop('PYTHONPATH', os.environ.get('PYTHONPATH', ''))]
    variables['PYTHONPATH'] = os.pathsep.join(filter(None, packages))  # this package, for scripts in it
    extensions = {'TORCH_EXTENSIONS_DIR': str(Path(sys.prefix, 'torch_extensions'))}
    ours = {'PATH': path, 'DS_ACCELERATOR': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
    return extensions | os.environ | ours | variables
