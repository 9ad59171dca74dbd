"""Saves that are signed as the page says, with the real package; xhf-verify on what was signed."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.test_readme import code
from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.models.model_folder import flip, save_model
from tests.helpers.ranks.launch import REPO_ROOT
from tests.helpers.runs import frontends as doors
from xhf_hooks.integrity.check import FolderCheck
from xhf_hooks.verify.folder import verify_folder

pytestmark = pytest.mark.needs('model-signing')

OVERLAY = REPO_ROOT / '.overlay-model_signing'


@pytest.fixture(autouse=True)
def model_signing(monkeypatch):
    """In this process, as ``python -m model_signing``, and for the command of ``on_saved``."""
    monkeypatch.syspath_prepend(str(OVERLAY))
    monkeypatch.setenv('PYTHONPATH', f'{OVERLAY}:{os.environ.get("PYTHONPATH", "")}')
    monkeypatch.setenv('PATH', f'{Path(sys.executable).parent}:{os.environ["PATH"]}')


@pytest.fixture
def keys(tmp_path) -> Path:
    """A folder with a private and a public key, as ``openssl ecparam -name prime256v1 -genkey`` makes them."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (tmp_path / 'private.pem').write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / 'public.pem').write_bytes(
        private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return tmp_path


def signed(check: FolderCheck) -> list[tuple[str, str]]:
    return [(finding.kind, finding.text) for finding in check.findings if finding.check == 'signature']


def verifies(folder: Path, signature: Path, keys: Path) -> bool:
    command = [sys.executable, '-m', 'model_signing', 'verify', 'key', str(folder), '--signature', str(signature)]
    return subprocess.run([*command, '--public_key', str(keys / 'public.pem')], capture_output=True).returncode == 0


def test_each_save_is_signed_as_the_page_says(tmp_path, keys):
    found: dict[str, Any] = {}
    exec(code('model_signing sign key', 'on-saved.md').replace('/keys/private.pem', str(keys / 'private.pem')), found)
    options = dict(on_saved=found['on_saved'], save_strategy='steps', save_steps=2, save_total_limit=2)
    with doors.fresh_accelerate():
        doors.make_trainer(tmp_path / 'run', options, ddp_backend=None).train()
    newest, older = tmp_path / 'run' / 'hf_model', tmp_path / 'run' / 'hf_model_iter_2'
    n_files = len([*newest.iterdir()])
    for folder, label in ((newest, 'iter_4'), (older, 'iter_2')):
        results = tmp_path / 'run' / 'hf_model_on_saved' / label
        assert verifies(folder, results / 'model.sig', keys), (results / 'output.log').read_text()
        ((kind, text),) = signed(verify_folder(folder))
        assert (kind, text.partition(';')[0]) == (
            'ok',
            f'../hf_model_on_saved/{label}/model.sig: matches the {n_files} files that it covers',
        )
    assert assert_whole(newest) == 4
    flip(newest / 'model.safetensors', (newest / 'model.safetensors').stat().st_size - 1)
    assert signed(verify_folder(newest)) == [
        ('problem', '../hf_model_on_saved/iter_4/model.sig: does not match the files that it covers: model.safetensors')
    ]
    assert not verifies(newest, tmp_path / 'run' / 'hf_model_on_saved' / 'iter_4' / 'model.sig', keys)


def sign(folder: Path, keys: Path, configure: Callable[[Any], Any]) -> Path:
    from model_signing import hashing, signing

    signer = signing.Config().use_elliptic_key_signer(private_key=keys / 'private.pem')
    signer.set_hashing_config(configure(hashing.Config()))
    signer.sign(folder, folder / 'model.sig')
    return folder / 'model.sig'


@pytest.mark.parametrize('algorithm', ['sha256', 'blake3'])
@pytest.mark.parametrize('in_shards', [True, False])
def test_a_signature_in_the_folder(tmp_path, keys, algorithm, in_shards):
    """With each way in which the package makes files digests. Links, as in the hub cache, are followed."""
    folder = save_model('llama', tmp_path / 'model')
    if in_shards:
        sign(folder, keys, lambda made: made.use_shard_serialization(hashing_algorithm=algorithm, shard_size=10_000))
    else:
        sign(folder, keys, lambda made: made.use_file_serialization(hashing_algorithm=algorithm))
    (folder / 'config.json').rename(tmp_path / 'blob')
    (folder / 'config.json').symlink_to(tmp_path / 'blob')
    n_files = len([*folder.iterdir()]) - 1
    ((kind, text),) = signed(verify_folder(folder))
    assert (kind, text.partition(';')[0]) == ('ok', f'model.sig: matches the {n_files} files that it covers')
    (folder / 'notes.md').write_text('added')
    ((kind, text),) = signed(verify_folder(folder))
    assert (kind, text.partition(';')[0]) == (
        'note', f'model.sig: matches the {n_files} files that it covers, but not notes.md'
    )  # fmt: skip
    (folder / 'config.json').unlink()
    ((kind, text),) = signed(verify_folder(folder))
    assert kind == 'problem' and 'does not match the files that it covers: config.json' in text
    assert [text for _, text in signed(verify_folder(folder, read=False))] == [
        'model.sig: nothing was read (--no-read)'
    ]


def bundle_of(statement: Any) -> str:
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps({'dsseEnvelope': {'payload': payload}})


FILES = [{'name': '../../etc/passwd', 'digest': '00'}]


@pytest.mark.parametrize(
    'content',
    [
        'no JSON',
        '{}',
        bundle_of({'predicate': {'serialization': {'method': 'files', 'hash_type': 'sha256'}, 'resources': []}}),
        bundle_of({'predicate': {'serialization': {'method': 'files', 'hash_type': 'md5'}, 'resources': FILES}}),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, content):
    folder = save_model('llama', tmp_path / 'model')
    (folder / 'model.sig').write_text(content)
    ((kind, text),) = signed(verify_folder(folder))
    assert kind == 'unchecked' and 'could not be read as a signature of model-signing' in text


def test_a_signature_reads_no_file_outside_of_the_folder(tmp_path):
    folder = save_model('llama', tmp_path / 'model')
    predicate = {'serialization': {'method': 'files', 'hash_type': 'sha256'}, 'resources': FILES}
    (folder / 'model.sig').write_text(bundle_of({'predicate': predicate}))
    with patch('model_signing.hashing.Config.hash', side_effect=lambda path, files_to_hash: 1 / len(files_to_hash)):
        ((_, text),) = signed(verify_folder(folder))
    assert 'ZeroDivisionError' in text, 'a file was to be read'
