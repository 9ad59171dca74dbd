"""A save to an object store: by all ranks beside each other, and by rank 0 with boto3's transfer manager.

Each rank's uplink is throttled. The server is ``rclone serve s3``, on this machine, in memory.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.progress import Progress, end_of_progress, tell_on_stderr
from bench.throttle import Throttle

OURS = 'upload_to, all ranks'
BOTO3 = "rank 0 uploads the folder with boto3's transfer manager"
WAYS = (OURS, BOTO3)
BUCKET, KEY, SECRET = 'bucket', 'benchkeybenchkey', 'benchsecretbenchsecret'
_FILES_PER_RANK = 2
_PIECE_NBYTES = 64 * 1024
_START_SECS = 40.0
#: An upload, until all of it is visible, and what follows when a run ends.
_Way = tuple[Callable[[], None], Callable[[], None]]


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument('--ranks', type=int, default=8)
    parser.add_argument('--megabytes', type=int, default=640)
    parser.add_argument('--uplink', type=int, default=40, help='MB/s of each rank')
    parser.add_argument('--repeats', type=int, default=5)


def expected_secs(args: Namespace) -> float:
    """About how long it will take."""
    return _START_SECS + sum(_expected(args))


def _expected(args: Namespace) -> list[float]:
    alone = args.megabytes / args.uplink
    return [alone, 2.0 + alone / args.ranks] * args.repeats


def measure(args: Namespace) -> dict[str, Any]:
    """Each way in turns, in random order.

    Returns:
        Seconds of every run, by way.
    """
    memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, s3_server(Path(folder)) as endpoint:
        save = Path(folder, 'save')
        nbytes = _make_save(save, args.ranks * _FILES_PER_RANK, args.megabytes * 10**6)
        context = multiprocessing.get_context('spawn')
        barrier, among_ranks = context.Barrier(args.ranks + 1), context.Barrier(args.ranks)
        orders = [context.SimpleQueue() for _ in range(args.ranks)]
        results = context.SimpleQueue()
        ranks = [
            context.Process(
                target=_rank,
                args=(
                    rank,
                    args.ranks,
                    endpoint,
                    str(save),
                    args.uplink * 10**6,
                    (barrier, among_ranks),
                    orders[rank],
                    results,
                ),
                daemon=True,
            )
            for rank in range(args.ranks)
        ]
        for rank in ranks:
            rank.start()
        barrier.wait()
        progress = Progress(_expected(args), tell_on_stderr)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        order = random.Random(0)
        for _ in range(args.repeats):
            for way in order.sample(WAYS, len(WAYS)):
                url = f's3://{BUCKET}/{uuid.uuid4().hex}'
                for queue in orders:
                    queue.put((way, url))
                seconds, sent = results.get()
                runs[way].append({'seconds': seconds, 'sent_mb': sent / 1e6})
                objects = Path(folder, 'objects', *url.partition('://')[2].split('/'))
                _check(objects, save)
                shutil.rmtree(objects)
                progress.done(way, seconds)
        end_of_progress()
        for queue in orders:
            queue.put(None)
        for rank in ranks:
            rank.join()
    return {'ranks': args.ranks, 'uplink_nbytes_per_sec': args.uplink * 10**6, 'nbytes': nbytes, 'runs': runs}


def _rank(
    rank: int,
    n_ranks: int,
    endpoint: str,
    save: str,
    uplink: float,
    barriers: tuple[Barrier, Barrier],
    orders: Any,
    results: Any,
) -> None:
    """One process of the run that saves."""
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_DEFAULT_REGION='us-east-1')
    all_processes, among_ranks = barriers
    prepare: dict[str, Callable[[int, int, str, Path, str], _Way]] = {OURS: _ours, BOTO3: _boto3}
    with limited_sending(uplink) as throttle:
        all_processes.wait()
        while (order := orders.get()) is not None:
            way, url = order
            upload, end = prepare[way](rank, n_ranks, endpoint, Path(save), url)
            among_ranks.wait()
            began, before = time.perf_counter(), throttle.nbytes
            upload()
            if rank == 0:
                results.put((time.perf_counter() - began, throttle.nbytes - before))
            end()


def _ours(rank: int, n_ranks: int, endpoint: str, save: Path, url: str) -> _Way:
    """What is done before training is done; what is done with a save is not yet."""
    import logging

    from xhf_hooks.planning.types import Step
    from xhf_hooks.stores import open_store
    from xhf_hooks.telemetry.log import RunLog
    from xhf_hooks.uploads.job import UploadJob
    from xhf_hooks.uploads.to_store import StoreDestination
    from xhf_hooks.uploads.upload_thread import UploadThread

    destination = StoreDestination(open_store(url, {'endpoint_url': endpoint}), 'hf_model', -1)
    if rank == 0:
        destination.claim()
    else:
        destination.require_usable()
    thread = UploadThread({'hf_model': destination}, RunLog(logging.getLogger('bench'), 'bench'), None)

    def upload() -> None:
        step = Step('iter', 1, 1)
        thread.add(UploadJob(1, 'hf_model', 'hf_model_iter_1', step, save, rank, n_ranks), [])
        thread.wait(3600.0)
        if rank == 0 and thread.uploaded != ['hf_model_iter_1']:
            raise RuntimeError(f'not uploaded: {thread.failed}')

    def end() -> None:
        thread.end()
        destination.release()

    return upload, end


def _boto3(rank: int, n_ranks: int, endpoint: str, save: Path, url: str) -> _Way:
    """As by default: ten threads, parts of 8 MB."""
    import boto3

    client = boto3.client('s3', endpoint_url=endpoint)
    prefix = url.partition(f'{BUCKET}/')[2]

    def upload() -> None:
        if rank == 0:
            for path in sorted(save.iterdir()):
                client.upload_file(str(path), BUCKET, f'{prefix}/hf_model_iter_1/{path.name}')

    return upload, lambda: None


@contextmanager
def limited_sending(nbytes_per_sec: float) -> Iterator[Throttle]:
    """All that this process sends through sockets of Python waits, as at an uplink."""
    throttle = Throttle(nbytes_per_sec)
    send = socket.socket.send

    def limited(self: socket.socket, data: Any, *flags: int) -> int:
        sent = send(self, memoryview(data)[:_PIECE_NBYTES], *flags)
        throttle.wrote(sent)
        return sent

    def limited_all(self: socket.socket, data: Any, *flags: int) -> None:
        view = memoryview(data).cast('B')
        while len(view):
            view = view[limited(self, view, *flags) :]

    def limited_messages(self: socket.socket, buffers: Sequence[Any], *args: Any) -> int:
        return limited(self, next((buffer for buffer in buffers if len(buffer)), b''))

    patched: dict[str, Any] = {'send': limited, 'sendall': limited_all, 'sendmsg': limited_messages}
    for name, function in patched.items():
        setattr(socket.socket, name, function)
    try:
        yield throttle
    finally:
        for name in patched:
            delattr(socket.socket, name)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """``rclone serve s3`` with an empty bucket below ``folder/objects``; gives its URL."""
    (folder / 'objects' / BUCKET).mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    rclone = str(Path(sys.executable).with_name('rclone'))
    command = [rclone, 'serve', 's3', '--addr', f'127.0.0.1:{port}', '--auth-key', f'{KEY},{SECRET}']
    command += ['--config', str(folder / 'none.conf'), str(folder / 'objects')]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=5):
                break
            time.sleep(0.1)
        yield f'http://127.0.0.1:{port}'
    finally:
        process.terminate()
        process.wait()


def _make_save(folder: Path, n_files: int, nbytes: int) -> int:
    """Files of random bytes, with the manifest of a save."""
    folder.mkdir()
    files = {}
    for number in range(n_files):
        name = f'model-{number + 1:05d}-of-{n_files:05d}.safetensors'
        data = random.Random(number).randbytes(nbytes // n_files)
        (folder / name).write_bytes(data)
        files[name] = {'nbytes': len(data), 'crc32': f'{zlib.crc32(data):08x}', 'tensors': {}}
    manifest = {'format_version': 2, 'step': {'unit': 'iter', 'number': 1}, 'iteration': 1, 'files': files}
    (folder / 'xhf_manifest.json').write_text(json.dumps(manifest))
    return sum(path.stat().st_size for path in folder.iterdir())


def _check(objects: Path, save: Path) -> None:
    """Every byte has arrived."""
    for path in save.iterdir():
        found = objects / 'hf_model_iter_1' / path.name
        if not found.exists() or zlib.crc32(found.read_bytes()) != zlib.crc32(path.read_bytes()):
            raise RuntimeError(f'{found}: not what was uploaded')
