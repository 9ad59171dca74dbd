"""A preemption, as schedulers make it: SIGTERM to torchrun, which signals the process group of each rank and its workers.

``python tests/stress/test_preemption.py 10 signal fork`` makes ten such runs, and says in how many the save was made.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.checks.assert_intact import assert_whole

WORKERS = 4
ASYNC_AT = 3  # the iteration of the save in the background
LAST = 10_000


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return LAST

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index % 64)


def train(folder: Path, mode: str, method: str) -> None:
    """One rank: a loop of its own, with data loader workers."""
    import logging

    import torch.distributed as dist

    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs.engines import make_manager
    from tests.helpers.runs.tiny_checkpoint import iteration
    from xhf_hooks.writers.output_file import OutputFile

    dist.init_process_group('gloo')
    level = logging.INFO if dist.get_rank() == 0 else logging.ERROR
    logging.basicConfig(level=level, stream=sys.stdout, format='%(levelname)s %(message)s')
    options = {'async_save': True} if mode == 'async' else {'save_on_signal': ['SIGTERM']}
    if mode == 'async':
        write = OutputFile.write
        OutputFile.write = lambda *args: (time.sleep(2), write(*args))[1]  # in flight when the signal comes
    model = torch.nn.parallel.DistributedDataParallel(odd_llama())
    saves = make_manager(model, folder, bucket_size='1MB', **options)
    loader = torch.utils.data.DataLoader(Data(), num_workers=WORKERS, multiprocessing_context=method)
    for number, batch in enumerate(loader, 1):
        model(input_ids=batch, labels=batch).loss.backward()
        model.zero_grad()
        time.sleep(0.1)
        if dist.get_rank() == 0:
            print('iteration', number, flush=True)
        saves.look()
        if mode == 'async' and number == ASYNC_AT:
            saves.save(iteration(number))
        saves.save_if_asked(iteration(number))


def preempt(root: Path, mode: str, method: str) -> tuple[int | None, str, float]:
    """Start a run, and preempt it; returns the iteration that was saved, the output, and how long the end took."""
    command = ['torchrun', '--standalone', '--local-addr', 'localhost', '--nproc_per_node', '2']
    output = root / 'output.log'
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo', 'CUDA_VISIBLE_DEVICES': ''}
    with output.open('w') as log:
        process = subprocess.Popen(
            [*command, __file__, 'train', root / 'hf_model', mode, method], stdout=log, stderr=log, env=environment
        )
    try:
        while f'iteration {ASYNC_AT}\n' not in output.read_text():
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


@pytest.mark.parametrize('method', ['fork', 'spawn', 'forkserver'])
@pytest.mark.parametrize('mode', ['signal', 'async'])
def test_the_save_is_made(mode, method, tmp_path):
    saved, said, _ = preempt(tmp_path, mode, method)
    assert saved is not None and f'INFO test: saved iter_{saved} to hf_model' in said, said
    assert saved == ASYNC_AT if mode == 'async' else saved > ASYNC_AT, said
    assert 'DataLoader worker' not in said or mode == 'async', said


def main() -> None:
    if sys.argv[1] == 'train':
        train(Path(sys.argv[2]), *sys.argv[3:])
        return
    n_runs, n_saved = int(sys.argv[1]), 0
    for number in range(1, n_runs + 1):
        with tempfile.TemporaryDirectory() as root:
            saved, said, secs = preempt(Path(root), *sys.argv[2:])
        n_saved += saved is not None
        print(f'{n_saved} of {number}: iteration {saved}, ended {secs:.1f} s after SIGTERM', flush=True)
        if saved is None:
            print(said, flush=True)


if __name__ == '__main__':
    main()
