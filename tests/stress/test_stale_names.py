"""A host whose caches lead it elsewhere, or whose writes go nowhere: an error on all ranks, and nothing is replaced.

What such a host does is done here by hand, to each writer; test_network_fs.py has real ones.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.assert_intact import assert_whole, filled_with
from tests.helpers.scenarios import check, run_scenarios

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1
WRITERS = ('positional', 'parallel')


def another_file(self: Any, plan: Any, folder: Path, made: Any) -> None:
    """As a stale cache of names does: the name stands for another file, of the same size."""
    for name, identity in made.items():
        (folder / name).rename(folder / f'{name}.real')
        with (folder / name).open('wb') as file:
            file.truncate(identity.nbytes)
    self._folder, self._made = folder, made


def save_twice(root: Path, writer: str, verify: str, target: str, replacement: Any) -> str:
    """A good save, and one in which something happens on the last rank. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.engines import save_folder
    from tests.helpers.kill_runs import fill
    from tests.helpers.syscall_faults import small_model
    from xhf_hooks.errors import AgreedError

    model = small_model()
    fill(model, 1)
    save_folder(model, root / 'hf_model', writer=writer, verify=verify, max_shard_size=1000)
    fill(model, 2)
    dist.barrier()
    fault = mock.patch(target, replacement)
    if dist.get_rank() == LAST:
        fault.start()
    try:
        save_folder(model, root / 'hf_model', writer=writer, verify=verify, max_shard_size=1000)
        return 'no error'
    except AgreedError as error:
        return str(error)
    finally:
        if dist.get_rank() == LAST:
            fault.stop()


CASES = {
    **{
        f'other_file_{writer}': (writer, 'sizes', 'xhf_hooks.writers.writer.Writer.open', another_file)
        for writer in WRITERS
    },
    **{
        f'lost_writes_{writer}': (
            writer,
            'full',
            'xhf_hooks.writers.output_file.os.pwrite',
            lambda fd, data, _: len(data),
        )
        for writer in WRITERS
    },
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('stale')
    return root, run_scenarios({name: partial(_run, root / name, name) for name in CASES}, WORLD_SIZE, init='torch')


def _run(root: Path, name: str) -> str:
    return save_twice(root, *CASES[name])


def reported(results: Any, name: str) -> tuple[Path, str]:
    root, outcomes = results
    (message,) = set(check(outcomes, name))
    return root / name, message


@pytest.mark.parametrize('writer', WRITERS)
def test_another_file_under_the_name_is_never_written_to(results, writer):
    root, message = reported(results, f'other_file_{writer}')
    assert "stage 'write' failed" in message and 'which rank 0 has made' in message and "writer='stream'" in message
    assert_whole(root / 'hf_model')
    assert filled_with(root / 'hf_model') == 1
    assert [path.name for path in root.iterdir()] == ['hf_model']


@pytest.mark.parametrize('writer', WRITERS)
def test_a_full_check_misses_writes_that_went_nowhere(results, writer):
    root, message = reported(results, f'lost_writes_{writer}')
    assert "stage 'commit' failed" in message and 'rank 0:' in message
    assert_whole(root / 'hf_model')
    assert filled_with(root / 'hf_model') == 1
    assert [path.name for path in root.iterdir()] == ['hf_model']
