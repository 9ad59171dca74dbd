"""Folders of torch.distributed.checkpoint: what they may hold, and what is made of those that nobody can have saved."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import assert_same_tensors
from tests.helpers.checks.read_checkpoint import open_checkpoint, read_all
from tests.helpers.runs.made_checkpoint import save_dcp
from tests.helpers.runs.torch_zip import Call
from xhf_hooks.errors import CheckpointError

WEIGHTS = {
    'embed.weight': torch.randn(13, 7, generator=torch.Generator().manual_seed(0)),
    'half': torch.randn(5, 3).bfloat16(),
    'scalar': torch.tensor(3.0),
    'ids': torch.arange(9),
    'flag': torch.tensor([True, False]),
    'none': torch.empty(0, 4),
}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return save_dcp({'model': WEIGHTS}, tmp_path_factory.mktemp('dcp') / 'state')


@pytest.mark.parametrize('options', [{}, {'single_file_per_rank': False}, {'thread_count': 2}], ids=str)
@pytest.mark.parametrize('around', [(), ('model',), ('app', 'model'), ('state_dict',)], ids=str)
def test_gives_back_what_went_in(tmp_path, options, around):
    state: dict[str, Any] = dict(WEIGHTS)
    for name in reversed(around):
        state = {
            name: {**state, 'note': 'text'},
            'optimizer': {'state': {'w': {'exp_avg': torch.ones(2)}}},
            'step': torch.tensor(5),
        }
    source = open_checkpoint(save_dcp(state, tmp_path / 'state', **options))
    assert_same_tensors(read_all(source), WEIGHTS)
    assert not any(spec.has_master for spec in source.specs())


@pytest.mark.modern_only
def test_the_parts_of_torchs_safetensors_writer_are_put_together_as_the_refusal_says(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    state = {name: WEIGHTS[name] for name in ('embed.weight', 'half')}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / 'parts'), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match='consolidate_safetensors_files of torch'):
        open_checkpoint(tmp_path / 'parts')
    (tmp_path / 'whole').mkdir()
    consolidate_safetensors_files(str(tmp_path / 'parts'), str(tmp_path / 'whole'), dict.fromkeys(state, 1))
    assert_same_tensors(read_all(open_checkpoint(tmp_path / 'whole')), state)


@pytest.mark.parametrize(('state', 'words'), {
    'optimizer': ({'optimizer': {'state': {'a': torch.ones(1)}}}, "one model's state dict, found optimizer/state"),
    'two models': ({'model': WEIGHTS, 'state_dict': WEIGHTS}, 'found model, state_dict'),
    'an odd type': ({'w': torch.ones(2, dtype=torch.complex128)}, 'safetensors cannot store'),
    'nothing': ({'epoch': 3}, 'found nothing'),
}.values())  # fmt: skip
def test_is_refused(tmp_path, state, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(save_dcp(state, tmp_path / 'state'))
    assert str(tmp_path) in str(caught.value) and '\n' not in str(caught.value)


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the index, which this test may trust."""
    index = folder / '.metadata'
    metadata = pickle.loads(index.read_bytes())
    changed = change(metadata)
    index.write_bytes(pickle.dumps(metadata if changed is None else changed))


def tensor_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata['model.embed.weight']


def info_of(metadata: Any) -> Any:
    return next(info for key, info in metadata.storage_data.items() if key.fqn == 'model.embed.weight')


def edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, change)


def cut(name: str, nbytes: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, nbytes)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    'a file elsewhere': (edited(lambda m: setattr(info_of(m), 'relative_path', '../x')), r"stored in '\.\./x'"),
    'behind the end': (edited(lambda m: setattr(info_of(m), 'offset', 10**15)), 'truncated: expected'),
    'rows are missing': (edited(lambda m: setattr(tensor_of(m), 'size', torch.Size((14, 7)))), 'not those of its'),
    'no index': (edited(lambda m: {'a': 1}), 'not an index of torch.distributed.checkpoint'),
    'the index is gone': (lambda folder: (folder / '.metadata').unlink(), r'/\.metadata: missing'),
    'half an index': (cut('.metadata', 700), 'damaged or unsafe'),
    'half a file': (cut('__0_0.distcp', 2000), 'truncated: expected'),
}  # fmt: skip


@pytest.mark.parametrize('damage', DAMAGES)
def test_what_nobody_can_have_saved(whole, tmp_path, damage):
    folder = Path(shutil.copytree(whole, tmp_path / 'state'))
    spoil, words = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)


def test_nothing_is_executed(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / 'state'))
    mark = tmp_path / 'mark'
    edit(folder, lambda m: m.planner_data.update(x=Call(os.mkdir, str(mark))))
    assert_same_tensors(read_all(open_checkpoint(folder)), WEIGHTS)  # it is data, and of no use
    (folder / '.metadata').write_bytes(pickle.dumps(Call(os.mkdir, str(mark))))
    with pytest.raises(CheckpointError, match='not an index'):
        open_checkpoint(folder)
    assert not mark.exists()
