"""Limits on open files: the soft one is raised before it is met, a hard one is named before anything is written."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tests.helpers.ranks import run_ranks
from tests.helpers.zoo.llamas import llama


def save_with_few_files(root: Path) -> dict[str, str]:
    """Save into a file for each tensor with a low soft limit, then with a low hard one. Runs on: all ranks."""
    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    model, messages = llama(), {}
    save_hf(model, root / 'warm')  # whatever is imported and connected first
    n_open = len(os.listdir('/proc/self/fd'))
    for which, limits in {'soft': (n_open + 8, 4096), 'hard': (n_open + 8, n_open + 8)}.items():
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        try:
            committed = save_hf(model, root / which, max_shard_size=100, writer='positional')
            messages[which] = f'{len(list(committed.path.glob("*.safetensors")))} files'
        except XhfError as error:
            messages[which] = f'{type(error).__name__}: {error}'
    return messages


def test_the_soft_limit_is_raised_and_the_hard_one_named(tmp_path):
    for messages in run_ranks(save_with_few_files, 2, tmp_path, init='torch'):
        assert messages['soft'] == '21 files'
        assert messages['hard'].startswith("AgreedError: stage 'plan' failed on rank 0: LimitError"), messages
        assert '21 files of weights' in messages['hard'] and 'ulimit -Hn' in messages['hard']
    assert not (tmp_path / 'hard').exists()
