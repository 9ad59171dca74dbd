"""DeepSpeed's operator for NVMe, and that for pinned memory, which it needs: compiled in a tenth of the time."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any


@functools.cache
def load_async_io() -> None:
    """Load them, for all of this process. tools/test.sh compiles them beforehand."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    compile_as_one(PinMemoryBuilder(), 'pin_memory').load()
    compile_as_one(AsyncIOBuilder(), 'py_lib').load()


def compile_as_one(builder: Any, folder: str) -> Any:
    """Let it compile its files in a folder as one, and without debugging information.

    Most instantiate the same templates of torch/extension.h, which takes nearly all of the time.
    """
    files = [Path(builder.deepspeed_src_path(name)) for name in builder.sources()]
    templates = [file for file in files if file.parent.name == folder]
    headers = sorted(templates[0].parent.glob('*.h'))  # some have no guards
    lines = [*(f'#import "{header}"' for header in headers), *(f'#include "{file}"' for file in templates)]
    one = Path(os.environ['TORCH_EXTENSIONS_DIR'], f'all_of_{builder.name}.cpp')
    if not one.exists() or one.read_text() != '\n'.join(lines):
        one.write_text('\n'.join(lines))
    sources, arguments = [str(one), *(str(file) for file in files if file not in templates)], builder.cxx_args()
    builder.sources = lambda: sources
    builder.cxx_args = lambda: [*arguments, '-g0']
    return builder
