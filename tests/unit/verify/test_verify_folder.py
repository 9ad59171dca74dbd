"""Folders that are whole, and every kind of damage that makes one not whole."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.model_folder import edit_json, flip, manifest_of, save_model, save_tokenizer, write_manifest
from tests.helpers.zoo import FAMILIES, available, build
from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.errors import CheckpointError, DamagedError, IncompleteError
from xhf_hooks.files.mapped_file import map_or_none
from xhf_hooks.integrity.against_manifest import check_folder
from xhf_hooks.integrity.checksums import FileToRead, sum_files
from xhf_hooks.integrity.findings import FolderReport
from xhf_hooks.verify.folder import verify_folder

WEIGHTS, INDEX, MANIFEST = 'model.safetensors', 'model.safetensors.index.json', 'xhf_manifest.json'
FIRST_SHARD = 'model-00001-of-00002.safetensors'


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    """``one``: a file. ``shards``: two and an index. ``tied``: tied embeddings. None has a manifest."""
    root = tmp_path_factory.mktemp('models')
    save_model('llama', root / 'one')
    save_model('llama', root / 'shards', max_shard_size='100KB')
    save_model('qwen2', root / 'tied')
    return root


@pytest.fixture
def folder(originals, tmp_path, request):
    """A copy of the folder that the test's parameter names, with a manifest."""
    kind = getattr(request, 'param', 'shards')
    shutil.copytree(originals / kind, tmp_path / 'model')
    write_manifest(tmp_path / 'model')
    return tmp_path / 'model'


def problems(report: FolderReport) -> list[tuple[str, str]]:
    return [(finding.check, finding.text) for finding in report.findings if finding.kind == 'problem']


def unchecked(report: FolderReport) -> set[str]:
    return {finding.check for finding in report.findings if finding.kind == 'unchecked'}


def assert_problem(report: FolderReport, check: str, *words: str) -> None:
    found = [text for name, text in problems(report) if name == check]
    assert any(all(word in text for word in words) for text in found), report.lines()
    assert not report.is_good


@pytest.mark.parametrize('folder', ['one', 'shards', 'tied'], indirect=True)
def test_a_whole_folder(folder):
    report = verify_folder(folder)
    assert problems(report) == [] and unchecked(report) == set(), report.lines()
    checks = {finding.check for finding in report.findings if finding.kind == 'ok'}
    assert {'files', 'headers', 'checksums', 'config', 'texts', 'tokenizer', 'values'} <= checks
    assert ('index' in checks) == (folder / INDEX).exists()
    files = [path for path in folder.iterdir() if path.name != MANIFEST]
    assert report.read_nbytes == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize('kind', ['one', 'shards', 'tied'])
def test_a_whole_folder_of_anyone(originals, kind):
    report = verify_folder(originals / kind)
    assert problems(report) == [] and unchecked(report) == {'checksums'}


def test_a_manifest_without_checksums_says_so(folder):
    manifest = manifest_of(folder)
    files = {name: {'nbytes': file['nbytes']} for name, file in manifest['files'].items() if 'safetensors' in name}
    (folder / MANIFEST).write_text(json.dumps({**manifest, 'format_version': 1, 'files': files}))
    report = verify_folder(folder)
    assert problems(report) == [] and unchecked(report) == {'checksums'}


@pytest.mark.parametrize('name', [FIRST_SHARD, INDEX, 'config.json', 'tokenizer.json', 'generation_config.json'])
def test_every_byte_counts(folder, name):
    """A bit that leaves JSON and headers well formed, too."""
    data = (folder / name).read_bytes()
    for at in {len(data) // 2, len(data) - 1, 9}:
        flip(folder / name, at)
        assert not verify_folder(folder, model=False).is_good, (name, at)
        flip(folder / name, at)
    assert verify_folder(folder, model=False).is_good


def test_a_changed_tensor_is_named(folder):
    flip(folder / FIRST_SHARD, -1)
    name = list(manifest_of(folder)['files'][FIRST_SHARD]['tensors'])[-1]
    assert_problem(verify_folder(folder), 'checksums', FIRST_SHARD, name)


def test_a_changed_header_text_is_named(folder):
    data = (folder / FIRST_SHARD).read_bytes()
    (folder / FIRST_SHARD).write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"'))
    assert_problem(verify_folder(folder), 'checksums', FIRST_SHARD, 'outside of its tensors')


@pytest.mark.parametrize('name', [FIRST_SHARD, INDEX, 'config.json', 'generation_config.json'])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    assert_problem(verify_folder(folder), 'files', name, 'missing')


def test_a_short_and_a_long_file(folder):
    data = (folder / FIRST_SHARD).read_bytes()
    for changed in (data[:-1], data + b'\0'):
        (folder / FIRST_SHARD).write_bytes(changed)
        report = verify_folder(folder)
        assert_problem(report, 'files', FIRST_SHARD, f'{len(data)} bytes')
        assert_problem(report, 'headers', FIRST_SHARD)


def test_a_file_that_was_put_there(folder):
    (folder / 'README.md').write_text('mine')
    report = verify_folder(folder)
    assert problems(report) == [] and any('README.md' in finding.text for finding in report.findings)
    (folder / 'modeling_llama.py').write_text('evil')
    assert_problem(verify_folder(folder), 'files', 'modeling_llama.py')


@pytest.mark.parametrize('drop_cache', [False, True])
def test_files_that_cannot_be_read(folder, tmp_path, drop_cache):
    """One that shrank since it was listed, a folder, one that is gone: each is an error of its own."""
    path = folder / FIRST_SHARD
    wanted = [(path, path.stat().st_size), (path, path.stat().st_size + 5), (tmp_path, 4096), (tmp_path / 'none', 1)]
    with WorkerThreads(2) as threads:
        found = sum_files([FileToRead(*file) for file in wanted], threads, drop_cache=drop_cache)
    assert found[0].error is None and found[0].crc32 == zlib.crc32(path.read_bytes())
    assert 'truncated' in found[1].error and 'directory' in found[2].error and 'No such file' in found[3].error


def test_a_mapped_file_that_shrinks(tmp_path):
    """Touching such a page is SIGBUS; so is a sector that cannot be read."""
    path = tmp_path / 'file'
    path.write_bytes(bytes(10**6))
    with path.open('rb') as file:
        mapped = map_or_none(file.fileno(), 10**6)
        with mapped.view(500_000, 10**6) as view:
            assert view[0] == 0
        mapped.forget(0, 10**6)
        os.truncate(path, 4096)
        with pytest.raises(OSError, match='Input/output'):
            mapped.view(500_000, 10**6)
        mapped.close()


@pytest.mark.parametrize('damage', ['', '{', '[]', '{"format_version": 2}', '{"format_version": 3, "files": {}}'])
def test_a_damaged_manifest(folder, damage):
    (folder / MANIFEST).write_text(damage)
    assert_problem(verify_folder(folder, model=False), 'manifest')


@pytest.mark.parametrize('name', ['../evil', '/etc/passwd', 'a/../../b', '', '.', 'a//b', 'a\0b'])
def test_a_manifest_that_points_outside(folder, name):
    manifest = manifest_of(folder)
    manifest['files'][name] = {'nbytes': 1, 'crc32': '00000000'}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert_problem(verify_folder(folder, model=False), 'manifest', 'inside the folder')


def damage_index(folder: Path, kind: str) -> None:
    content = json.loads((folder / INDEX).read_text())
    weight_map = content['weight_map']
    name = next(iter(weight_map))
    if kind == 'other file':
        weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])
    elif kind == 'lost file':
        weight_map[name] = 'model-00003-of-00002.safetensors'
    elif kind == 'outside':
        weight_map[name] = f'../model/{weight_map[name]}'
    elif kind == 'not named':
        del weight_map[name]
    elif kind == 'no such tensor':
        weight_map['model.layers.9.weight'] = weight_map[name]
    elif kind == 'total_size':
        content['metadata']['total_size'] += 1
    elif kind == 'no map':
        content['weight_map'] = [name]
    elif kind == 'not texts':
        weight_map[name] = 3
    (folder / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize(
    'kind',
    ['other file', 'lost file', 'outside', 'not named', 'no such tensor', 'total_size', 'no map', 'not texts'],
)
def test_an_index_that_is_not_of_the_files(folder, kind):
    (folder / MANIFEST).unlink()
    damage_index(folder, kind)
    assert_problem(verify_folder(folder, model=False), 'index')


def test_shards_without_their_index(folder):
    (folder / MANIFEST).unlink()
    (folder / INDEX).unlink()
    assert_problem(verify_folder(folder, model=False), 'index', 'there is no')


def test_an_index_without_its_shards(folder):
    for path in [folder / MANIFEST, *folder.glob('*.safetensors')]:
        path.unlink()
    (folder / 'extra.safetensors').write_bytes((folder / INDEX).read_bytes())
    assert_problem(verify_folder(folder, model=False), 'index')


@pytest.mark.parametrize('folder', ['one'], indirect=True)
@pytest.mark.parametrize('value', [float('nan'), float('inf'), float('-inf')])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_that_are_not_finite(folder, value, dtype):
    (folder / MANIFEST).unlink()
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors['model.norm.weight'][3] = value
    save_file(tensors, folder / WEIGHTS)
    assert_problem(verify_folder(folder, model=False), 'values', 'model.norm.weight (1)')


def test_values_that_the_manifest_knows_not_to_be_finite(folder):
    manifest = manifest_of(folder)
    next(iter(manifest['files'][FIRST_SHARD]['tensors'].values()))['non_finite'] = 5
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert_problem(verify_folder(folder, model=False), 'values', '(5)')


@pytest.mark.parametrize(
    'changed', [{'hidden_size': 36}, {'num_hidden_layers': 3}, {'num_hidden_layers': 1}, {'num_hidden_layers': 10**9}]
)
@pytest.mark.parametrize('folder', ['one'], indirect=True)
def test_a_config_of_another_model(folder, changed):
    (folder / MANIFEST).unlink()
    edit_json(folder / 'config.json', **changed)
    assert_problem(verify_folder(folder), 'config')


@pytest.mark.parametrize('folder', ['one'], indirect=True)
def test_a_model_that_transformers_does_not_know(folder):
    (folder / MANIFEST).unlink()
    edit_json(folder / 'config.json', model_type='nobody', architectures=['NobodyForCausalLM'])
    report = verify_folder(folder)
    assert problems(report) == [] and 'config' in unchecked(report)


@pytest.mark.parametrize('folder', ['one'], indirect=True)
@pytest.mark.parametrize('known', [True, False])
def test_more_tokens_than_rows(folder, known):
    (folder / MANIFEST).unlink()
    if not known:
        edit_json(folder / 'config.json', architectures=['NobodyForCausalLM'])
    save_tokenizer(folder, 132)
    assert_problem(verify_folder(folder), 'tokenizer', 'w127', '131 rows')


@pytest.mark.parametrize('folder', ['one'], indirect=True)
@pytest.mark.parametrize('eos', [131, [2, 500], -2])
def test_an_end_token_beyond_the_rows(folder, eos):
    (folder / MANIFEST).unlink()
    edit_json(folder / 'generation_config.json', eos_token_id=eos)
    assert_problem(verify_folder(folder), 'tokenizer', 'eos_token_id')


@pytest.mark.parametrize('folder', ['tied'], indirect=True)
@pytest.mark.parametrize('known', [True, False])
def test_tied_weights_that_are_stored_twice(folder, known):
    (folder / MANIFEST).unlink()
    if not known:
        edit_json(folder / 'config.json', architectures=['NobodyForCausalLM'], tie_word_embeddings=True)
    tensors = load_file(folder / WEIGHTS)
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].clone()
    save_file(tensors, folder / WEIGHTS, {'format': 'pt'})
    assert problems(verify_folder(folder)) == []
    tensors['lm_head.weight'][0, 0] += 1
    save_file(tensors, folder / WEIGHTS, {'format': 'pt'})
    assert_problem(verify_folder(folder), 'ties', 'lm_head.weight', 'differ')


@pytest.fixture
def adapter(tmp_path):
    """A LoRA adapter as peft saves it."""
    from peft import LoraConfig, get_peft_model

    from tests.helpers.zoo import build

    get_peft_model(build('llama'), LoraConfig(r=4, target_modules=['q_proj', 'v_proj'])).save_pretrained(tmp_path / 'a')
    return tmp_path / 'a'


def test_an_adapter(adapter):
    report = verify_folder(adapter)
    assert problems(report) == [] and any(finding.check == 'adapter' for finding in report.findings)
    edit_json(adapter / 'adapter_config.json', r=8)
    assert_problem(verify_folder(adapter), 'adapter', 'rank')
    edit_json(adapter / 'adapter_config.json', r=4)
    tensors = load_file(adapter / 'adapter_model.safetensors')
    name = next(name for name in tensors if 'lora_A' in name)
    del tensors[name]
    save_file(tensors, adapter / 'adapter_model.safetensors')
    assert_problem(verify_folder(adapter), 'adapter', 'other half')


def test_folders_in_a_folder(originals, adapter, tmp_path):
    """As LLaVA and ``lora='both'`` leave them: each is checked by itself, all by one manifest."""
    whole = tmp_path / 'both'
    shutil.copytree(originals / 'one', whole)
    shutil.copytree(originals / 'tied', whole / 'llm')
    shutil.copytree(adapter, whole / 'adapter')
    write_manifest(whole)
    report = verify_folder(whole)
    assert problems(report) == []
    assert sum(finding.check == 'config' and finding.kind == 'ok' for finding in report.findings) == 2
    flip(whole / 'llm' / WEIGHTS, -1)
    assert_problem(verify_folder(whole, model=False), 'checksums', f'llm/{WEIGHTS}')


def test_what_holds_nothing_to_check(tmp_path, originals):
    for path in (tmp_path / 'none', tmp_path, originals / 'one' / WEIGHTS):
        with pytest.raises(CheckpointError):
            verify_folder(path)
    (tmp_path / 'pytorch_model.bin').write_bytes(b'x')
    with pytest.raises(CheckpointError, match=r'pytorch_model\.bin'):
        verify_folder(tmp_path)


def test_a_folder_around_several(originals, tmp_path):
    """A work_dir is not a model: the user is told which there are."""
    shutil.copytree(originals / 'one', tmp_path / 'run' / 'hf_model')
    write_manifest(tmp_path / 'run' / 'hf_model')
    with pytest.raises(CheckpointError, match='hf_model'):
        verify_folder(tmp_path)


@pytest.mark.parametrize('level', ['sizes', 'full'])
def test_the_hooks_check_passes_what_is_whole(folder, level):
    """Before the manifest is written, and the files shared out among ranks."""
    manifest = manifest_of(folder)
    (folder / MANIFEST).unlink()
    check_folder(folder, manifest, level)
    for name in manifest['files']:
        check_folder(folder, manifest, level, only=[name])


def test_the_hooks_check_finds_what_its_level_promises(folder):
    manifest = manifest_of(folder)
    flip(folder / FIRST_SHARD, -1)
    check_folder(folder, manifest, 'sizes')
    with pytest.raises(IncompleteError, match=r'tensors? changed: '):
        check_folder(folder, manifest, 'full')
    check_folder(folder, manifest, 'full', only=['model-00002-of-00002.safetensors'])
    with pytest.raises(IncompleteError, match=r'tensors? changed: '):
        check_folder(folder, manifest, 'full', only=[FIRST_SHARD])
    flip(folder / FIRST_SHARD, -1)
    flip(folder / FIRST_SHARD, 20)
    with pytest.raises(IncompleteError):
        check_folder(folder, manifest, 'sizes')
    with pytest.raises(ValueError, match='level'):
        check_folder(folder, manifest, 'off')
    with pytest.raises(DamagedError, match='format_version'):
        check_folder(folder, {}, 'sizes')


@pytest.mark.parametrize('family', [family for family in FAMILIES if available(family)])
def test_every_family_as_save_pretrained_leaves_it(family, tmp_path):
    build(family).save_pretrained(tmp_path, max_shard_size='100KB')
    report = verify_folder(tmp_path)
    assert problems(report) == [] and 'config' not in unchecked(report), report.lines()
