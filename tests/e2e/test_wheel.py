"""The wheel, installed where neither MMEngine nor DeepSpeed is: its commands work, and say what else they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.models.model_folder import save_model
from tests.helpers.ranks.launch import REPO_ROOT

pytestmark = pytest.mark.needs()

#: What an environment with only the required packages lacks.
LACKING = ('mmengine', 'deepspeed', 'peft', 'accelerate')


#: Where the package would be hosted.
HOST = 'https://example.org/somebody/xhf_hooks'
#: Unpacks the source distribution that it makes of the folder in which it runs.
SDIST = """
import pathlib, sys, tarfile
from setuptools import build_meta
folder = pathlib.Path(sys.argv[1])
tarfile.open(folder / build_meta.build_sdist(folder)).extractall(folder)
"""


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> Path:
    """What the source distribution of all tracked files holds."""
    folder = tmp_path_factory.mktemp('sdist')
    names = subprocess.run(['git', 'ls-files'], cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout
    (folder / 'clone').mkdir()
    copy = ['cp', '--parents', *names.split(), str(folder / 'clone')]
    subprocess.run(copy, cwd=REPO_ROOT, check=True)
    command = [sys.executable, '-c', SDIST, str(folder)]
    done = subprocess.run(command, cwd=folder / 'clone', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (unpacked,) = folder.glob('xhf_hooks-*/')
    return unpacked


@pytest.fixture(scope='module')
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('wheel')
    command = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '-w', str(folder)]
    environment = os.environ | {'XHF_HOOKS_REPOSITORY': HOST}
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob('*.whl')
    return built


@pytest.fixture(scope='module')
def bare(wheel, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel; torch and what else is required are this environment's."""
    folder = tmp_path_factory.mktemp('bare') / 'venv'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(folder)], check=True)
    python = folder / 'bin' / 'python'
    (site,) = folder.glob('lib/python*/site-packages')
    for entry in Path(sysconfig.get_path('purelib')).iterdir():  # their metadata, too, by which libraries look for them
        name = entry.name.lower().lstrip('_')
        if not name.startswith((*LACKING, 'xhf_hooks', 'editable')) and entry.suffix != '.pth':
            (site / entry.name).symlink_to(entry)
    command = [sys.executable, '-m', 'pip', '--python', str(python), 'install', '-q', '--no-deps', '--no-index']
    done = subprocess.run([*command, '--ignore-installed', str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / 'bin'


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('trained')
    save_model('llama', folder / 'model')
    torch.save(load_file(folder / 'model' / 'model.safetensors'), folder / 'iter_5.pth')
    return folder / 'iter_5.pth'


def call(bare: Path, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
    program, *arguments = map(str, words)
    environment = {'PATH': f'{bare}:/usr/bin:/bin', 'HOME': '/nonexistent', 'HF_HUB_OFFLINE': '1'} | variables
    return subprocess.run([str(bare / program), *arguments], capture_output=True, text=True, env=environment, cwd='/')


def test_what_is_in_it_and_what_it_says_of_itself(wheel):
    with ZipFile(wheel) as packed:
        names = packed.namelist()
        (metadata,) = (name for name in names if name.endswith('METADATA'))
        said = message_from_bytes(packed.read(metadata))
    tracked = {str(path.relative_to(REPO_ROOT)) for path in (REPO_ROOT / 'xhf_hooks').rglob('*.py')}
    assert {name for name in names if name.startswith('xhf_hooks/')} == {*tracked, 'xhf_hooks/py.typed'}
    required = [line for line in said.get_all('Requires-Dist') if 'extra ==' not in line]
    assert required == ['torch', 'numpy', 'isal']  # by name alone: pip replaces no version of them
    assert said['Author'] and f'Source, {HOST}' in said.get_all('Project-URL')
    links = re.findall(r'\]\(([^)#]+)', said.get_payload(decode=True).decode())
    assert len(links) > 20 and [link for link in links if not link.startswith('https://')] == []


def test_the_source_distribution_has_the_tests_and_all_that_they_need(source):
    tracked = subprocess.run(['git', 'ls-files'], cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout
    lacking = {name for name in tracked.split() if not (source / name).exists()}
    assert not {name for name in lacking if not name.startswith('.')}, lacking


def test_it_converts_and_verifies(bare, checkpoint, tmp_path):
    options = ['--base', checkpoint.parent / 'model', '--max-shard-size', '20KB']
    for words in (
        ['xhf-convert', checkpoint, tmp_path / 'wheel', *options, '--verify', 'full'],
        ['xhf-verify', tmp_path / 'wheel'],
    ):
        done = call(bare, *words)
        assert done.returncode == 0, f'{words}: {done.stdout}{done.stderr}'
    convert(checkpoint, tmp_path / 'clone', *options)
    assert_same_files(tmp_path / 'wheel', tmp_path / 'clone')
    manifests = [json.loads((tmp_path / name / 'xhf_manifest.json').read_text()) for name in ('wheel', 'clone')]
    assert manifests[0]['files'] == manifests[1]['files'] and len(manifests[0]['files']) > 9


#: Prints where the package is, and what is said of things that are not there.
LACKS = """
import xhf_hooks
from xhf_hooks.registry import build_from_config
print(xhf_hooks.__file__)
for use in ('xhf_hooks.HFCheckpointHook', 'build_from_config({"type": "x"})'):
    try: exec(use)
    except Exception as error: print(error)
"""


def test_what_is_needed_beyond_is_said(bare):
    file, hook, tokenizer = call(bare, 'python', '-c', LACKS).stdout.splitlines()
    assert file.startswith(str(bare.parent)), 'the wheel, not this clone'
    assert "pip install 'mmengine>=0.10.3'" in hook
    assert 'option tokenizer: expected a tokenizer or a folder' in tokenizer


def test_an_interrupted_command_prints_no_traceback(bare, checkpoint, tmp_path):
    (tmp_path / 'transformers.py').write_text('import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n')
    done = call(bare, 'xhf-convert', checkpoint, tmp_path / 'out', PYTHONPATH=tmp_path)
    assert (done.returncode, done.stderr) == (1, 'xhf-convert: interrupted; OUT was not written\n')
