"""``xhf-convert CHECKPOINT s3://...`` against real servers: the bytes of a local conversion, complete or invisible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.converted import assert_same_files, convert
from tests.helpers.s3_servers import BUCKET, CREDENTIALS, SECRET, S3Server, s3_server
from tests.helpers.stored_saves import download_newest
from tests.helpers.zoo import build
from xhf_hooks.cli import verify
from xhf_hooks.cli.convert import BAD_INPUT, DONE, FAILED, main
from xhf_hooks.integrity.against_manifest import check_folder
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.stores import Store, open_store
from xhf_hooks.stores.publication import Publication, read_pointer
from xhf_hooks.stores.store_lock import StoreLock
from xhf_hooks.stores.stored_folder import StoredFolder

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

#: Files of several blocks, and several of them.
SMALL = ('--max-shard-size', '30KB', '--workers', '4')
CASES: dict[str, tuple[str, ...]] = {
    'one file': (),
    'sharded': SMALL,
    'one thread': ('--max-shard-size', '30KB', '--workers', '1'),
    'read back': (*SMALL, '--verify'),
    'cast': (*SMALL, '--dtype', 'float16'),
    'merged': (*SMALL, '--lora', 'merge'),
    'both': (*SMALL, '--lora', 'both', '--verify'),
}
_written: list[str] = []
_watching = threading.Event()


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """``iter_7.pth`` of the model in ``base``; ``lora.pth`` of the adapter in ``adapted``, which is of that model."""
    import peft

    root = tmp_path_factory.mktemp('trained')
    build('qwen2', seed=1).save_pretrained(root / 'base')
    torch.save({'state_dict': build('qwen2').state_dict(), 'meta': {'iter': 7}}, root / 'iter_7.pth')
    model = peft.get_peft_model(
        build('qwen2', seed=1), peft.LoraConfig(r=4, target_modules=['q_proj', 'down_proj'], task_type='CAUSAL_LM')
    )
    model.peft_config['default'].base_model_name_or_path = str(root / 'base')
    for name, parameter in model.named_parameters():
        if 'lora_' in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(root / 'adapted')
    torch.save({'state_dict': model.state_dict(), 'meta': {'iter': 7}}, root / 'lora.pth')
    return root


@pytest.fixture(scope='module', params=['moto', 'rclone'])
def server(request, tmp_path_factory):
    with s3_server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: S3Server, monkeypatch):
    for name, value in {**CREDENTIALS, 'AWS_ENDPOINT_URL': server.backend_args['endpoint_url']}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(StoreLock, 'settle_secs', 0.0)


@pytest.fixture
def url(request):
    return f's3://{BUCKET}/{abs(hash(request.node.name))}/läufe'


def command(trained: Path, out: str | Path, *options: str) -> list[str]:
    is_lora = '--lora' in options
    checkpoint, base = ('lora.pth', 'adapted') if is_lora else ('iter_7.pth', 'base')
    return [str(trained / checkpoint), str(out), '--base', str(trained / base), *options]


def in_store(url: str) -> set[str]:
    """The pointer, the lock, prefixes of saves, and unfinished uploads."""
    store = open_store(url)
    return {key.partition('/')[0] for key in store.list()} | {*store.unfinished_uploads().values()}


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed for a failed command: one line."""
    lines = [line for line in capsys.readouterr().err.splitlines() if 'note:' not in line and 'converting' not in line]
    assert len(lines) == 1 and lines[0].startswith('xhf-convert: '), lines
    return lines[0]


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: what this process opens for writing."""
    if event == 'open' and _watching.is_set() and not isinstance(arguments[0], int):
        path, mode, flags = arguments
        if set('wax+') & set(mode) if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _written.append(str(path))


@pytest.mark.parametrize('case', CASES)
def test_the_bytes_of_a_local_conversion(trained, url, tmp_path, monkeypatch, capsys, case):
    from xhf_hooks.writers.file_io import blocks

    local = convert(*command(trained, tmp_path / 'local', *CASES[case]))
    monkeypatch.setattr(blocks, 'BLOCK_NBYTES', 4096)
    sys.addaudithook(watch)
    _written.clear()
    _watching.set()
    try:
        assert main(command(trained, url, *CASES[case])) == DONE
    finally:
        _watching.clear()
    assert [path for path in _written if not path.startswith('/dev/')] == []
    assert f'wrote {url}/hf_model_iter_7: ' in capsys.readouterr().out
    assert in_store(url) == {'hf_model.json', 'hf_model_iter_7'}
    found = download_newest(open_store(url), tmp_path / 'downloaded')
    assert_same_files(found, local)
    check_folder(found, json.loads((found / MANIFEST_NAME).read_text()), 'full')
    manifests = [json.loads((folder / MANIFEST_NAME).read_text()) for folder in (found, local)]
    assert manifests[0].keys() == manifests[1].keys() and manifests[0]['files'] == manifests[1]['files']
    assert len([*found.rglob('*.safetensors')]) > 1 or case == 'one file'


def test_xhf_verify_finds_it_equal(trained, url, capsys):
    assert main(command(trained, url, *SMALL)) == DONE
    capsys.readouterr()
    assert verify.main([url]) == verify.SAME
    assert verify.main([str(trained / 'iter_7.pth'), url, '--base', str(trained / 'base')]) == verify.SAME
    assert 'identical' in capsys.readouterr().out
    assert verify.main([str(trained / 'base'), url]) == verify.DIFFERENT, 'it is not the model that it began with'


def test_a_place_with_saves(trained, url, capsys):
    convert(*command(trained, url))
    before = {key: info.changed for key, info in open_store(url).list().items()}
    capsys.readouterr()
    assert main(command(trained, url)) == main(command(trained, url, '--dry-run')) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.count(f'{url} already holds saves (newest: hf_model_iter_7)') == 2 and '--overwrite' in said
    assert main(command(trained, f'{url}/hf_model_iter_7', '--overwrite')) == BAD_INPUT
    assert 'is a save' in errors(capsys)
    assert {key: info.changed for key, info in open_store(url).list().items()} == before, 'nothing was sent'
    assert main(command(trained, url, '--overwrite', '--dtype', 'bfloat16')) == DONE
    assert read_pointer(open_store(url), 'hf_model').newest == 'hf_model_iter_7_2'
    assert in_store(url) == {'hf_model.json', 'hf_model_iter_7', 'hf_model_iter_7_2'}
    assert verify.main([url]) == verify.main([f'{url}/hf_model_iter_7']) == verify.SAME


def test_a_dry_run_sends_nothing(trained, url, capsys):
    assert main(command(trained, url, '--dry-run')) == DONE
    assert f'would write to {url}' in capsys.readouterr().out and in_store(url) == set()


@pytest.mark.parametrize(
    ('out', 'status', 'expected'),
    [
        ('hf://org/name', BAD_INPUT, 'for the Hub, use upload_to'),
        (f's3://key:{SECRET}@{BUCKET}/run', BAD_INPUT, 'a URL without credentials'),
        ('gs://bucket/run', BAD_INPUT, "pip install 'xhf_hooks[gcs]'"),
        ('s3://no-such-bucket/run', FAILED, 's3://no-such-bucket/run'),
    ],
)
def test_refused_before_weights_are_read(trained, capsys, monkeypatch, out, status, expected):
    monkeypatch.setattr('xhf_hooks.convert.conversion.send_weights', None)
    assert main(command(trained, out)) == status
    said = errors(capsys)
    assert expected in said and 'OUT' in said and SECRET not in said


def test_in_use_by_another_run(trained, url, capsys):
    other = Publication(open_store(url), 'hf_model', 1)
    other.claim()
    assert main(command(trained, url)) == FAILED
    assert f'in use by process {os.getpid()}' in errors(capsys) and in_store(url) == {'hf_model.lock'}
    other.release()


@pytest.mark.parametrize('options', [(), ('--verify',)])
def test_other_bytes_than_were_sent(trained, url, capsys, monkeypatch, options):
    """With --verify anywhere, without it in the samples."""
    read = StoredFolder.read

    def flip(self, name, start, nbytes):
        data = bytearray(read(self, name, start, nbytes))
        if not options or nbytes > 1000:
            data[-1] ^= 1
        return bytes(data)

    monkeypatch.setattr(StoredFolder, 'read', flip)
    assert main(command(trained, url, *options)) == FAILED
    said = errors(capsys)
    assert 'set OUT to another place' in said and ('read back' in said) == bool(options)
    assert not any(key.startswith('hf_model_iter') and MANIFEST_NAME in key for key in open_store(url).list())
    assert read_pointer(open_store(url), 'hf_model') is None


def test_a_store_that_refuses_in_the_middle(trained, url, capsys, monkeypatch):
    parts, made = Store._parts, []

    def refuse_third(self, key, part_nbytes):
        made.append(key)
        if len(made) == 3:
            raise OSError('SlowDown')
        return parts(self, key, part_nbytes)

    from xhf_hooks.stores.s3_store import S3Store

    monkeypatch.setattr(S3Store, '_parts', refuse_third)
    assert main(command(trained, url, *SMALL)) == FAILED
    assert 'SlowDown' in errors(capsys)
    assert read_pointer(open_store(url), 'hf_model') is None


# Ends the process, or fails, when half of the files are sent.
HALFWAY = """
import os, signal, sys, time
from xhf_hooks.cli.convert import main
from xhf_hooks.writers.file_io.file_in_store import FileInStore

write, files, action = FileInStore.write, set(), sys.argv.pop(1)

def halfway(self, data, offset):
    files.add(self)
    if len(files) == 4:
        os.kill(os.getpid(), getattr(signal, action))
        time.sleep(1)
    write(self, data, offset)

FileInStore.write = halfway
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(('action', 'status'), [('SIGTERM', FAILED), ('SIGKILL', -signal.SIGKILL)])
def test_what_ends_halfway_is_invisible(trained, url, capsys, action, status):
    arguments = command(trained, url, *SMALL)
    finished = subprocess.run(
        [sys.executable, '-c', HALFWAY, action, *arguments], capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == status, finished.stderr
    assert read_pointer(open_store(url), 'hf_model') is None
    assert verify.main([url]) != verify.SAME
    left = in_store(url)
    if action == 'SIGTERM':
        assert 'interrupted' in finished.stderr and 'hf_model.lock' not in left
    else:
        assert left == {'hf_model.lock', 'hf_model_iter_7'}
    assert main(arguments) == DONE, 'the next one clears up'
    assert len(in_store(url)) == 2 and verify.main([url]) == verify.SAME
