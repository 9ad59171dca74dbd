"""Weights on a device: the bytes of save_pretrained, one bucket of device memory, and no device but the rank's own.

The device is simulated (:mod:`tests.helpers.ranks.simulated_device`): what is wrong on a GPU now and then
is so every time. Nothing is trained before a save's outcome, since that would synchronise the device in its place.
"""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.models.adapted import adapt
from tests.helpers.models.zoo.llamas import llama, odd_llama
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.ranks.simulated_device import extension
from tests.helpers.runs.engine_of_rows import partition, source_of_the_page
from tests.helpers.runs.engines import save_folder, zero_engine
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks.extending import SOURCES
from xhf_hooks.sources.host_memory import SnapshotMemory

pytestmark = pytest.mark.needs('compiler')

BUCKET_NBYTES = 64_000
OFFLOAD: dict[str, Any] = dict(device='cpu', pin_memory=True)
#: Fields of DeepSpeed's section; None without DeepSpeed.
ENGINES: dict[str, dict[str, Any] | None] = {
    'plain': None,
    'ddp': None,
    'fsdp2': None,
    'zero1': dict(stage=1),
    'zero2': dict(stage=2),
    'zero3': dict(stage=3),
    'zero2_offload': dict(stage=2, offload_optimizer=OFFLOAD),
    'zero3_offload_optimizer': dict(stage=3, offload_optimizer=OFFLOAD),
    'zero3_offload': dict(stage=3, offload_optimizer=OFFLOAD, offload_param=OFFLOAD),
}
WRITERS = ('stream', 'parallel', 'positional', 'gather')


def ways_of(engine_name: str) -> dict[str, dict[str, Any]]:
    """Each writer, every other one in the background, and the others for the next engine; masters by two of them."""
    ways: dict[str, dict[str, Any]] = {}
    for number, writer in enumerate(WRITERS, start=[*ENGINES].index(engine_name)):
        if number % 2 and writer != 'gather':
            ways[f'{writer}, in the background'] = dict(writer=writer, in_background=True)
        else:
            ways[writer] = dict(writer=writer)
        if number % 2 and 'zero' in engine_name:
            ways[f'{writer}, masters'] = dict(writer=writer, dtype='float32')
    return ways


def build_model(lora: bool = False) -> Any:
    model = llama(hidden_size=64, intermediate_size=172, vocab_size=99, attn_implementation='eager')
    return adapt(model, torch.bfloat16) if lora else model.to(torch.bfloat16)


def on_device(model: Any, engine_name: str) -> Any:
    """The model on the device, after a step."""
    options = ENGINES[engine_name]
    tokens = torch.arange(8, device='sim').reshape(1, -1)
    if options:
        engine = zero_engine(model, reduce_bucket_size=50_000, **options)  # a buffer of DeepSpeed's
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        return engine.module
    model = model.to('sim')
    if engine_name == 'ddp':
        model = DistributedDataParallel(model)
    elif engine_name == 'fsdp2':
        mesh = init_device_mesh('sim', (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model


def whole_on_host(model: Any, masters: bool = False) -> dict[str, Any]:
    """The weights, gathered one by one; of those that have fp32 masters, these."""
    found = {}
    for name, parameter in model.named_parameters():
        if masters:
            whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, 'ds_id') else []):
                whole = parameter.full_tensor() if hasattr(parameter, 'full_tensor') else parameter.data
                whole = whole.to('cpu', copy=True)
        found[name.removeprefix('module.')] = whole.to('cpu')
    return found


def save_reference(model: Any, weights: dict[str, Any], folder: Path) -> None:
    """What save_pretrained writes of a model on the host with these weights, by rank 0. Runs on: all ranks."""
    if dist.get_rank() == 0:
        model.load_state_dict(weights)
        model.save_pretrained(folder)


def save_and_measure(model: Any, folder: Path, **how: Any) -> dict[str, Any]:
    """What the save does to the device. Runs on: all ranks."""
    before, counted = torch.sim.memory_allocated(), Counter(extension().counts())
    torch.sim.reset_peak_memory_stats()
    plan, _ = save_folder(model, folder, bucket_size=BUCKET_NBYTES, **how)
    counts = Counter(extension().counts()) - counted
    return {
        'to_device': counts['copies_to_device'],
        'waits': counts['synchronizations'] + counts['blocking_copies'] + counts['items'],
        'rounds': len(plan.rounds),
        'extra': torch.sim.max_memory_allocated() - before,
        'bucket': max(BUCKET_NBYTES, plan.largest_bucket_nbytes),
        'devices': extension().used_devices(),
    }


def save_case(engine_name: str, root: Path) -> dict[str, dict[str, Any]]:
    model = on_device(build_model(), engine_name)
    references = {'expected': whole_on_host(model)}
    if 'zero' in engine_name:
        references['expected masters'] = whole_on_host(model, masters=True)
    for name, weights in references.items():
        save_reference(build_model().to(weights['lm_head.weight'].dtype), weights, root / name)
    found = {}
    for way, how in ways_of(engine_name).items():
        # A script may set the default device: host memory must stay host memory
        with nullcontext() if 'masters' in way else torch.device('sim'):
            found[way] = save_and_measure(model, root / way, **how)
    return found


def save_rows(root: Path) -> dict[str, dict[str, Any]]:
    """By the source of docs/extending.md, of an engine that leaves a block of rows on each rank. Runs on: all ranks."""
    model = on_device(build_model(), 'plain')
    save_reference(build_model(), whole_on_host(model), root / 'expected')
    partition(model)
    with mock.patch.dict(SOURCES.module_dict):
        source_of_the_page()
        ways = {writer: save_and_measure(model, root / writer, writer=writer) for writer in WRITERS}
        way = 'stream, in the background'
        return {**ways, way: save_and_measure(model, root / way, writer='stream', in_background=True)}


def save_lora(root: Path) -> dict[str, dict[str, Any]]:
    """The merge of a model on the device, and of the same on the host. Runs on: all ranks."""
    model = build_model(lora=True)
    save_folder(model, root / 'expected', lora='merge')
    model = zero_engine(model, 3, reduce_bucket_size=50_000).module
    return {writer: save_and_measure(model, root / writer, writer=writer, lora='merge') for writer in WRITERS}


def train_with_hook(root: Path) -> set[int]:
    """MMEngine's hook beside DeepSpeedStrategy: the devices that were used. Runs on: all ranks."""
    hook = dict(interval=1, by_epoch=False, async_save=True, save_best='acc', rule='greater')
    zero = dict(reduce_bucket_size=50_000)
    config = run_config(root / 'run', hook=hook, stage=3, zero=zero, max_iters=2, scores=[0.5])
    with mock.patch('mmengine.dist.dist.get_comm_device', lambda group=None: torch.device('sim')):  # of its own table
        runner = train(config)
    save_reference(odd_llama(bf16=True), whole_on_host(runner.model.module.llm), root / 'expected')
    return extension().used_devices()


def save_unawaited(root: Path) -> None:
    """A mistake that does not show on the CPU: the copies of a save in the background are not waited for."""
    model = on_device(build_model(), 'zero3')
    save_folder(model, root / 'expected', in_background=True)
    with mock.patch.object(SnapshotMemory, 'synchronize', lambda self: None):
        save_folder(model, root / 'unawaited', in_background=True)


def save_without_memory(root: Path) -> str:
    """The error of a gather while rank 1 lacks device memory for a bucket; then gather again. Runs on: all ranks."""
    model = on_device(build_model(), 'zero3')
    save_folder(model, root / 'expected', bucket_size=BUCKET_NBYTES)
    if dist.get_rank() == 1:
        extension().set_limit(1, torch.sim.memory_allocated() + 1000)
    message = error_of(save_folder, model, root / 'found', writer='gather', bucket_size=BUCKET_NBYTES)
    extension().set_limit(dist.get_rank(), None)
    save_folder(model, root / 'found', writer='gather', bucket_size=BUCKET_NBYTES)
    return message


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('device')
    scenarios: dict[str, Any] = {name: partial(save_case, name, root / name) for name in ENGINES}
    scenarios['rows'] = partial(save_rows, root / 'rows')
    scenarios['lora'] = partial(save_lora, root / 'lora')
    scenarios['hook'] = partial(train_with_hook, root / 'hook')
    scenarios['out of memory'] = partial(save_without_memory, root / 'out of memory')
    scenarios['unawaited'] = partial(save_unawaited, root / 'unawaited')
    return run_scenarios(scenarios, 2, init='sim', root=root)


def weights_of(folder: Path) -> bytes:
    return (folder / 'model.safetensors').read_bytes()


def assert_same_bytes_within_a_bucket(root: Path, ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Check the folders of all ways, and what each rank says of its device."""
    for way in ranks[0]:
        expected = 'expected masters' if 'masters' in way else 'expected'
        assert weights_of(root / way) == weights_of(root / expected), way
        for index, rank in enumerate(ranks):
            assert rank[way]['extra'] <= rank[way]['bucket'], (way, index, rank[way])
            assert rank[way]['devices'] == {index}, way
            # Slices come from where they are, host memory of an offloaded optimizer, too
            assert 'gather' in way or rank[way]['to_device'] == 0, (way, index, rank[way])
            # Before the first read, for the checksums of equal copies, and for all copies to the host
            assert 'background' not in way or rank[way]['waits'] <= 3, (way, index, rank[way])
        if 'zero3' in root.name and 'stream' in way:  # who only sends waits once for each message
            # and twice for samples of fp32 masters, when the save is planned and when it begins
            n_samples = 2 * ('masters' in way)
            assert ranks[1][way]['waits'] <= ranks[1][way]['rounds'] + 1 + n_samples, ranks[1][way]


@pytest.mark.parametrize('name', [*ENGINES, 'rows', 'lora'])
def test_bytes_and_memory_of_saves_from_a_device(saved, name):
    ranks = check(saved, name)
    assert_same_bytes_within_a_bucket(saved.root / name, ranks)
    assert folder_tensors(saved.root / name / 'expected')


def test_the_hook_of_a_run_on_a_device(saved):
    assert check(saved, 'hook') == [{0}, {1}]
    (vis_data,) = (saved.root / 'hook' / 'run').glob('*/vis_data')
    for name in ('hf_model', 'hf_model_best'):
        assert weights_of(vis_data.parent / name) == weights_of(saved.root / 'hook' / 'expected')


def test_a_rank_without_memory_for_a_bucket_says_so_before_others_gather(saved):
    """They would wait in the collective until its watchdog ends the job."""
    errors = check(saved, 'out of memory')
    assert all("AgreedError: stage 'gather' failed on rank 1: OutOfMemoryError: sim:1" in error for error in errors), (
        errors
    )
    assert weights_of(saved.root / 'out of memory' / 'found') == weights_of(saved.root / 'out of memory' / 'expected')


def test_a_mistake_of_device_code_shows(saved):
    """So a case that passes above does not have it."""
    check(saved, 'unawaited')
    assert weights_of(saved.root / 'unawaited' / 'unawaited') != weights_of(saved.root / 'unawaited' / 'expected')
