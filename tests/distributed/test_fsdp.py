"""Models under torch's FSDP1 and FSDP2: save_hf and the hook, on real ranks, give what the whole model gives."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import frontends as doors
from tests.helpers.assert_intact import assert_whole
from tests.helpers.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.config_fields import assert_same_config
from tests.helpers.fsdp_runs import shard
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zoo.llamas import larger_llama, odd_llama

WRITERS = ('stream', 'parallel', 'positional', 'gather')
KINDS = ('fsdp2', 'fsdp2_columns', 'fsdp2_root_only', 'fsdp1', 'fsdp1_grad_op', 'fsdp1_root_only')
MEMORY = [('fsdp1', 'gather'), ('fsdp2', 'stream')]
#: Those that differ in what a save changes for a moment.
UNTOUCHED = ('fsdp2', 'fsdp1', 'fsdp1_grad_op')
#: FSDP1 and FSDP2 in a Runner, and MMEngine's FSDPStrategy.
HOOKED = ('fsdp1', 'fsdp2', 'strategy')
CASES = ('untied-fsdp1', 'untied-fsdp2', 'untied-fsdp2_columns', 'lora-fsdp1', 'lora-fsdp2')
#: On three ranks, which the rows of no weight are shared out to evenly.
UNEVEN = tuple(f'tied-{kind}' for kind in KINDS)


def whole_state(model: Any) -> dict[str, Any]:
    """By torch itself, on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def save_case(model_kind: str, kind: str, root: Path) -> dict[str, bool]:
    """Returns which writers gathered nothing."""
    import torch
    import torch.distributed as dist

    from xhf_hooks import save_hf

    def build() -> Any:
        return odd_llama(tied=model_kind == 'tied', lora=model_kind == 'lora')

    model = shard(build(), kind)
    for writer in WRITERS:
        save_hf(model, root / 'fresh' / writer, writer=writer, bucket_size=20_000, max_shard_size=20_000)
    if dist.get_rank() == 0:
        build().save_pretrained(root / 'fresh' / 'theirs')
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    doors.train_steps(model, optimizer)
    with torch.no_grad():
        model(**doors.batch())  # what it gathered for this, it keeps until the next step
    for writer in WRITERS:
        save_hf(model, root / 'trained' / writer, writer=writer, bucket_size=20_000, max_shard_size=20_000)
    doors.train_steps(model, optimizer)
    save_hf(model, root / 'bf16', dtype='bfloat16')
    save_hf(model, root / 'last')
    if model_kind == 'lora':
        save_hf(model, root / 'merged', lora='merge')
    state = whole_state(model)
    if dist.get_rank() == 0:
        whole = build()
        whole.load_state_dict(state)  # save_pretrained(state_dict=...) would not see what is tied
        whole.save_pretrained(root / 'theirs')


def untouched(kind: str, saves: bool, root: Path) -> dict[str, Any]:
    """The weights after some steps, with a save after each or without."""
    import torch

    from xhf_hooks import save_hf

    model = shard(odd_llama(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for writer in WRITERS:
        doors.train_steps(model, optimizer, steps=1)
        if saves:
            save_hf(model, root / 'untouched', writer=writer)
    return whole_state(model)


def memory(kind: str, writer: str, root: Path) -> tuple[int, int]:
    """Bytes that were saved, and extra memory of the busiest rank."""
    from xhf_hooks import save_hf

    model = shard(larger_llama(), kind)
    save_hf(model, root / 'memory', writer=writer, bucket_size='8MB')  # what the first save brings with it
    cost = save_hf(model, root / 'memory', writer=writer, bucket_size='8MB').cost
    return cost.nbytes, cost.peak_extra_nbytes


def flat_only(root: Path) -> str:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    model = FullyShardedDataParallel(odd_llama(), device_id=torch.device('cpu'), use_orig_params=False)
    try:
        save_hf(model, root / 'flat')
    except XhfError as error:
        return str(error)
    return 'no error'


def hook_run(kind: str, root: Path) -> None:
    """MMEngine's Runner with a model that is sharded, or its FlexibleRunner with the strategy that shards it."""
    import torch
    import torch.distributed as dist
    from mmengine.model.wrappers import MMFullyShardedDataParallel
    from mmengine.registry import MODELS
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.helpers.toy_run import ToyLM, run_config, train

    class ShardedToy(ToyLM):
        @property
        def init_weights(self) -> Any:  # or Runner would broadcast what is not the same on every rank
            raise AttributeError('init_weights')

    @MODELS.register_module(force=True)
    def sharded_toy() -> Any:
        model = ShardedToy()
        if kind == 'fsdp1':
            return MMFullyShardedDataParallel(model, device_id=torch.device('cpu'))
        fully_shard(model.llm, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
        return model

    hook = dict(interval=2, by_epoch=False, out_dir=str(root / 'hf_model'), on_error='raise')
    config = run_config(root, hook=hook, stage=None)
    if kind == 'strategy':
        os.environ['LOCAL_RANK'] = str(dist.get_rank())
        wrapper = dict(type='MMFullyShardedDataParallel', device_id=torch.device('cpu'), use_orig_params=True)
        config |= dict(runner_type='FlexibleRunner', strategy=dict(type='FSDPStrategy', model_wrapper=wrapper))
    else:
        config['model'] = dict(type='sharded_toy')
    runner = train(config)
    state = {name.removeprefix('llm.'): tensor for name, tensor in whole_state(runner.model).items()}
    if dist.get_rank() == 0:
        odd_llama().save_pretrained(root / 'theirs', state_dict=state)


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('fsdp')
    scenarios = {case: partial(save_case, *case.split('-'), root / case) for case in CASES}
    for kind in UNTOUCHED:
        scenarios |= {f'untouched-{kind}-{saves}': partial(untouched, kind, saves, root / kind) for saves in (0, 1)}
    scenarios |= {f'memory-{kind}-{writer}': partial(memory, kind, writer, root) for kind, writer in MEMORY}
    scenarios['flat_only'] = partial(flat_only, root)
    scenarios |= {f'hook-{kind}': partial(hook_run, kind, root / f'hook-{kind}') for kind in HOOKED}
    return root, run_scenarios(scenarios, 2)


@pytest.fixture(scope='module')
def uneven(tmp_path_factory):
    root = tmp_path_factory.mktemp('fsdp_uneven')
    return root, run_scenarios({case: partial(save_case, *case.split('-'), root / case) for case in UNEVEN}, 3)


@pytest.mark.parametrize('case', CASES)
def test_fsdp_writes_the_same(results, case):
    compare(*results, case)


@pytest.mark.parametrize('case', UNEVEN)
def test_uneven_shards(uneven, case):
    compare(*uneven, case)


def compare(root: Path, outcomes: Any, case: str) -> None:
    """Each writer, before and after training, with what the whole model gives."""
    check(outcomes, case)
    folder = root / case
    for writer in WRITERS:
        assert_same_folder_tensors(folder / 'fresh' / writer, folder / 'fresh' / 'theirs')
        assert_same_folder_tensors(folder / 'trained' / writer, folder / 'trained' / 'stream')
        assert_whole(folder / 'trained' / writer)
    config = 'adapter_config.json' if case.startswith('lora') else 'config.json'
    if config == 'config.json':
        assert_same_config(folder / 'last', folder / 'theirs')
    assert_same_folder_tensors(folder / 'last', folder / 'theirs')
    before, after = folder_tensors(folder / 'trained' / 'stream'), folder_tensors(folder / 'last')
    assert any(not tensor.equal(after[name]) for name, tensor in before.items())
    rounded = folder_tensors(folder / 'bf16')
    assert all(tensor.bfloat16().equal(rounded[name]) for name, tensor in after.items())


@pytest.mark.parametrize('kind', UNTOUCHED)
def test_training_is_untouched(results, kind):
    _, outcomes = results
    without, with_saves = (check(outcomes, f'untouched-{kind}-{saves}')[0] for saves in (0, 1))
    assert without and all(tensor.equal(with_saves[name]) for name, tensor in without.items())


@pytest.mark.parametrize(('kind', 'writer'), MEMORY)
def test_memory_is_that_of_buckets_or_a_unit(results, kind, writer):
    _, outcomes = results
    nbytes, extra_nbytes = check(outcomes, f'memory-{kind}-{writer}')[0]
    assert nbytes > 100e6 and extra_nbytes < 0.45 * nbytes, (nbytes, extra_nbytes)


def test_flat_parameters_alone_are_refused(results):
    _, outcomes = results
    assert all('use_orig_params=True' in message for message in check(outcomes, 'flat_only'))


@pytest.mark.parametrize('kind', HOOKED)
def test_hook(results, kind):
    root, outcomes = results
    check(outcomes, f'hook-{kind}')
    assert_same_folder_tensors(root / f'hook-{kind}' / 'hf_model', root / f'hook-{kind}' / 'theirs')
