"""S3 servers: moto's, which keeps objects in memory, and ``rclone serve s3``, which keeps files."""

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tests.helpers.ranks.processes import free_port, started, wait_until

BUCKET = 'bucket'
KEY, SECRET = 'AKIAEXAMPLEKEY000000', 'averysecretsecretofatest'


#: Where boto's libraries look for credentials.
CREDENTIALS = {'AWS_ACCESS_KEY_ID': KEY, 'AWS_SECRET_ACCESS_KEY': SECRET, 'AWS_DEFAULT_REGION': 'us-east-1'}


@contextmanager
def s3_server(kind: str, folder: Path, prefixes: Iterable[str] = (), options: Sequence[str] = ()) -> Iterator[str]:
    """Run a server with one bucket, ``'moto'`` or ``'rclone'``, until the block ends; gives its URL.

    Inside, credentials are in the environment.

    Args:
        folder: For rclone's objects and for the log.
        prefixes: Prefixes of saves that several processes write at once. rclone makes a folder for the first object
            under a prefix and removes it with the last one; an object that is put meanwhile is acknowledged but
            lost (18 of 1350). So these folders exist from the start, and their parents stay.
        options: Added to the command of rclone.
    """
    port = free_port()
    bucket = folder / 'objects' / BUCKET
    bucket.mkdir(parents=True, exist_ok=True)
    for prefix in prefixes:
        (bucket / prefix).mkdir(parents=True)
        (bucket / prefix).with_name('.stays').touch()
    if kind == 'moto':
        command = [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(port)]
    else:
        rclone = Path(sys.executable).with_name('rclone')
        command = [str(rclone), 'serve', 's3', '--addr', f'127.0.0.1:{port}', '--auth-key', f'{KEY},{SECRET}']
        command += ['--config', str(folder / 'none.conf'), *options, str(bucket.parent)]
    log = folder / f'{kind}.log'
    with mock.patch.dict(os.environ, CREDENTIALS), started(command, log) as process:
        wait_until(lambda: _answers(port), process, log, f'{kind} answered')
        if kind == 'moto':
            _make_bucket(port)
        yield f'http://127.0.0.1:{port}'


def _answers(port: int) -> bool:
    with socket.create_connection(('127.0.0.1', port), timeout=5):
        return True


def _make_bucket(port: int) -> None:
    import boto3

    boto3.client('s3', endpoint_url=f'http://127.0.0.1:{port}').create_bucket(Bucket=BUCKET)
