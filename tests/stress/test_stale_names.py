"""A host whose caches lead it elsewhere, or whose writes go nowhere: an error on all ranks, and nothing is replaced.

What such a host does is done here by hand, to each writer; test_network_fs.py has real ones.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.assert_intact import assert_whole, filled_with
from tests.helpers.scenarios import check, run_scenarios

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1
WRITERS = ('positional', 'parallel')
LEVELS = ('sizes', 'full')


def another_file(self: Any, plan: Any, folder: Path, made: Any) -> None:
    """As a stale cache of names does: the name stands for another file, of the same size."""
    for name, identity in made.items():
        (folder / name).rename(folder / f'{name}.real')
        with (folder / name).open('wb') as file:
            file.truncate(identity.nbytes)
    self._folder, self._made = folder, made


def save_twice(root: Path, writer: str, verify: str, target: str, replacement: Any, looks: bool = True) -> str:
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
    look = mock.patch('xhf_hooks.save.Saver._look') if not looks else contextlib.nullcontext()
    if dist.get_rank() == LAST:
        fault.start()
    try:
        with look:
            save_folder(model, root / 'hf_model', writer=writer, verify=verify, max_shard_size=1000)
        return 'no error'
    except AgreedError as error:
        return str(error)
    finally:
        if dist.get_rank() == LAST:
            fault.stop()


_LOST_WRITES = ('xhf_hooks.writers.output_file.os.pwrite', lambda fd, data, offset: len(data))
CASES = {
    **{
        f'other_file_{writer}_{verify}': (*(writer, verify, 'xhf_hooks.writers.writer.Writer.open', another_file),)
        for writer in WRITERS
        for verify in LEVELS
    },
    **{
        f'lost_writes_{writer}_{verify}': (*(writer, verify, *_LOST_WRITES),) for writer in WRITERS for verify in LEVELS
    },
    **{f'not_looked_at_{writer}': (writer, 'sizes', *_LOST_WRITES, False) for writer in WRITERS},
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
@pytest.mark.parametrize('verify', LEVELS)
def test_another_file_under_the_name_is_never_written_to(results, writer, verify):
    root, message = reported(results, f'other_file_{writer}_{verify}')
    assert "stage 'write' failed" in message and 'which rank 0 has made' in message and "writer='stream'" in message
    assert_whole(root / 'hf_model')
    assert filled_with(root / 'hf_model') == 1
    assert [path.name for path in root.iterdir()] == ['hf_model']


@pytest.mark.parametrize('writer', WRITERS)
@pytest.mark.parametrize('verify', ['sizes', 'full'])
def test_writes_that_went_nowhere_are_missed_by_another_rank(results, writer, verify):
    root, message = reported(results, f'lost_writes_{writer}_{verify}')
    assert "stage 'check' failed" in message and f'rank {LAST}:' not in message
    assert 'are not what this rank reads there' in message
    assert_whole(root / 'hf_model')
    assert filled_with(root / 'hf_model') == 1
    assert [path.name for path in root.iterdir()] == ['hf_model']


@pytest.mark.parametrize('writer', WRITERS)
def test_without_a_look_they_are_not(results, writer):
    """Only the look at each other's samples finds them, so the test above is one that can fail."""
    root, message = reported(results, f'not_looked_at_{writer}')
    assert message == 'no error'
    with pytest.raises(AssertionError):
        assert_whole(root / 'hf_model')
