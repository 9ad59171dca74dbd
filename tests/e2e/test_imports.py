"""What an import of the package brings along or lacks: each in a process that has imported nothing yet."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.ranks import HANG_SECS, REPO_ROOT

#: As if MMEngine and DeepSpeed were not installed.
BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'deepspeed'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Missing())
"""
WITHOUT_MMENGINE = """
import xhf_hooks
from xhf_hooks.errors import OptionError
from xhf_hooks.registry import build_from_config
xhf_hooks.save_hf
try: xhf_hooks.HFCheckpointHook
except ImportError as error: print(error)
try: build_from_config({'type': 'x'})
except OptionError as error: print(error)
"""
IMPORTED_BY_US = """
import sys
import mmengine.hooks
before = set(sys.modules)
import xhf_hooks
heavy = ('deepspeed', 'transformers', 'peft', 'xtuner')
print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] in heavy))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-c', code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=HANG_SECS
    )


def test_without_mmengine_hook_and_tokenizer_config_are_refused():
    """The hook says what to install."""
    done = run(BARE + WITHOUT_MMENGINE)
    assert done.returncode == 0, done.stderr
    hook, tokenizer = done.stdout.splitlines()
    assert "pip install 'xhf_hooks[mmengine]'" in hook
    assert 'option tokenizer: expected a tokenizer or a folder' in tokenizer


def test_import_of_the_package_is_light():
    """What MMEngine itself imports is not ours to change; beyond that nothing heavy comes in."""
    done = run(IMPORTED_BY_US)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == '[]'
