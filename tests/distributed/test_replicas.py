"""Ranks that hold different values of what should be one model: no save is made of them, and all say the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assert_intact import assert_whole
from tests.helpers.compare import folder_tensors
from tests.helpers.engines import save_folder
from tests.helpers.scenarios import check, run_scenarios

N_RANKS = 3
#: Ways to save to options of `save_folder`.
WAYS: dict[str, dict[str, Any]] = {
    'positional': dict(writer='positional'),
    'positional, float32': dict(writer='positional', dtype='float32'),
    'parallel': dict(writer='parallel'),
    'stream, in the background': dict(writer='stream', in_background=True),
    'gather': dict(writer='gather'),
}
CHANGED = 'model.layers.1.mlp.up_proj.weight'
#: Hook runs, in which each rank trains a model of its own: name to options of the hook.
HOOKS: dict[str, dict[str, Any]] = {
    'raise': dict(async_save=True, on_error='raise'),
    'continue': {},
}


def differing(way: str, root: Path) -> Any:
    """One bit of the last element is another on the last rank. Runs on: all ranks.

    Returns:
        The error, or the folder's tensor.
    """
    import torch
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks.errors import XhfError

    model = odd_llama(bf16=True)
    save_folder(model, root / 'hf_model', **WAYS[way])
    changed = dict(model.named_parameters())[CHANGED]
    if dist.get_rank() == dist.get_world_size() - 1:
        changed.data.view(torch.int16)[-1, -1] ^= 1
    try:
        save_folder(model, root / 'hf_model', **WAYS[way])
    except XhfError as error:
        return type(error).__name__, str(error)
    return 'saved', str(folder_tensors(root / 'hf_model')[CHANGED])


def local_sgd(root: Path) -> list[Any]:
    """torch's LocalSGD with a sync at every other step; a call of save_hf after each step. Runs on: all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    from tests.helpers.zoo.llamas import VOCAB, odd_llama
    from xhf_hooks import save_hf
    from xhf_hooks.errors import ModelError

    model, told = odd_llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        tokens = torch.randint(VOCAB, (1, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        averager.average_parameters(model.parameters())  # of those with gradients
        optimizer.zero_grad()
        try:
            save_hf(model, root / 'hf_model')
            told.append('saved')
        except ModelError as error:
            told.append(str(error))
    found = folder_tensors(root / 'hf_model')
    return [*told, all(torch.equal(found[n], p.detach()) for n, p in model.named_parameters())]


def buffers_are_of_rank_0(root: Path) -> bool:
    """Runs on: all ranks."""
    import torch
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks import save_hf

    model = odd_llama(batch_norm=True)
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if 'running_mean' in name)
    buffer.fill_(dist.get_rank())
    save_hf(model, root / 'hf_model')
    return bool(torch.count_nonzero(folder_tensors(root / 'hf_model')[name]) == 0)


def hook_run(name: str, root: Path) -> list[str]:
    """Runs on: all ranks."""
    from tests.helpers.toy_run import run_config, train
    from xhf_hooks.errors import XhfError

    hook = dict(interval=2, by_epoch=False, max_keep_ckpts=-1, **HOOKS[name])
    try:
        folder = Path(train(run_config(root, hook=hook, stage=None)).log_dir)
    except XhfError as error:
        return [type(error).__name__, str(error), *map(str, root.glob('*/hf_model*'))]
    return ['ended', next(folder.glob('*.log')).read_text(), *map(str, folder.glob('hf_model*'))]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('replicas')
    scenarios: dict[str, Any] = {way: partial(differing, way) for way in WAYS}
    scenarios |= {'local_sgd': local_sgd, 'buffers': buffers_are_of_rank_0}
    scenarios |= {name: partial(hook_run, name) for name in HOOKS}
    todo = {name: partial(scenario, root / name) for name, scenario in scenarios.items()}
    return root, run_scenarios(todo, N_RANKS)


@pytest.mark.parametrize('way', WAYS)
def test_different_copies_are_not_stitched_together(results, way):
    from tests.helpers.zoo.llamas import odd_llama

    root, found = results
    outcomes = check(found, way)
    kind, message = outcomes[0]
    assert kind == 'ModelError', outcomes
    assert f'found other values on ranks [{N_RANKS - 1}] than on rank 0 (in 1 of ' in message
    assert message.startswith(f'{CHANGED}: ')
    assert outcomes == [outcomes[0]] * N_RANKS
    folder = root / way / 'hf_model'
    assert_whole(folder)
    saved = folder_tensors(folder)  # of the save before
    model = odd_llama(bf16=True)
    assert all(bool((saved[name] == parameter).all()) for name, parameter in model.named_parameters())
    assert sorted(path.name for path in (root / way).iterdir() if not path.name.startswith('.')) == ['hf_model']


def test_local_sgd_is_saved_after_a_sync_only(results):
    outcomes = check(results[1], 'local_sgd')
    assert outcomes == [outcomes[0]] * N_RANKS
    first, second, third, fourth, is_last = outcomes[0]
    assert [first, third] == ['saved', 'saved'] or [second, fourth] == ['saved', 'saved'], outcomes[0]
    refused = [message for message in outcomes[0][:4] if message != 'saved']
    assert len(refused) == 2
    for message in refused:
        assert ': expected equal copies on all ranks' in message
        assert f'on ranks {[*range(1, N_RANKS)]} than on rank 0' in message
    assert is_last == (fourth == 'saved')


def test_buffers_may_differ(results):
    assert check(results[1], 'buffers') == [True] * N_RANKS


@pytest.mark.parametrize('name', HOOKS)
def test_hook_refuses_ranks_with_models_of_their_own(results, name):
    """With on_error='continue' training ends, the log says why, and no folder is there."""
    outcomes = check(results[1], name)
    for how, message, *folders in outcomes:
        assert (how, folders) == ('ModelError' if name == 'raise' else 'ended', [])
        assert 'found other values on ranks [1, 2] than on rank 0' in message
    assert outcomes == [outcomes[0]] * N_RANKS
