"""Checkpoints and saves that older versions wrote once (tests/golden/folders), read by the installed ones.

tools/golden_folders.py has made them, each with the versions in its ``golden.json``.
"""

import json
import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.compare import bytes_in
from tests.helpers.checks.converted import convert
from tests.helpers.ranks.launch import REPO_ROOT, run_ranks
from tests.helpers.runs.hook_runs import refusal_of, saves
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.offline.commands import verify
from xhf_hooks.system.versions import version_numbers

FOLDERS = REPO_ROOT / 'tests' / 'golden' / 'folders'
RECORDS: dict[str, dict[str, Any]] = {
    file.parent.name: json.loads(file.read_text()) for file in sorted(FOLDERS.glob('*/golden.json'))
}
assert len(RECORDS) > 10, FOLDERS
CONVERSIONS = [(name, expected) for name, record in RECORDS.items() for expected in record.get('conversions', ())]
#: Name of the golden folder, and the save in it.
SAVES = [
    (name, manifest.parent.relative_to(FOLDERS / name).as_posix())
    for name in RECORDS
    for manifest in sorted((FOLDERS / name).rglob('xhf_manifest.json'))
]
OWN_RUNS = [name for name, record in RECORDS.items() if 'commit' in record]
#: Its manifests have no checksums, and are of a format that this package no longer reads.
FIRST_FORMAT = 'save_of_b7c4fcc9'


@pytest.mark.parametrize(('name', 'expected'), CONVERSIONS)
def test_a_checkpoint_is_converted_byte_for_byte(name, expected, tmp_path, monkeypatch):
    """Its weight files are those that were written there of the gathered model, or by the hook of the run."""
    monkeypatch.chdir(FOLDERS / name)
    checkpoint, *options = RECORDS[name]['conversions'][expected]
    out = convert(checkpoint, tmp_path / 'out', *options, '--verify', 'full')
    (wanted,) = Path().glob(expected)
    found, weights = bytes_in(out, '*.safetensors'), bytes_in(wanted, '*.safetensors')
    assert weights and found.keys() == weights.keys()
    assert [file for file, data in weights.items() if found[file] != data] == []
    assert verify.main([str(out), '--load']) == verify.SAME


@pytest.mark.parametrize(('name', 'save'), [one for one in SAVES if FIRST_FORMAT not in one])
def test_a_save_is_good_and_loads(name, save, monkeypatch):
    """An older peft than the one that wrote an adapter may not load it."""
    monkeypatch.chdir(FOLDERS / name)
    written_by = RECORDS[name].get('versions', {}).get('peft', '0')
    loads = ['--load'] if version_numbers(version('peft')) >= version_numbers(written_by) else []
    assert verify.main([save, *loads]) == verify.SAME


def continue_in(folder: Path) -> None:
    """A run that saves where an older version of this package saved."""
    hook = dict(interval=2, by_epoch=False, max_keep_ckpts=2, out_dir=str(folder / 'hf_model'))
    train(run_config(folder / 'run', hook=hook, stage=None))


def refusal_of_continuing(folder: Path) -> str:
    return refusal_of(partial(continue_in, folder))


@pytest.mark.parametrize('name', [name for name in OWN_RUNS if name != FIRST_FORMAT])
def test_a_run_continues_in_an_older_folder(name, tmp_path):
    """It replaces the newest save. It deletes those whose manifests say under which name they were committed."""
    older, folder = FOLDERS / name, tmp_path / 'folder'
    shutil.copytree(older, folder)
    run_ranks(continue_in, 1, folder, init=None)
    tells_name = bool(read_manifest(older / 'hf_model').commit.name)
    expected = {'hf_model': 4, 'hf_model_iter_2': 2}
    if not tells_name:  # the older ones stay
        expected |= {'hf_model_iter_2_2': 2, 'hf_model_iter_4': 4}
    assert saves(folder) == expected
    assert all(verify.main([str(folder / save)]) == verify.SAME for save in expected)
    if not tells_name:
        assert bytes_in(folder / 'hf_model_iter_4') == bytes_in(older / 'hf_model')
        assert bytes_in(folder / 'hf_model_iter_2') == bytes_in(older / 'hf_model_iter_2')
    assert read_manifest(folder / 'hf_model').commit.number == 4, 'the numbers of commits go on'


def test_the_first_format_is_refused_before_training_and_stays(tmp_path, capsys):
    folder = tmp_path / 'folder'
    shutil.copytree(FOLDERS / FIRST_FORMAT, folder)
    assert verify.main([str(folder / 'hf_model')]) != verify.SAME
    said = capsys.readouterr()
    assert 'format_version is 1, expected 2' in said.out + said.err
    assert 'holds files that this package did not write' in run_ranks(refusal_of_continuing, 1, folder)[0]
    assert bytes_in(FOLDERS / FIRST_FORMAT).items() <= bytes_in(folder).items()
