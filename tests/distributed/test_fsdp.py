"""Models under torch's FSDP1 and FSDP2: save_hf on real ranks gives what the whole model gives."""

from __future__ import annotations

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
MEMORY = [('fsdp1', 'gather'), ('fsdp2', 'stream')]
#: By number of ranks; to three, the rows of no weight are shared out evenly.
CASES_OF = {
    2: ('untied-fsdp2_columns', 'lora-fsdp1', 'lora-fsdp2'),
    3: ('tied-fsdp2', 'tied-fsdp2_root_only', 'tied-fsdp1', 'tied-fsdp1_grad_op'),
}
CASES = [(n, case) for n, cases in CASES_OF.items() for case in cases]


def whole_state(model: Any) -> dict[str, Any]:
    """By torch itself, on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def save_case(model_kind: str, kind: str, root: Path) -> None:
    """Runs on: all ranks."""
    import torch
    import torch.distributed as dist

    from xhf_hooks import save_hf

    def build() -> Any:
        return odd_llama(tied=model_kind == 'tied', lora=model_kind == 'lora')

    model = shard(build(), kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    doors.train_steps(model, torch.optim.AdamW(trained, lr=1e-2))
    with torch.no_grad():
        model(**doors.batch())  # what it gathered for this, it keeps until the next step
    for writer in WRITERS:
        save_hf(model, root / writer, writer=writer, bucket_size=20_000, max_shard_size=20_000)
    save_hf(model, root / 'bf16', dtype='bfloat16')
    if model_kind == 'lora':
        save_hf(model, root / 'merged', lora='merge')
    state = whole_state(model)
    if dist.get_rank() == 0:
        whole = build()
        whole.load_state_dict(state)  # save_pretrained(state_dict=...) would not see what is tied
        whole.save_pretrained(root / 'theirs', max_shard_size=20_000)


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


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """By number of ranks."""
    root = tmp_path_factory.mktemp('fsdp')
    scenarios = {n: {case: partial(save_case, *case.split('-'), root / case) for case in CASES_OF[n]} for n in CASES_OF}
    for kind in ('fsdp2', 'fsdp1'):
        scenarios[2] |= {f'untouched-{kind}-{saves}': partial(untouched, kind, saves, root / kind) for saves in (0, 1)}
    scenarios[2] |= {f'memory-{kind}-{writer}': partial(memory, kind, writer, root) for kind, writer in MEMORY}
    scenarios[2]['flat_only'] = partial(flat_only, root)
    return root, {n: run_scenarios(cases, n) for n, cases in scenarios.items()}


@pytest.mark.parametrize(('n_ranks', 'case'), CASES)
def test_every_writer_writes_what_the_whole_model_gives(results, n_ranks, case):
    root, outcomes = results
    check(outcomes[n_ranks], case)
    folder, is_lora = root / case, case.startswith('lora')
    for writer in WRITERS:
        assert_same_folder_tensors(folder / writer, folder / 'theirs')
        assert_whole(folder / writer)
    if not is_lora:
        assert_same_config(folder / 'gather', folder / 'theirs')
    rounded = folder_tensors(folder / 'bf16')
    assert all(tensor.bfloat16().equal(rounded[name]) for name, tensor in folder_tensors(folder / 'theirs').items())
    assert not is_lora or 'model.embed_tokens.weight' in folder_tensors(folder / 'merged')


@pytest.mark.parametrize('kind', ['fsdp2', 'fsdp1'])
def test_training_is_untouched(results, kind):
    _, outcomes = results
    without, with_saves = (check(outcomes[2], f'untouched-{kind}-{saves}')[0] for saves in (0, 1))
    assert without and all(tensor.equal(with_saves[name]) for name, tensor in without.items())


@pytest.mark.parametrize(('kind', 'writer'), MEMORY)
def test_memory_is_that_of_buckets_or_a_unit(results, kind, writer):
    _, outcomes = results
    nbytes, extra_nbytes = check(outcomes[2], f'memory-{kind}-{writer}')[0]
    assert nbytes > 100e6 and extra_nbytes < 0.45 * nbytes, (nbytes, extra_nbytes)


def test_flat_parameters_alone_are_refused(results):
    _, outcomes = results
    assert all('use_orig_params=True' in message for message in check(outcomes[2], 'flat_only'))
