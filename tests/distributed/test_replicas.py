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


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('replicas')
    scenarios: dict[str, Any] = {way: partial(differing, way) for way in WAYS}
    scenarios['buffers'] = buffers_are_of_rank_0
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


def test_buffers_may_differ(results):
    assert check(results[1], 'buffers') == [True] * N_RANKS
