"""DeepSpeed ZeRO-3 with parameters and optimizer on NVMe: what is saved has really been read from there.

DeepSpeed swaps partitions of at least 1 MiB, and parameters only beyond ``max_in_cpu`` of them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.models.zoo.llamas import llama
from tests.helpers.ranks.async_io import load_async_io
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs import engines
from tests.helpers.runs.engines import train_one_step, zero_engine

pytestmark = pytest.mark.needs('compiler', 'libaio-dev')

N_BUFFERS = 5  # DeepSpeed's default; fewer than there are parameters on NVMe
BUCKET_SIZE = 250_000  # an eighth of a parameter
PARAMETERS = dict(device='nvme', buffer_count=N_BUFFERS, buffer_size=3_600_000, max_in_cpu=0)
#: Section zero_optimization, with nvme_path still to be set.
ENGINES: dict[str, dict[str, Any]] = {
    'in memory': {},
    'on NVMe': dict(offload_param=PARAMETERS, offload_optimizer=dict(device='nvme', buffer_count=N_BUFFERS)),
}
WAYS: dict[str, dict[str, Any]] = {
    'stream, one bucket': dict(bucket_size=10**9),
    'gather, small buckets': dict(writer='gather'),
    'positional, in the background': dict(writer='positional', in_background=True),
    'masters, stream': dict(dtype='float32', bucket_size=10**9),
    'masters, gather': dict(writer='gather', dtype='float32'),
}


def build_engine(name: str, root: Path) -> Any:
    """Around a bf16 Llama with 11 parameters of a million elements, 4 of them frozen."""
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=4)
    model = llama(vocab_size=2048, **sizes).to(torch.bfloat16)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_('embed' not in parameter_name and 'layers.0' not in parameter_name)
    zero = {section: {**options, 'nvme_path': str(root / 'nvme' / name)} for section, options in ENGINES[name].items()}
    # Nothing may be kept in a buffer for its next use, or training itself runs out of them
    lean = dict(stage3_max_live_parameters=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    return zero_engine(model, 3, sub_group_size=3_000_000, **lean, **zero)


def save_folder(model: Any, folder: Path, **how: Any) -> int:
    """With buckets that are small for this model; the default is for models that are a thousandth of it.

    Returns the number of tensors that were gathered, not saved in slices.
    """
    plan, _ = engines.save_folder(model, folder, **{'bucket_size': BUCKET_SIZE, **how})
    return len(plan.gathered)


def count_on_nvme(engine: Any) -> dict[str, int]:
    """Parameters, and sub groups of masters, that are on NVMe."""
    swapped = [p for p in engine.module.parameters() if p.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE]
    assert all(p.ds_tensor.numel() == 1 for p in swapped)
    swapper = engine.optimizer.optimizer_swapper
    masters = [] if swapper is None else [info.get_swap_paths()[0] for info in swapper.swap_params_info.values()]
    return {'parameters': len(swapped), 'masters': sum(Path(path).exists() for path in masters)}


def train_and_save(name: str, root: Path) -> tuple[dict[str, int], list[str]]:
    """What is on NVMe, and errors of saves while a parameter's swap file is gone. Runs on: all ranks."""
    load_async_io()
    engine = build_engine(name, root)
    save_folder(engine.module, root / name / 'before training')
    save_folder(engine.module, root / name / 'masters before training', dtype='float32')
    train_one_step(engine)
    found = count_on_nvme(engine)
    gathered = {way: save_folder(engine.module, root / name / way, **how) for way, how in WAYS.items()}
    assert {way for way, number in gathered.items() if number} == {way for way in WAYS if 'gather' in way}
    assert count_on_nvme(engine) == found
    errors = lose_a_swap_file(engine, root / 'lost') if found['parameters'] else []
    train_one_step(engine)
    save_folder(engine.module, root / name / 'after the next step', dtype='float32')
    engine.destroy()
    return found, errors


def lose_a_swap_file(engine: Any, root: Path) -> list[str]:
    """Of rank 1; training and saving go on when it is back."""
    lost = engine.module.model.layers[1].mlp.up_proj.weight
    path = Path(lost.nvme_swapper.get_path(lost, must_exist=True))
    errors = []
    for writer in ('positional', 'gather'):
        if dist.get_rank() == 1:
            path.rename(path.with_suffix('.away'))
        errors.append(error_of(save_folder, engine.module, root / writer, writer=writer))
        if dist.get_rank() == 1:
            path.with_suffix('.away').rename(path)
        save_folder(engine.module, root / writer, writer=writer)
    return errors


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('nvme')
    return run_scenarios({name: partial(train_and_save, name, root) for name in ENGINES}, 2, root=root)


def test_same_files_as_from_memory(saved):
    """Byte for byte until DeepSpeed's optimizer has rounded otherwise: its swap buffers have another alignment."""
    check(saved, 'in memory')
    for found, _ in check(saved, 'on NVMe'):
        assert found['parameters'] == 11 and found['masters'] > 1

    def file(engine: str, way: str) -> Path:
        return saved.root / engine / way / 'model.safetensors'

    for way in ('before training', 'masters before training'):
        assert file('on NVMe', way).read_bytes() == file('in memory', way).read_bytes(), way
    for way, how in WAYS.items():
        first = 'masters, stream' if 'dtype' in how else 'stream, one bucket'
        assert file('on NVMe', way).read_bytes() == file('on NVMe', first).read_bytes(), way
    for way in (*WAYS, 'after the next step'):
        mine, expected = (folder_tensors(file(engine, way).parent) for engine in ('on NVMe', 'in memory'))
        for tensor_name, tensor in expected.items():
            same = mine[tensor_name].isclose(tensor, rtol=0.01, atol=1e-6)
            assert same.float().mean() > 0.98 if way == 'after the next step' else same.all(), f'{way}: {tensor_name}'
    nbytes = [file('on NVMe', way).stat().st_size for way in ('masters, stream', 'stream, one bucket')]
    assert nbytes[0] > 1.9 * nbytes[1]


def test_a_lost_swap_file_is_an_error_on_every_rank(saved):
    for _, errors in check(saved, 'on NVMe'):
        assert len(errors) == 2
        for error in errors:
            assert (
                error.startswith('AgreedError')
                and 'failed on rank 1: FileNotFoundError' in error
                and '_param.tensor.swp' in error
            )
