"""Which checkpoint a path means: every layout is recognised by looking."""

import re
from pathlib import Path

import pytest

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.find import find_checkpoint


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


REFUSED = {
    'nothing there': ('nowhere', [], 'no such file or folder'),
    'an empty folder': ('', [], 'not a checkpoint'),
    'a folder of something else': ('', ['a.txt', 'config.json'], 'not a checkpoint'),
    'several of mmengine': ('', ['iter_9.pth', 'iter_10.pth', 'iter_8.pth'], r'several checkpoints \(iter_10\.pth,'),
    'a part': ('mp_rank_00_model_states.pt', ['mp_rank_00_model_states.pt'], 'one part of a checkpoint'),
    'safetensors': ('m.safetensors', ['m.safetensors'], 'already a safetensors file'),
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
