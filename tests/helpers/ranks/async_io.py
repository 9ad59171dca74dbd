"""DeepSpeed's operator for NVMe, compiled in a tenth of the time."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def load_async_io() -> None:
    """Load it, for all of this process. tools/test.sh compiles it beforehand.

    Nine of its files instantiate the same templates of torch/extension.h, which takes nearly all of the time. They are
    compiled as one, and without debugging information.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    files = [Path(builder.deepspeed_src_path(name)) for name in builder.sources()]
    templates = [file for file in files if file.parent.name == 'py_lib']
    headers = sorted(templates[0].parent.glob('*.h'))  # some have no guards
    lines = [*(f'#import "{header}"' for header in headers), *(f'#include "{file}"' for file in templates)]
    one = Path(os.environ['TORCH_EXTENSIONS_DIR'], 'all_of_async_io.cpp')
    if not one.exists() or one.read_text() != '\n'.join(lines):
        one.write_text('\n'.join(lines))
    sources = [str(one), *(str(file) for file in files if file not in templates)]
    builder.sources = lambda: sources
    builder.cxx_args = lambda: [*AsyncIOBuilder.cxx_args(builder), '-g0']
    builder.load()
