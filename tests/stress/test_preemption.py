"""A preemption, as schedulers make it: SIGTERM to torchrun, which signals the process group of each rank.

One run is started by torchrun. The others are forked from the server of `tests.helpers.ranks.launch`, which has
imported what they need, and signalled as by torchrun.

``python tests/stress/test_preemption.py 10 signal fork`` makes ten such runs by torchrun, and says in how many the save
was made.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Process
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.ranks.killed import WORLD_SIZE, join_group
from tests.helpers.ranks.launch import HANG_SECS, python_path, start_process

#: By how they are started; all but forked ones import everything anew.
WORKERS = {'fork': 4, 'spawn': 2, 'forkserver': 2}
ASYNC_AT = 3  # the iteration of the save in the background
LAST = 10_000


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return LAST

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index % 64)


def train(folder: Path, mode: str, method: str) -> None:
    """One rank: a loop of its own, with data loader workers. Runs on: all ranks, in a process group."""
    import logging

    import torch.distributed as dist

    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs.engines import open_run
    from tests.helpers.runs.tiny_checkpoint import iteration
    from xhf_hooks.files.output_file import OutputFile

    level = logging.INFO if dist.get_rank() == 0 else logging.ERROR
    logging.basicConfig(level=level, stream=sys.stdout, format='%(levelname)s %(message)s')
    options = (
        {'async_save': True} if mode == 'async' else {'save_on_signal': ['SIGTERM'], 'upload_to': store_of(folder)}
    )
    if mode == 'async':
        write = OutputFile.write
        OutputFile.write = lambda *args: (time.sleep(0.2), write(*args))[1]  # in flight when the signal comes
    model = torch.nn.parallel.DistributedDataParallel(odd_llama())
    saves = open_run(model, folder, bucket_size='1MB', **options)
    loader = torch.utils.data.DataLoader(Data(), num_workers=WORKERS[method], multiprocessing_context=method)
    for number, batch in enumerate(loader, 1):
        model(input_ids=batch, labels=batch).loss.backward()
        model.zero_grad()
        time.sleep(0.1)
        if dist.get_rank() == 0:
            print('iteration', number, flush=True)
        saves.poll_background()
        if mode == 'async' and number == ASYNC_AT:
            saves.save(iteration(number))
        saves.save_if_requested(iteration(number))


def train_in_mode(folder: Path, mode: str, method: str) -> None:
    (train if mode in ('signal', 'async') else train_with_runner)(folder, mode, method)


def launch(root: Path, mode: str, method: str) -> subprocess.Popen[bytes]:
    """Start a run by torchrun."""
    command = ['torchrun', '--standalone', '--local-addr', 'localhost', '--nproc_per_node', '2', __file__, 'train']
    more = {
        'PYTHONPATH': python_path(),
        'OMP_NUM_THREADS': '1',
        'GLOO_SOCKET_IFNAME': 'lo',
        'CUDA_VISIBLE_DEVICES': '',
        'DS_ACCELERATOR': 'cpu',
    }
    with (root / 'output.log').open('w') as log:
        return subprocess.Popen(
            [*command, root / 'hf_model', mode, method], stdout=log, stderr=log, env={**os.environ, **more}
        )


@dataclass(frozen=True)
class ForkedRanks:
    """A run whose ranks have a process group each, as those of torchrun; its methods are those of a Popen."""

    processes: list[Process]

    @classmethod
    def start(cls, root: Path, mode: str, method: str) -> 'ForkedRanks':
        store = root / f'store_of_{mode}'
        return cls(
            [start_process(_train_forked, rank, root, store, mode, method, daemon=False) for rank in range(WORLD_SIZE)]
        )

    def poll(self) -> int | None:
        return next((process.exitcode for process in self.processes if process.exitcode is not None), None)

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            os.killpg(process.pid, number)

    def wait(self) -> int:
        """Wait for all ranks; returns the exit code of the first that failed, or 0."""
        for process in self.processes:
            process.join(HANG_SECS)
        return next((process.exitcode for process in self.processes if process.exitcode), 0)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def _train_forked(rank: int, root: Path, store: Path, mode: str, method: str) -> None:
    os.setsid()
    output = os.open(root / 'output.log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    multiprocessing.set_forkserver_preload([])  # a fork server of its own needs nothing of what that of ranks imports
    join_group(rank, store)
    train_in_mode(root / 'hf_model', mode, method)


def train_with_runner(folder: Path, mode: str, method: str) -> None:
    """One rank of MMEngine's FlexibleRunner with DeepSpeedStrategy, whose loop starts its workers when it is built.

    Args:
        mode: 'first' never ends; 'requeued' resumes it in the same work_dir, with worse scores, for some iterations.
    """
    import deepspeed
    import torch.distributed as dist
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    from tests.helpers.runs.toy_run import run_config
    from tests.helpers.runs.toy_run import train as train_runner

    class Slowly(Hook):
        def after_train_iter(self, runner: Any, *args: Any, **options: Any) -> None:
            time.sleep(0.1)
            if dist.get_rank() == 0:
                print('iteration', runner.iter + 1, flush=True)

    deepspeed.init_distributed(dist_backend='gloo')
    HOOKS.register_module(module=Slowly)
    work_dir, is_first = folder.parent / 'work', mode == 'first'
    last = LAST if is_first else int((work_dir / 'last_checkpoint').read_text().rsplit('_', 1)[1].split('.')[0]) + 4
    config = run_config(
        work_dir,
        hook=dict(
            out_dir=str(folder), save_on_signal='SIGTERM', save_best='acc', interval=LAST, upload_to=store_of(folder)
        ),
        stage=3,
        max_iters=last,
        scores=[0.1, 0.9, *[0.5] * 100] if is_first else [0.7] * 100,
        hooks=[dict(type='Slowly')],
        resume=not is_first,
    )
    config['train_dataloader'] |= dict(num_workers=WORKERS[method], multiprocessing_context=method)
    train_runner(config)
    if os.environ['RANK'] == '0':  # the ranks share the output, in which their words would mix
        print(f'ended at iteration {last}', flush=True)


def store_of(folder: Path) -> str:
    """The URL of the store to which a run uploads."""
    return (folder.parent / 'stored').as_uri()


def uploaded(root: Path) -> int:
    """The iteration of the newest save that the only run has uploaded, by its pointer."""
    (pointer,) = root.glob('stored/*/hf_model.json')
    content = json.loads(pointer.read_text())
    number = assert_whole(pointer.with_name(content['newest']))
    assert content['newest'] == f'hf_model_iter_{number}'
    return number


def preempt(root: Path, mode: str, process: 'subprocess.Popen[bytes] | ForkedRanks') -> tuple[int | None, str, float]:
    """Preempt a run; returns the iteration that was saved, the output, and how long the end took."""
    output = root / 'output.log'
    at = ASYNC_AT if mode in ('signal', 'async') else 4  # whose scores are the best
    try:
        while not output.exists() or f'iteration {at + 1}\n' not in output.read_text():
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait()
    finally:
        process.kill()
    is_saved = (root / 'hf_model').exists()
    return assert_whole(root / 'hf_model') if is_saved else None, output.read_text(), time.monotonic() - began


@pytest.mark.parametrize(
    ('mode', 'method'), [('signal', 'fork'), ('signal', 'spawn'), ('signal', 'forkserver'), ('async', 'fork')]
)
def test_the_save_is_made(mode, method, tmp_path):
    saved, said, _ = preempt(tmp_path, mode, ForkedRanks.start(tmp_path, mode, method))
    assert saved is not None and f'INFO test: saved iter_{saved} to hf_model' in said, said
    assert saved == ASYNC_AT if mode == 'async' else saved > ASYNC_AT, said
    assert 'DataLoader worker' not in said or mode == 'async', said
    assert mode == 'async' or uploaded(tmp_path) == saved, said


def test_a_runner_is_preempted_requeued_into_its_work_dir_and_resumed(tmp_path):
    """The first run is torchrun's."""
    saved, said, _ = preempt(tmp_path, 'first', launch(tmp_path, 'first', 'fork'))
    assert saved is not None and saved > 4 and f'saved iter_{saved} to hf_model' in said, said
    assert assert_whole(tmp_path / 'hf_model_best') == 4, said
    assert uploaded(tmp_path) == saved, said
    status = ForkedRanks.start(tmp_path, 'requeued', 'fork').wait()
    said = (tmp_path / 'output.log').read_text()
    last = int(said.rsplit('ended at iteration ', 1)[-1].split()[0]) if status == 0 else -1
    assert last >= saved - 1 + 4 and assert_whole(tmp_path / 'hf_model') == last, said
    assert assert_whole(tmp_path / 'hf_model_best') == 4, 'its score is better than those of the resumed run'


def main() -> None:
    if sys.argv[1] == 'train':
        torch.distributed.init_process_group('gloo')
        train_in_mode(Path(sys.argv[2]), *sys.argv[3:])
        return
    n_runs, n_saved = int(sys.argv[1]), 0
    for number in range(1, n_runs + 1):
        with tempfile.TemporaryDirectory() as root:
            saved, said, secs = preempt(Path(root), sys.argv[2], launch(Path(root), *sys.argv[2:]))
        n_saved += saved is not None
        print(f'{n_saved} of {number}: iteration {saved}, ended {secs:.1f} s after SIGTERM', flush=True)
        if saved is None:
            print(said, flush=True)


if __name__ == '__main__':
    main()
