"""Folders that are whole, and every kind of damage that makes one not whole."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.model_folder import flip, save_model, write_manifest
from xhf_hooks.errors import CheckpointError, IncompleteError
from xhf_hooks.files.check import NOTE, PROBLEM, FolderCheck, check_folder
from xhf_hooks.files.checksums import sum_file
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.offline.verify.folder import verify_folder
from xhf_hooks.system.threads import WorkerThreads

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
MANIFEST = 'xhf_manifest.json'
EMBED = 'model.embed_tokens.weight'  # in the first shard
SHARDS = ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    """``one``: a file. ``shards``: two and an index. Neither has a manifest."""
    root = tmp_path_factory.mktemp('models')
    save_model('llama', root / 'one')
    save_model('llama', root / 'shards', max_shard_size='100KB')
    return root


@pytest.fixture
def folder(originals, tmp_path, request):
    """A copy of the folder that the test's parameter names, with a manifest."""
    shutil.copytree(originals / getattr(request, 'param', 'shards'), tmp_path / 'model')
    write_manifest(tmp_path / 'model')
    return tmp_path / 'model'


def found(report: FolderCheck, kind: str) -> set[str]:
    return {finding.check for finding in report.findings if finding.kind == kind}


def assert_problem(report: FolderCheck, check: str, *words: str) -> None:
    assert any(all(word in text for word in words) for text in report.problems(check)), report.lines()
    assert not report.is_good


@pytest.mark.parametrize('folder', ['one', 'shards'], indirect=True)
def test_a_whole_folder_also_with_a_note_and_without_a_manifest(folder):
    report = verify_folder(folder)
    assert report.is_good and not found(report, 'unchecked'), report.lines()
    assert {'files', 'headers', 'checksums', 'texts', 'values'} <= found(report, 'ok')
    assert ('index' in found(report, 'ok')) == (folder / INDEX).exists()
    assert report.read_nbytes == sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
    (folder / 'README.md').write_text('mine')
    report = verify_folder(folder)
    assert report.is_good and any('README.md' in finding.text for finding in report.findings)
    (folder / MANIFEST).unlink()
    report = verify_folder(folder)
    assert report.is_good and found(report, 'unchecked') == {'checksums'}


def test_a_signature_is_left_to_the_package_that_makes_it(folder):
    (folder / 'model.sig').write_text('{}')
    (found,) = [finding for finding in verify_folder(folder).findings if finding.check == 'signature']
    assert found.kind == NOTE and '`model_signing verify`' in found.text


@pytest.mark.parametrize('content', [{}, {'w': torch.empty(0)}], ids=['no tensor', 'placeholders'])
def test_weights_that_are_not_there_are_a_problem(content, folder):
    """At ZeRO-3, save_pretrained writes the placeholders of partitioned weights, whose shape is [0]."""
    (folder / 'xhf_manifest.json').unlink()
    save_file(content, folder / 'model.safetensors')
    report = verify_folder(folder)
    (found,) = [finding for finding in report.findings if finding.check == 'weights']
    assert found.kind == PROBLEM and 'model.safetensors' in found.text and not report.is_good


@pytest.mark.parametrize('name', [SHARDS[0], INDEX, 'tokenizer.json'])
def test_every_byte_counts(folder, name):
    """A bit that leaves JSON and headers well formed, too."""
    data = (folder / name).read_bytes()
    for at in {len(data) // 2, len(data) - 1, 9}:
        flip(folder / name, at)
        problems = [finding.text for finding in verify_folder(folder).findings if finding.kind == 'problem']
        assert any(name in text for text in problems), (at, problems)
        flip(folder / name, at)
    assert verify_folder(folder).is_good


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def of_json(name: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        edit(content)
        (folder / name).write_text(json.dumps(content))

    return change


def named_in_manifest(name: str) -> Callable[[Path], None]:
    return of_json(MANIFEST, lambda content: content['files'].update({name: {'nbytes': 1, 'crc32': '00000000'}}))


#: What happens to a folder with a manifest; the check that finds it, and words of its message.
CHANGED: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...]]] = {
    'a shard that is gone': (lambda folder: (folder / SHARDS[0]).unlink(), 'files', (SHARDS[0], 'missing')),
    'a file that is cut off': (lambda folder: os.truncate(folder / SHARDS[0], 5000), 'files', ('found 5000',)),
    'code that was added': (written('modeling_llama.py', 'evil'), 'files', ('modeling_llama.py',)),
    'half a manifest': (written(MANIFEST, '{'), 'manifest', ()),
    'a manifest of the future': (
        of_json(MANIFEST, lambda content: content.update(format_version=3)), 'manifest', ('upgrade',),
    ),
    **{
        f'a manifest that names {name!r}': (named_in_manifest(name), 'manifest', ('inside the folder',))
        for name in ('/etc/passwd', 'a/../../b')
    },
}  # fmt: skip


@pytest.mark.parametrize('case', CHANGED)
def test_what_changed_is_named(folder, case):
    change, check, words = CHANGED[case]
    change(folder)
    assert_problem(verify_folder(folder), check, *words)


@pytest.mark.parametrize('case', ['a shard that is gone', 'a file that is cut off'])
def test_only_what_was_read_counts_as_unchanged(folder, case):
    other = read_header(folder / SHARDS[1])
    n_files = len(list(folder.iterdir())) - 2  # neither the manifest nor the shard
    CHANGED[case][0](folder)
    report = verify_folder(folder)
    said = {(finding.kind, finding.check): finding.text for finding in report.findings}
    n_tensors = len(other.entries)
    assert said['ok', 'checksums'] == f'{n_files} files and {n_tensors} tensors, all unchanged'
    assert SHARDS[0] in said['unchecked', 'checksums']
    assert f'in {n_tensors} tensors' in said['ok', 'values']
    assert f'{n_tensors} tensors' in said.get(('ok', 'index'), f'{n_tensors} tensors')


def of_name(file: str) -> Callable[[Path], None]:
    """Let the index say that one tensor is in another file."""
    return of_json(INDEX, lambda content: content['weight_map'].update({EMBED: file}))


def of_another_dtype(folder: Path) -> None:
    data = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(data.replace(b'"F32"', b'"F16"', 1))


#: Damage that shows without a manifest; the check that finds it.
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    'index: another file': (of_name(SHARDS[1]), 'index'),
    'index: a file that is not there': (of_name('model-00003-of-00002.safetensors'), 'index'),
    'index: a file outside': (of_name(f'../model/{SHARDS[0]}'), 'index'),
    'index: a tensor that is not named': (of_json(INDEX, lambda content: content['weight_map'].pop(EMBED)), 'index'),
    'index: gone': (lambda folder: (folder / INDEX).unlink(), 'index'),
    'index: a single file beside it': (lambda folder: shutil.copy(folder / SHARDS[0], folder / WEIGHTS), 'index'),
    'a tensor in two shards': (lambda folder: shutil.copy(folder / SHARDS[0], folder / SHARDS[1]), 'index'),
    # What else is no header is safetensors' matter
    'header: longer than the file': (lambda folder: (folder / SHARDS[0]).write_bytes(bytes([127] * 8)), 'headers'),
    'header: of another dtype': (of_another_dtype, 'headers'),
}  # fmt: skip


@pytest.mark.parametrize('name', ['config.json', 'generation_config.json', 'tokenizer_config.json'])
@pytest.mark.parametrize('text', ['[]', 'null'])
def test_a_config_that_is_no_object(folder, name, text):
    (folder / MANIFEST).unlink()
    (folder / name).write_text(text)
    assert_problem(verify_folder(folder), 'texts', name, 'expected a JSON object')


def test_weights_without_their_config(folder):
    """In the folder itself, in a part of it, and of an adapter; another model below is no part of it."""
    (folder / MANIFEST).unlink()
    shutil.copytree(folder, folder / 'accelerate_state')
    (folder / 'accelerate_state' / 'config.json').unlink()
    assert verify_folder(folder).is_good
    shutil.copytree(folder / 'accelerate_state', folder / 'llm')
    assert_problem(verify_folder(folder), 'texts', 'llm/config.json is missing', f'llm/{SHARDS[0]} cannot be loaded')
    (folder / 'config.json').unlink()
    assert_problem(verify_folder(folder), 'texts', f'config.json is missing, without which {SHARDS[0]}')
    shutil.copy(folder / SHARDS[0], folder / 'adapter_model.safetensors')
    assert_problem(verify_folder(folder), 'texts', 'adapter_config.json is missing, without which adapter_model')


def test_weights_of_a_name_that_nothing_loads(tmp_path):
    save_file({'a': torch.ones(3)}, tmp_path / 'weights.safetensors')
    report = verify_folder(tmp_path)
    said = [finding.text for finding in report.findings if (finding.kind, finding.check) == ('unchecked', 'load')]
    assert report.is_good
    assert said == ['no file has a name from which from_pretrained of transformers or peft loads']


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'pytorch_model-00001-of-00002.bin', 'adapter_model.bin'])
def test_bin_files_are_told_apart(tmp_path, name):
    (tmp_path / name).write_bytes(b'x')
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(CheckpointError) as raised:
        verify_folder(tmp_path)
    assert str(raised.value) == (
        f'{tmp_path}: holds {name}, and only *.safetensors files can be checked; load the model with from_pretrained '
        f'of its class, and save it with save_pretrained, which writes them'
    )


@pytest.mark.parametrize('case', DAMAGED)
def test_damage_without_a_manifest(folder, case):
    damage, check = DAMAGED[case]
    (folder / MANIFEST).unlink()
    damage(folder)
    assert_problem(verify_folder(folder), check)


@pytest.mark.parametrize('folder', ['one'], indirect=True)
@pytest.mark.parametrize(('value', 'dtype'), [(float('nan'), torch.bfloat16), (float('-inf'), torch.float32)])
def test_values_that_are_not_finite(folder, value, dtype):
    (folder / MANIFEST).unlink()
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors['model.norm.weight'][3] = value
    save_file(tensors, folder / WEIGHTS)
    assert_problem(verify_folder(folder), 'values', 'model.norm.weight (1)')


@pytest.mark.parametrize('from_disk', [False, True])
def test_sums_of_a_file(tmp_path, from_disk):
    """Larger than one job, with tensors of every size; and a file that shrank since its header was read."""
    save_file({'a': torch.randn(5_000_000), 'b': torch.ones(3), 'none': torch.ones(0)}, tmp_path / WEIGHTS)
    header, read = read_header(tmp_path / WEIGHTS), []
    data = (tmp_path / WEIGHTS).read_bytes()
    with WorkerThreads(2) as threads:

        def sums() -> Any:
            return sum_file(tmp_path / WEIGHTS, header, threads, from_disk=from_disk, on_read=read.append)

        assert sums().crc32 == zlib.crc32(data) and sum(read) == len(data)
        found = {name: tensor.crc32 for name, tensor in sums().tensors.items()}
        assert found == {entry.name: zlib.crc32(data[entry.start : entry.end]) for entry in header.entries}
        os.truncate(tmp_path / WEIGHTS, len(data) - 5)
        with pytest.raises(OSError, match='truncated'):
            sums()


def test_folders_in_a_folder(originals, tmp_path):
    """As LLaVA and ``lora='both'`` leave them: each is checked by itself, all by one manifest."""
    whole = tmp_path / 'both'
    shutil.copytree(originals / 'one', whole)
    shutil.copytree(originals / 'shards', whole / 'llm')
    write_manifest(whole)
    assert verify_folder(whole).is_good
    flip(whole / 'llm' / SHARDS[0], -1)
    assert_problem(verify_folder(whole), 'checksums', f'llm/{SHARDS[0]}')
    (whole / 'llm' / INDEX).unlink()
    assert_problem(verify_folder(whole), 'index', f'llm/{SHARDS[0]}')


def test_files_that_no_loader_reads_may_be_added_and_changed(originals, tmp_path):
    """An evaluation's results, the card that its author completes. Of a config this is a problem."""
    folder = Path(shutil.copytree(originals / 'one', tmp_path / 'model'))
    for name in ('README.md', 'LICENSE'):
        (folder / name).write_text('ours')
    write_manifest(folder)
    for name in ('eval_results.json', 'trainer_state.json', 'requirements.txt'):
        (folder / name).write_text('{"loss": ')  # an evaluation that was killed
    (folder / 'README.md').write_text('by its author')
    (folder / 'LICENSE').write_text('mine')  # of the same size
    report = verify_folder(folder)
    assert report.is_good and 'unchecked' not in {finding.kind for finding in report.findings}
    notes = [finding.text for finding in report.findings if finding.kind == NOTE and finding.check == 'files']
    assert len(notes) == 5 and 'README.md was changed after the save; no loader reads it' in notes
    assert 'LICENSE was changed after the save; no loader reads it' in notes
    (folder / 'README.md').unlink()
    assert verify_folder(folder).is_good
    (folder / 'generation_config.json').write_text('{}')
    assert not verify_folder(folder).is_good


def test_a_checkpoint_of_a_trainer_below_is_no_part_of_the_model(originals, tmp_path):
    """Folders that belong to it, and the one of templates that transformers reads, are."""
    folder = Path(shutil.copytree(originals / 'one', tmp_path / 'model'))
    (folder / 'llm').mkdir()
    (folder / 'llm' / 'config.json').write_text('{}')
    write_manifest(folder)
    shutil.copytree(originals / 'one', folder / 'checkpoint-10')
    report = verify_folder(folder)
    assert report.is_good, report.lines()
    assert any('checkpoint-10/config.json was added' in finding.text for finding in report.findings)
    for added in ('llm/generation_config.json', 'additional_chat_templates/tools.jinja'):
        (folder / added).parent.mkdir(exist_ok=True)
        (folder / added).write_text('{}')
        assert_problem(verify_folder(folder), 'files', added)
        (folder / added).unlink()


def test_what_was_just_written_is_unchanged_whatever_reads_it(folder):
    (folder / 'README.md').write_text('ours')
    manifest = write_manifest(folder) and read_manifest(folder)
    check_folder(folder, manifest)
    (folder / 'README.md').write_text('mine')
    with pytest.raises(IncompleteError, match=r'README\.md: has changed'):
        check_folder(folder, manifest)
