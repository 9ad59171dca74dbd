"""A save to an object store: by all ranks in parallel, and by rank 0 with boto3's transfer manager.

Each rank's uplink is throttled. The server is ``rclone serve s3`` on this machine, in memory. The slowdown of training
beside an upload is measured with few ranks and a slow uplink, which leave the server a core.

Ranks and server share the processors, so with 8 ranks at 40 MB/s 2 cores are the limit, not the uplinks. The server
keeps no MD5 of an object, and would read the object again whenever a client asks about it. Real stores do not, and with
``--etag-hash ''`` neither does this one. It still computes the MD5 of each part, as they do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.arguments import add_number, add_ranks
from bench.progress import in_turns, tell_on_stderr
from bench.throttle import Throttle
from tests.helpers.s3_servers import BUCKET, CREDENTIALS, s3_server

OURS = 'upload_to, all ranks'
BOTO3 = "rank 0 uploads the folder with boto3's transfer manager"
WAYS = (OURS, BOTO3)
SERVER_OPTIONS = ('--etag-hash', '')
#: The folder of each save, under its own prefix.
_SAVE = 'hf_model_iter_1'
_FILES_PER_RANK = 2
#: Bytes handed to the kernel at once: with smaller pieces, waiting costs more than sending.
_PIECE_NBYTES = 256 * 1024
#: What the kernel sends while a process waits for a core: a fraction of Linux's largest send buffer (tcp_wmem).
_BUFFER_NBYTES = 2**20
#: Of the model that trains beside an upload: an iteration takes some 50 ms, as little as any of a language model.
_WIDTH = 1024
#: Number of uploads beside training, and the least duration of each.
_TRAINING_REPEATS, _UPLOAD_SECS = 10, 6.0
#: A function that uploads until everything is visible, and one that ends the run.
_Way = tuple[Callable[[], None], Callable[[], None]]


def add_options(parser: ArgumentParser) -> None:
    add_ranks(parser, 8)
    add_number(parser, '--megabytes', 1660, 'size of the save in MB')
    add_number(parser, '--uplink', 40, 'upload rate of each rank in MB/s')
    add_number(parser, '--repeats', 5, 'measurements per table row')
    add_number(parser, '--training-ranks', 1, 'ranks that train during an upload')
    add_number(parser, '--training-uplink', 10, 'upload rate of each of these ranks in MB/s')


def measure(args: Namespace) -> dict[str, Any]:
    """Measure the uploads, and training beside an upload.

    Returns:
        Seconds of every run, by way; for each upload beside training, the shares of iterations and of a core.
    """
    return {**_measure_uploads(args), 'training': _measure_training(args)}


def _measure_uploads(args: Namespace) -> dict[str, Any]:
    """Measure the ways in turns."""
    memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
    turns = [f'upload-{number}' for number in range(args.repeats * len(WAYS))]
    prefixes = [f'{turn}/{_SAVE}' for turn in turns]
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        s3_server('rclone', Path(folder), prefixes=prefixes, options=SERVER_OPTIONS) as server,
    ):
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
                    server.url,
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

        def one(way: str) -> dict[str, float]:
            turn = turns.pop()
            for queue in orders:
                queue.put((way, f's3://{BUCKET}/{turn}'))
            seconds, sent = _next(results, ranks)
            objects = Path(folder, 'objects', BUCKET, turn)
            _check(objects, save)
            shutil.rmtree(objects)
            return {'seconds': seconds, 'sent_mb': sent / 1e6}

        runs = in_turns(WAYS, args.repeats, one, tell_on_stderr)
        for queue in orders:
            queue.put(None)
        for rank in ranks:
            rank.join()
    return {'ranks': args.ranks, 'uplink_nbytes_per_sec': args.uplink * 10**6, 'nbytes': nbytes, 'runs': runs}


def _next(results: Any, ranks: Sequence[Any]) -> Any:
    """The next result. Exits if a rank has failed, which has told why."""
    while results.empty():
        if any(rank.exitcode for rank in ranks):
            sys.exit('a rank has failed')
        time.sleep(0.05)
    return results.get()


def _measure_training(args: Namespace) -> dict[str, Any]:
    """Measure iterations beside an upload and, for as long, without one, in turns."""
    n_ranks, uplink = args.training_ranks, args.training_uplink * 10**6
    memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
    prefixes = [f'training-{number}/{_SAVE}' for number in range(_TRAINING_REPEATS)]
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        s3_server('rclone', Path(folder), prefixes=prefixes, options=SERVER_OPTIONS) as server,
    ):
        save = Path(folder, 'save')
        _make_save(save, n_ranks * _FILES_PER_RANK, int(n_ranks * uplink * _UPLOAD_SECS))
        context = multiprocessing.get_context('spawn')
        together, results = context.Barrier(n_ranks), context.SimpleQueue()
        ranks = [
            context.Process(
                target=_training_rank,
                args=(rank, n_ranks, server.url, str(save), uplink, together, results),
                daemon=True,
            )
            for rank in range(n_ranks)
        ]
        for rank in ranks:
            rank.start()
        taken = [_next(results, ranks) for _ in range(n_ranks * _TRAINING_REPEATS)]
        for rank in ranks:
            rank.join()
    return {'ranks': n_ranks, 'uplink_nbytes_per_sec': uplink, 'runs': taken}


def _training_rank(
    rank: int, n_ranks: int, endpoint: str, save: str, uplink: float, together: Barrier, results: Any
) -> None:
    """One process that trains; reports the shares of iterations and of a core that each upload took."""
    os.environ.update(CREDENTIALS)
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(64, _WIDTH)

    def train(is_over: Callable[[], bool]) -> float:
        """Iterations per second."""
        began, n_done = time.perf_counter(), 0
        while not is_over():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            n_done += 1
        return n_done / (time.perf_counter() - began)

    def for_secs(secs: float) -> Callable[[], bool]:
        deadline = time.perf_counter() + secs
        return lambda: time.perf_counter() > deadline

    with limited_sending(uplink):
        train(for_secs(1.0))
        for number in range(_TRAINING_REPEATS):
            begin, is_over, end = _our_upload(rank, n_ranks, endpoint, Path(save), f's3://{BUCKET}/training-{number}')
            together.wait()
            before = train(for_secs(_UPLOAD_SECS / 2))
            together.wait()
            begin()
            began, others = time.perf_counter(), time.process_time() - time.thread_time()
            beside = train(is_over)
            others = time.process_time() - time.thread_time() - others
            processor = others / (time.perf_counter() - began)
            together.wait()
            after = train(for_secs(_UPLOAD_SECS / 2))
            results.put({'slowed_by': 1 - beside / ((before + after) / 2), 'processor': processor})
            end()


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
    os.environ.update(CREDENTIALS)
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
            seconds, sent = time.perf_counter() - began, throttle.nbytes - before
            end()  # before the answer: the objects are then removed
            if rank == 0:
                results.put((seconds, sent))


def _ours(rank: int, n_ranks: int, endpoint: str, save: Path, url: str) -> _Way:
    begin, is_over, end = _our_upload(rank, n_ranks, endpoint, save, url)

    def upload() -> None:
        begin()
        is_over(3600.0)

    return upload, end


def _our_upload(
    rank: int, n_ranks: int, endpoint: str, save: Path, url: str
) -> tuple[Callable[[], None], Callable[..., bool], Callable[[], None]]:
    """Do what a run does before training; the upload has not started yet.

    Returns:
        Functions that start the upload, tell whether it ends within some seconds, and end the run.
    """
    import logging

    from xhf_hooks.background.upload import UploadJob, Uploads
    from xhf_hooks.places.store import StoredSaves
    from xhf_hooks.planning.types import Step
    from xhf_hooks.telemetry import RunLog

    log = RunLog(logging.getLogger('bench'), 'bench')
    destination = StoredSaves(url, 'hf_model', -1, {'endpoint_url': endpoint}, log.warning)
    destination.run = 'bench'  # rank 0 tells the others
    uploads = Uploads({'hf_model': destination}, log, rank, n_ranks)
    uploads.claim()

    def begin() -> None:
        uploads.add(UploadJob('hf_model', Step('iter', 1, 1), None, 1, save, 'bench'))

    def is_over(within_secs: float = 0.0) -> bool:
        over = uploads.wait(within_secs)
        if over and rank == 0 and uploads.failed:
            raise RuntimeError(f'not uploaded: {uploads.failed}')
        return over

    return begin, is_over, uploads.close


def _boto3(rank: int, n_ranks: int, endpoint: str, save: Path, url: str) -> _Way:
    """boto3 with its defaults: ten threads, parts of 8 MB."""
    import boto3

    client = boto3.client('s3', endpoint_url=endpoint)
    prefix = url.partition(f'{BUCKET}/')[2]

    def upload() -> None:
        if rank == 0:
            for path in sorted(save.iterdir()):
                client.upload_file(str(path), BUCKET, f'{prefix}/{_SAVE}/{path.name}')

    return upload, lambda: None


@contextmanager
def limited_sending(nbytes_per_sec: float) -> Iterator[Throttle]:
    """Throttle everything that this process sends through Python's sockets, like an uplink."""
    throttle = Throttle(nbytes_per_sec, _BUFFER_NBYTES)
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


def _make_save(folder: Path, n_files: int, nbytes: int) -> int:
    """Make files of random bytes with the manifest of a save."""
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
    """Check that every byte has arrived."""
    for path in save.iterdir():
        found = objects / _SAVE / path.name
        if not found.exists() or zlib.crc32(found.read_bytes()) != zlib.crc32(path.read_bytes()):
            raise RuntimeError(f'{found}: not what was uploaded')
