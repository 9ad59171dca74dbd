"""Whether a save can take the name of the newest one: asked before training, of real mounts."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.runs.small_saves import LOCK, commit_with, failing, hidden
from tests.helpers.runs.tiny_checkpoint import commit_one, content, stage, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mounts something until the test ends."""
    mounted: list[Path] = []

    def mount_at(path: Path, *options: str) -> None:
        subprocess.run(['mount', *options, str(path)], check=True)
        mounted.append(path)

    yield mount_at
    for path in reversed(mounted):
        subprocess.run(['umount', str(path)], check=True)


@pytest.mark.needs('root')
@pytest.mark.parametrize('has_save', [False, True])
@pytest.mark.parametrize('kind', ['tmpfs', 'bind'])
def test_a_mount_point_is_refused_with_the_folder_to_choose(tmp_path, mount, kind, has_save):
    """A volume of a container. Data would go to the disk beside it, and each commit would fail."""
    parent, other = tmp_path / 'out here', tmp_path / 'other'
    path = parent / 'hf_model'
    path.mkdir(parents=True)
    other.mkdir()
    mount(path, *(['-t', 'tmpfs', 'tmpfs'] if kind == 'tmpfs' else ['--bind', str(other)]))
    if has_save:
        made = CheckpointFolder(tmp_path / 'made' / 'hf_model', 1)
        commit_one(made, 1)
        shutil.copytree(made.path, path, dirs_exist_ok=True)
    with pytest.raises(TargetError, match=rf'is a mount point.*set out_dir to a folder in it, such as {path}/hf_model'):
        CheckpointFolder(path, 1).lock_and_recover()
    assert [*parent.iterdir()] == [path]
    inside = CheckpointFolder(path / 'hf_model', 1)
    inside.lock_and_recover()
    commit_one(inside, 2)
    inside.unlock()
    assert content(path / 'hf_model') == 2


@pytest.mark.parametrize('call', ['rename', 'mkdir'])
def test_a_folder_where_nothing_can_be_renamed_is_refused_before_training(tmp_path, monkeypatch, both_ways, call):
    """As in buckets that are mounted without renames."""
    monkeypatch.setattr(
        os, call, failing(95, when=lambda path, *more: '.hf_model.staging' in str(path), instead_of=getattr(os, call))
    )
    if call == 'rename':
        monkeypatch.setattr('xhf_hooks.places.replacement.exchange', lambda one, other: False)
    with pytest.raises(
        TargetError, match=rf'{tmp_path}: no folder can take the name of another one there.*set out_dir'
    ):
        CheckpointFolder(tmp_path / 'hf_model', 1).lock_and_recover()
    monkeypatch.undo()
    assert hidden(tmp_path) == set()


@pytest.fixture
def image(tmp_path, mount) -> Callable[[str], Path]:
    """Gives the folder of a container whose image holds saves of iterations 1 and 2, and what a user added."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    mount(disk, '-t', 'tmpfs', 'tmpfs')  # an overlay may not lie on another one
    saved = CheckpointFolder(disk / 'image' / 'hf_model', 2)
    saved.lock_and_recover()
    for number in (1, 2):
        commit_with(saved, number, 'adapter/config.json', '{}')
    saved.unlock()

    def start(name: str) -> Path:
        upper, work, path = (disk / name / each for each in ('upper', 'work', 'container'))
        for each in (upper, work, path):
            each.mkdir(parents=True)
        layers = f'lowerdir={disk / "image"},upperdir={upper},workdir={work},redirect_dir=off'
        mount(path, '-t', 'overlay', 'overlay', '-o', layers)
        return path

    return start


@pytest.mark.needs('root')
@pytest.mark.parametrize('max_keep', [1, 2])
def test_a_save_of_an_image_is_replaced(image, said, max_keep):
    """Nothing in it can be renamed (EXDEV). What others put into it stays."""
    parent = image('container')
    (parent / 'hf_model' / 'adapter' / 'eval.json').write_text('mine')
    folder = CheckpointFolder(parent / 'hf_model', max_keep, warn=said.append)
    folder.lock_and_recover()
    assert said == [
        f'{folder.path} cannot be renamed: it is in a lower layer of an overlay file system (of the image of a '
        f'container). The first save will delete it, and get its name after that'
    ]
    assert hidden(parent) == {'.hf_model.lock'}, 'the question leaves nothing'
    said.clear()
    for number in (3, 4):
        commit_one(folder, number)
    folder.unlock()
    again = CheckpointFolder(folder.path, max_keep, warn=said.append)
    again.lock_and_recover()
    again.unlock()
    assert 'cannot be renamed' not in str(said[2:]), 'that save is of the upper layer'
    assert (parent / 'hf_model_others_iter_2' / 'adapter' / 'eval.json').read_text() == 'mine'
    shutil.rmtree(parent / 'hf_model_others_iter_2')
    older = {'hf_model_iter_3': 3} if max_keep == 2 else {}
    assert visible(parent) == {'hf_model': 4, 'hf_model_iter_1': 1, **older} and hidden(parent) == set()
    assert 'adapter/eval.json in the save of iter_2' in said[0]
    assert said[1].startswith(f'{folder.path} could not be renamed, as in a lower layer of an overlay')
    assert [text for text in said[2:] if 'hf_model_iter_1, which is no longer needed' not in text] == []


@pytest.mark.needs('root')
def test_a_kill_at_any_call_of_the_replacement_loses_no_save(image):
    """The next start finds the old save or the new one, whole."""
    found = []
    for number in range(100):
        parent = image(f'container_{number}')
        if not _commit_and_die(parent, number):
            break
        folder = CheckpointFolder(parent / 'hf_model', 1)
        folder.lock_and_recover()
        assert hidden(parent) == LOCK
        found.append(content(parent / 'hf_model'))
        commit_one(folder, 4)
        folder.unlock()
        assert visible(parent) == {'hf_model': 4, 'hf_model_iter_1': 1}
    assert {*found} == {2, 3} and sorted(found) == found and len(found) > 10


def _commit_and_die(parent: Path, number: int) -> bool:
    """Commit iteration 3 in another process, which dies before its n-th deletion or rename; whether it died."""
    process = os.fork()
    if process == 0:
        folder = CheckpointFolder(parent / 'hf_model', 1)
        folder.lock_and_recover()
        save, left = stage(folder, 3), iter(range(number))

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def call_or_die(*args: object, **options: object) -> None:
                if next(left, None) is None:
                    os._exit(9)
                call(*args, **options)

            return call_or_die

        for name in ('rename', 'replace', 'unlink', 'rmdir'):
            setattr(os, name, counted(getattr(os, name)))
        folder.commit(save)
        folder.siblings.deletion.wait()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
