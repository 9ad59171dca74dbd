"""The same weights give the same files, however the model is spread over ranks and memory; NVMe: test_nvme."""

from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.models.zoo.llamas import build_model
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import save_folder, train_one_step, zero_engine

ENGINES: dict[str, dict[str, Any]] = {
    'zero0': dict(stage=0),
    'zero1': dict(stage=1),
    'zero2': dict(stage=2),
    'zero3': dict(stage=3),
    'zero3_default_persistence': dict(stage=3, stage3_param_persistence_threshold=100_000),
    'zero3_small_sub_groups': dict(stage=3, sub_group_size=1000),
    'zero3_part_in_optimizer': dict(stage=3, without='layers.1.mlp'),
    'zero3_cpu': dict(stage=3, offload_param=dict(device='cpu'), offload_optimizer=dict(device='cpu')),
}
#: Ways to save that must give one answer: for every other engine the first ones, for those between the second ones, so
#: that of each engine slices are sent, slices are written, and whole tensors are gathered. Unit tests with random plans
#: (tests/unit/planning) prove the rest.
WAYS: tuple[dict[str, dict[str, Any]], ...] = (
    {
        'parallel': dict(writer='parallel', in_background=True),
        'gather': dict(writer='gather', bucket_size=5000),
        'positional': dict(writer='positional'),
    },
    {
        'stream': dict(bucket_size=5000),
        'gather': dict(writer='gather'),
        'positional': dict(writer='positional', in_background=True),
    },
)
WRITERS = ('stream', 'parallel', 'positional', 'gather')
#: Ways that must give another answer, the same each.
IN_SHARDS = {writer: dict(writer=writer, max_shard_size=20_000) for writer in WRITERS}
MASTERS = (
    {writer: dict(writer=writer, dtype='float32') for writer in ('stream', 'gather')},
    {writer: dict(writer=writer, dtype='float32') for writer in ('parallel', 'positional')},
)
#: Number of ranks to model and engine. A frozen model has all that a way to save could treat in another way, but a tie.
NAMES_OF = {
    2: [*(f'frozen-{engine}' for engine in ENGINES if 'sub_groups' not in engine), 'tied-zero2', 'tied-zero3'],
    3: ['frozen-zero2', 'frozen-zero3_small_sub_groups'],  # to three, nothing is shared out evenly
}
CASES = [pytest.param(n, name, id=f'{n}ranks-{name}') for n, names in NAMES_OF.items() for name in names]
SHARDED = [param for param in CASES if '3ranks' in param.id or 'tied' in param.id]
FROZEN = [param for param in CASES if 'frozen' in param.id]


def save_case(kind: str, engine_name: str, root: Path) -> None:
    model = build_model(kind)
    if dist.get_rank() == 0:
        model.save_pretrained(root / kind / 'expected')
    engine = zero_engine(model, **ENGINES[engine_name])
    folder = root / f'{kind}-{engine_name}'
    # Of a script that sets the default device, as to 'cuda': host memory must stay host memory
    with torch.device('meta') if kind == 'tied' else nullcontext():
        for way, how in of_engine(WAYS, engine_name).items():
            save_folder(engine.module, folder / way, **how)
    for way, how in IN_SHARDS.items() if kind == 'tied' or dist.get_world_size() == 3 else ():
        save_folder(engine.module, folder / 'in shards' / way, **how)
    if kind == 'frozen':  # it has tensors with a master and without
        train_one_step(engine)  # now the masters are not what was read
        for way, how in of_engine(MASTERS, engine_name).items():
            save_folder(engine.module, folder / 'masters' / way, **how)
    engine.destroy()


def of_engine(ways: tuple[dict[str, dict[str, Any]], ...], name: str) -> dict[str, dict[str, Any]]:
    """Those of the ways in which models of an engine are saved."""
    return ways[[*ENGINES].index(name) % len(ways)]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """One launch for each number of ranks, when it is first asked for."""

    @cache
    def launch(world_size: int) -> tuple[Path, dict[str, Any]]:
        root = tmp_path_factory.mktemp(f'one_answer{world_size}')
        scenarios = {name: partial(save_case, *name.split('-'), root) for name in NAMES_OF[world_size]}
        return root, run_scenarios(scenarios, world_size)

    return launch


@pytest.mark.parametrize(('world_size', 'case'), CASES)
def test_same_file_as_save_pretrained(saved, world_size, case):
    root, results = saved(world_size)
    check(results, case)
    kind, engine_name = case.split('-')
    expected = root / kind / 'expected'
    for way in of_engine(WAYS, engine_name):
        assert_same_config(root / case / way, expected)
        for name in ('model.safetensors', 'generation_config.json'):
            assert (root / case / way / name).read_bytes() == (expected / name).read_bytes(), (way, name)


@pytest.mark.parametrize(('world_size', 'case'), SHARDED)
def test_every_writer_writes_the_same_shards(saved, world_size, case):
    root, results = saved(world_size)
    check(results, case)
    stream, *others = (files_below(root / case / 'in shards' / way) for way in IN_SHARDS)
    assert len(stream) > 4  # more files than ranks: then each has its own in parallel
    assert all(other == stream for other in others)
    whole = folder_tensors(root / case.split('-')[0] / 'expected')
    assert folder_tensors(root / case / 'in shards' / 'stream').keys() == whole.keys()


@pytest.mark.parametrize(('world_size', 'case'), FROZEN)
def test_every_writer_writes_the_same_masters(saved, world_size, case):
    root, results = saved(world_size)
    check(results, case)
    one, other = of_engine(MASTERS, case.split('-')[1])
    assert files_below(root / case / 'masters' / one) == files_below(root / case / 'masters' / other)
    masters = folder_tensors(root / case / 'masters' / one)
    trained = {name: tensor for name, tensor in masters.items() if 'embed' not in name and 'layers.0' not in name}
    if not case.endswith('zero0'):  # where DeepSpeed 0.19 keeps them in an optimizer that gives them to nobody
        assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in trained.values()), 'nothing was trained'
    if case.endswith('part_in_optimizer'):  # the others have no master: what there is of them are the 16-bit weights
        as_read = folder_tensors(root / 'frozen' / 'expected')
        others = {name: tensor for name, tensor in masters.items() if 'layers.1.mlp' in name}
        assert others and all(tensor.equal(as_read[name].float()) for name, tensor in others.items())


def files_below(folder: Path) -> dict[str, bytes]:
    """Content of the weights and their index."""
    return {path.name: path.read_bytes() for path in folder.glob('model*')}
