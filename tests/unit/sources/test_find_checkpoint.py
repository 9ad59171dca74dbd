"""Which checkpoint a path means: every layout is recognised by looking."""

import re
from pathlib import Path

import pytest

from xhf_hooks.errors import CheckpointError
from xhf_hooks.offline.checkpoint.find import find_checkpoint


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b'x')
    return folder


def zero2(folder: Path) -> Path:
    return put(folder, 'mp_rank_00_model_states.pt', 'zero_pp_rank_0_mp_rank_00_optim_states.pt', 'zero_to_fp32.py')


def found(path: Path) -> tuple[str, str]:
    checkpoint = find_checkpoint(path)
    return checkpoint.layout, checkpoint.path.name


def test_work_dir_of_mmengine(tmp_path):
    zero2(tmp_path / 'iter_4.pth')
    put(tmp_path, 'iter_2.pth', '20240101_000000/log.txt')
    for text in (str(tmp_path / 'iter_4.pth'), '/elsewhere/then/iter_4.pth\n'):
        (tmp_path / 'last_checkpoint').write_text(text)
        assert found(tmp_path) == ('mmengine', 'iter_4.pth')
    (tmp_path / 'last_checkpoint').write_text('/elsewhere/iter_2.pth')
    assert found(tmp_path) == ('file', 'iter_2.pth')


def test_deepspeed_names_the_latest(tmp_path):
    zero2(tmp_path / 'global_step100')
    zero2(tmp_path / 'global_step200')
    (tmp_path / 'latest').write_text('global_step100')
    assert found(tmp_path) == ('deepspeed', 'global_step100')
    assert found(tmp_path / 'global_step200') == ('deepspeed', 'global_step200')


def test_several_models_of_accelerate(tmp_path):
    """The last one is not the model."""
    put(tmp_path, 'random_states_0.pkl')
    zero2(tmp_path / 'pytorch_model')
    zero2(tmp_path / 'pytorch_model_1')
    (tmp_path / 'latest').write_text('pytorch_model_1')
    with pytest.raises(CheckpointError, match=r'several checkpoints \(pytorch_model_1, pytorch_model\); give one'):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize('beside', [(), ('optimizer.bin', 'scheduler.bin', 'random_states_0.pkl', 'rng_state_0.pth')])
@pytest.mark.parametrize(
    'name', ['iter_5.pth', 'best_loss_iter_5.pth', 'mine.ckpt', 'x.pt', 'pytorch_model.bin', 'model.safetensors']
)
def test_the_only_file_of_weights_in_a_folder(tmp_path, name, beside):
    put(tmp_path, name, *beside, 'log.txt', '20240101_000000/log.txt')
    assert found(tmp_path) == ('file', name)


@pytest.mark.parametrize('beside', [(), ('config.json', 'model.safetensors', 'rng_state.pth', 'optimizer.pt')])
def test_the_only_tag_folder_where_latest_was_not_copied(tmp_path, beside):
    zero2(put(tmp_path / 'checkpoint-5', *beside) / 'global_step5')
    for given in (tmp_path, tmp_path / 'checkpoint-5'):
        assert found(given) == ('trainer', 'global_step5')


@pytest.mark.parametrize('suffix', ['.bin', '.safetensors'])
def test_a_model_in_several_files(tmp_path, suffix):
    """As zero_to_fp32 writes it. Each of them, and the folder, is the whole."""
    names = [f'pytorch_model-0000{number}-of-00002{suffix}' for number in (1, 2)]
    put(tmp_path, *names, 'pytorch_model.bin.index.json')
    for given in (tmp_path, *(tmp_path / name for name in names)):
        assert [file.name for file in find_checkpoint(given).model_files] == names


@pytest.mark.parametrize('more', [(), ('config.json',), ('model.safetensors.index.json', 'config.json')])
def test_files_of_a_model_that_nobody_can_load(tmp_path, more):
    """Without an index, or with one that is damaged: it is no Hugging Face folder, and all weights are there."""
    names = [f'{stem}-0000{number}-of-00002.safetensors' for stem in ('model', 'ft-model') for number in (1, 2)]
    for shards in (names[:2], names[2:]):
        folder = put(tmp_path / shards[0], *shards, *more, 'recipe_state.pt')
        assert [file.name for file in find_checkpoint(folder).model_files] == shards


def test_files_that_macos_puts_beside_others(tmp_path):
    put(tmp_path / 'work', 'iter_5.pth', '._iter_5.pth', '.DS_Store')
    assert found(tmp_path / 'work') == ('file', 'iter_5.pth')
    put(zero2(tmp_path / 'tag'), '._mp_rank_00_model_states.pt')
    assert found(tmp_path / 'tag') == ('deepspeed', 'tag')


def test_a_link_to_a_checkpoint_is_no_other_one(tmp_path):
    put(tmp_path, 'iter_5.pth')
    (tmp_path / 'latest.pth').symlink_to('iter_5.pth')
    assert found(tmp_path) == ('file', 'iter_5.pth')
    (tmp_path / 'iter_5.pth').unlink()
    with pytest.raises(CheckpointError, match=r'a link to iter_5\.pth, which does not exist'):
        find_checkpoint(tmp_path / 'latest.pth')


RUN_FOLDERS = {
    'mmengine': ('work/iter_4.pth/mp_rank_00_model_states.pt', ['work/iter_4.pth', 'work']),
    'mmengine, a file': ('work/iter_4.pth', ['work']),
    'deepspeed': ('run/global_step4/mp_rank_00_model_states.pt', ['run/global_step4', 'run']),
    'trainer': (
        'run/checkpoint-4/global_step4/mp_rank_00_model_states.pt',
        ['run/checkpoint-4/global_step4', 'run/checkpoint-4', 'run']),
    'accelerate': (
        'run/step_4/pytorch_model/mp_rank_00_model_states.pt', ['run/step_4/pytorch_model', 'run/step_4', 'run']),
    'FSDP, whole': ('run/step_4/pytorch_model_fsdp.bin', ['run/step_4', 'run']),
    'FSDP': ('run/step_4/pytorch_model_fsdp_0/.metadata', ['run/step_4/pytorch_model_fsdp_0', 'run/step_4', 'run']),
    'DCP': ('run/step_4/.metadata', ['run/step_4', 'run']),
    'a file': ('run/mine.ckpt', ['run']),
}  # fmt: skip


@pytest.mark.parametrize('case', RUN_FOLDERS)
def test_which_folders_are_the_runs_from_wherever_it_is_named(tmp_path, case, monkeypatch):
    file, expected = RUN_FOLDERS[case]
    put(tmp_path, file, 'elsewhere/x')
    checkpoint = tmp_path / expected[0] if len(expected) > 1 and not file.endswith('.bin') else tmp_path / file
    beside = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for cwd, given in {
        tmp_path: checkpoint.relative_to(tmp_path),
        beside: '.' if checkpoint.is_dir() else checkpoint.name,
        tmp_path / 'elsewhere': Path('..') / checkpoint.relative_to(tmp_path),
        beside.parent: Path(beside.name, '..', beside.name, checkpoint.name if checkpoint.is_file() else ''),
    }.items():
        monkeypatch.chdir(cwd)
        assert find_checkpoint(given).run_folders == tuple(tmp_path / folder for folder in expected)


REFUSED = {
    'nothing there': ('nowhere', [], 'no such file or folder'),
    'an empty folder': ('', [], 'not a checkpoint'),
    'a folder of something else': ('', ['a.txt', 'config.json'], 'not a checkpoint'),
    'several of mmengine': ('', ['iter_9.pth', 'iter_10.pth', 'iter_8.pth'], r'several checkpoints \(iter_10\.pth,'),
    'a part': ('mp_rank_00_model_states.pt', ['mp_rank_00_model_states.pt'], 'one part of a checkpoint'),
    'safetensors of a model': ('model.safetensors', ['model.safetensors', 'config.json'], 'a Hugging Face folder'),
    'a part of several files': (
        'x-00001-of-00003.bin', ['x-00001-of-00003.bin', 'x-00002-of-00003.bin'],
        'one of 3 files .*x-00003-of-00003.bin missing; copy'),
    'one of several and another': ('', ['iter_9.pth', 'best_1.pth'], r'several checkpoints \(iter_9.pth, best_'),
    'the last model of Trainer and an earlier one': (
        '', ['model.safetensors', 'config.json', 'checkpoint-5/latest'], r'\(checkpoint-5, model.safetensors\)'),
    'two formats': ('', ['pytorch_model.bin', 'model.safetensors'], 'several checkpoints'),
    'two models in several files': ('', ['a-00001-of-00001.bin', 'b-00001-of-00001.bin'], 'several checkpoints'),
    'what has no weights': ('', ['optimizer.bin', 'random_states_0.pkl'], 'it holds optimizer.bin, random_st'),
    'parts of FSDPStrategy': ('iter_2.pth', ['iter_2.pth/rank0.pth'], "state_dict_cfg='full'"),
    'a part of DCP': ('a/__0_0.distcp', ['a/__0_0.distcp', 'a/.metadata'], 'one part of a checkpoint; give its folder'),
    'DCP without its index': ('', ['__0_0.distcp'], r'/\.metadata: missing.*torch\.distributed\.checkpoint'),
    'DCP by rank': ('', ['__0_0.distcp', '__0.metadata'], 'one part of an FSDP model'),
    'parts of Accelerate': ('', ['pytorch_model_fsdp_rank0.bin'], 'Accelerate: load_state'),
    'universal': ('', ['zero/a.weight/fp32.pt', 'mp_rank_00_model_states.pt'], 'give the checkpoint that it was made'),
    'universal, not finished': ('', ['zero/a.weight/fp32.pt'], 'a universal checkpoint'),
    'stages of a pipeline': ('', ['layer_00-model_states.pt', 'mp_rank_00_model_states.pt'], 'tensor, pipeline'),
    'tensor parallelism': ('', ['mp_rank_00_model_states.pt', 'mp_rank_01_model_states.pt'], 'tensor, pipeline'),
    'a name of nobody': (
        '', ['zero_pp_rank_01_mp_rank_00_optim_states.pt'], 'not a file name of DeepSpeed'),
    'parts of verl': ('actor', ['actor/model_world_size_2_rank_0.pt', 'actor/huggingface/config.json'], 'verl'),
    'Megatron': ('', ['iter_0000500/mp_rank_00/model_optim_rng.pt'], 'Megatron'),
    'parts of HuggingFaceStorageWriter': (
        '', [f'shard-0000{n}-model-00001-of-00001.safetensors' for n in (1, 2)], 'consolidate_safetensors_files'),
    'nanotron': ('10', ['10/model/model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors'], 'nanotron'),
    'below it, models': (
        '', ['actor/pytorch_model.bin', 'critic/latest', 'log/x.txt'], 'give a folder below it: actor, critic$'),
    'below it, of verl': ('', ['data.pt', 'actor/model_world_size_2_rank_0.pt'], 'verl'),
    'below it, deep': (
        '', ['version_0/checkpoints/last.ckpt', 'x/optimizer.pt'], 'give a folder below it: version_0/checkpoints$'),
    'two models of Accelerate': (
        '', ['model.safetensors', 'model_1.safetensors'], r'\(model_1.safetensors, model.safetensors\)'),
    'a final adapter and an earlier one': (
        '', ['adapter_model.safetensors', 'adapter_config.json', 'checkpoint-5/latest'], r'\(checkpoint-5, adapter_m'),
    'an adapter with other tensors': (
        '', ['adapter_model.safetensors', 'adapter_config.json', 'non_lora_trainables.bin'], 'a Hugging Face folder'),
    'an adapter of an older peft': ('', ['adapter_model.bin', 'adapter_config.json'], 'an adapter already'),
    'its file': ('adapter_model.bin', ['adapter_model.bin', 'adapter_config.json'], 'an adapter already'),
    'a part of a model': (
        '', ['config.json', 'model-00001-of-00002.safetensors'], 'model-00002-of-00002.safetensors missing; copy'),
    'experts': ('', ['mp_rank_00_model_states.pt', 'expp_rank_0_mp_rank_00_optim_states.pt'], 'expert parallelism'),
}  # fmt: skip


@pytest.mark.parametrize('case', REFUSED)
def test_is_refused(tmp_path, case):
    given, names, words = REFUSED[case]
    put(tmp_path, *names)
    with pytest.raises(CheckpointError, match=words) as caught:
        find_checkpoint(tmp_path / given)
    assert str(tmp_path) in str(caught.value) and '\n' not in str(caught.value)
    assert 'save without it' not in str(caught.value), 'the run is over'


@pytest.mark.parametrize('text', ['gone', '../elsewhere', '/no/such', '', 'x' * 9999])
@pytest.mark.parametrize('pointer', ['latest', 'last_checkpoint'])
def test_a_pointer_that_points_nowhere(tmp_path, pointer, text):
    folder = put(tmp_path / 'run', pointer)
    (tmp_path / 'elsewhere').mkdir()
    (folder / pointer).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        find_checkpoint(folder)
