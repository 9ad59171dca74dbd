"""No file takes more than 30 seconds of the processor, or 2 GB beyond its own size: each in a process of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.hostile_configs import hungry_texts
from tests.helpers.hungry_pickles import HUNGRY
from tests.helpers.hungry_zips import HUNGRY_ZIPS, ODD_ZIPS
from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.measured import Measured, measured
from tests.helpers.read_checkpoint import open_checkpoint
from tests.helpers.torch_zip import write_torch_zip
from xhf_hooks.errors import CheckpointError
from xhf_hooks.meta_model.parse_config import parse_config
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

GB = 10**9
MODEL = 'mp_rank_00_model_states.pt'
OPTIM = 'zero_pp_rank_0_mp_rank_00_optim_states.pt'
#: Of those in HUNGRY, one of a kind; the others differ in the instruction alone.
PICKLES = (
    'sets', 'nested lists', 'floats', 'long text', 'memos by number', 'stand-ins',
    'copies of a list', 'copies of a set', 'tensors', 'tuple keys of one hash', 'numbers that collide',
)  # fmt: skip


def assert_bounded(found: Measured, refused_by: type[Exception] | None = None) -> None:
    print(found)
    assert found.raised in (None, 'CheckpointError', 'ConfigError'), found
    assert refused_by is None or found.raised == refused_by.__name__, found
    assert found.cpu_secs < 30 and found.nbytes < 2 * GB, found
    assert '\n' not in str(found.result) and len(str(found.result)) < 700


def kind(function: Callable[[Any], Any]) -> Callable[[Any], str]:
    """The type of the result alone, which need not travel through a pipe."""
    return lambda argument: type(function(argument)).__name__


@pytest.mark.parametrize('name', PICKLES)
def test_pickles(tmp_path, name):
    file = write_torch_zip(tmp_path / 'model.pth', HUNGRY[name](), {'0': bytes(16)})
    assert_bounded(measured(kind(load_torch_file), file))
    file.unlink()  # some have 250 MB


@pytest.mark.parametrize('name', HUNGRY_ZIPS)
def test_zip_directories(tmp_path, name):
    write, words = HUNGRY_ZIPS[name]
    write(tmp_path / 'model.pth')
    found = measured(kind(load_torch_file), tmp_path / 'model.pth')
    assert_bounded(found, CheckpointError)
    assert words in found.result
    (tmp_path / 'model.pth').unlink()


@pytest.mark.parametrize('name', ODD_ZIPS)
def test_odd_zip_directories(tmp_path, name):
    write, words = ODD_ZIPS[name]
    write(tmp_path / 'model.pth')
    with pytest.raises(CheckpointError) as caught:
        load_torch_file(tmp_path / 'model.pth')
    assert words in str(caught.value)


def laughs() -> list:
    value = ['ha']
    for _ in range(40):
        value = [value] * 3
    return value


def itself() -> dict:
    value: dict[str, Any] = {'zero_optimization': {'stage': 1}}
    value.update(a=value, b=[value], c=value)
    return value


def shared_shapes() -> list:
    return [{f'p{i}': torch.Size([2, 3]) for i in range(10_000)}] * 100_000


def aliases(state: dict[str, Any]) -> None:
    ones = torch.zeros(60_001, dtype=torch.float16)
    state['module'].update({f'tied.{i}': ones[i : i + 1] for i in range(60_001)})
    state['shared_params'] = {f'tied.{i}': f'tied.{i + 1}' for i in reversed(range(60_000))}


#: The file that is edited, how, and whether it is refused.
STATES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], bool]] = {
    'a config that doubles': (MODEL, lambda s: s.update(ds_config=laughs()), True),
    'a config in itself': (MODEL, lambda s: s.update(ds_config=itself()), True),
    'a config of many parts': (MODEL, lambda s: s.update(ds_config={'a': [[0] * 1000] * 10_000}), True),
    'shapes shared': (MODEL, lambda s: s.update(param_shapes=shared_shapes()), True),
    'frozen shapes that double': (MODEL, lambda s: s.update(frozen_param_shapes={'x': laughs()}), True),
    'paddings shared': (
        OPTIM, lambda s: s['optimizer_state_dict'].update(param_alignment_paddings=[[0] * 10_000] * 10_000), True),
    'aliases': (MODEL, aliases, False),
    'steps of many digits': (MODEL, lambda s: s.update(global_steps=2**5000), True),
    'a step of many digits': (
        OPTIM, lambda s: s['optimizer_state_dict'].update(base_optimizer_state=[{'step': 2**5000}]), True),
    'an iteration of many digits': (MODEL, lambda s: s.update(meta={'iter': 2**500, 'epoch': 2**500}), False),
    'a meta that doubles': (MODEL, lambda s: s.update(meta=laughs(), message_hub=laughs()), False),
}  # fmt: skip


@pytest.mark.parametrize('name', STATES)
def test_states(tmp_path, name):
    file, edit, refused = STATES[name]
    folder = MadeCheckpoint(stage=1, world_size=1).write(tmp_path / 'global_step5')
    state = torch.load(folder / file, weights_only=False)
    edit(state)
    torch.save(state, folder / file)
    found = measured(lambda: open_checkpoint(folder).iteration)
    assert_bounded(found, CheckpointError if refused else None)
    assert refused or found.result == 5


def test_an_older_file_whose_list_of_storages_doubles(tmp_path):
    parts = (0x1950A86A20F9469CFC6C, 1001, {'little_endian': True}, {'w': 1}, laughs())
    file = tmp_path / 'old.pth'
    file.write_bytes(b''.join(pickle.dumps(part, protocol=2) for part in parts))
    assert_bounded(measured(kind(load_torch_file), file), CheckpointError)


def test_aliases_are_one_tensor(tmp_path):
    """In whatever order they are named."""
    folder = MadeCheckpoint(stage=1, world_size=1).write(tmp_path / 'global_step5')
    state = torch.load(folder / MODEL, weights_only=False)
    ones = torch.zeros(9, dtype=torch.float16)
    state['module'].update({f'tied.{i}': ones[i : i + 1] for i in range(9)})
    state['shared_params'] = {'tied.3': 'tied.7', 'tied.8': 'tied.3', 'tied.1': 'tied.8', 'tied.5': 'tied.6'}
    torch.save(state, folder / MODEL)
    found = {spec.name: spec.aliases for spec in open_checkpoint(folder).specs() if spec.name.startswith('tied')}
    assert found == {
        'tied.0': (), 'tied.1': ('tied.3', 'tied.7', 'tied.8'), 'tied.2': (), 'tied.4': (), 'tied.5': ('tied.6',),
    }  # fmt: skip


@pytest.mark.parametrize('name', hungry_texts())
def test_config_texts(name):
    assert_bounded(measured(kind(lambda text: parse_config(text, 'a.py')), hungry_texts()[name]))


def test_honest_keys(tmp_path):
    """As of the states of optimizers: counted, with gaps, in another order; few of other kinds."""
    value = {
        'counted': dict.fromkeys(range(200_000)), 'members': set(range(50_000)),
        'gaps': dict.fromkeys(range(7, 45_000, 3)), 'backwards': dict.fromkeys(range(5000, 0, -1)),
        'pairs': dict.fromkeys((i, str(i)) for i in range(1000)), 'floats': dict.fromkeys(i / 7 for i in range(1000)),
        'texts': dict.fromkeys(map(str, range(50_000))), 'small': [{1000: i} for i in range(40_000)],
    }  # fmt: skip
    torch.save(value, tmp_path / 'keys.pth')
    assert load_torch_file(tmp_path / 'keys.pth') == value


def test_a_large_honest_file(tmp_path):
    """20,000 parameters with the state of Adam use a fifth of what a file may."""
    n = 20_000
    weights = {f'model.layers.{i // 10}.mlp.experts.{i}.gate_proj.weight': torch.zeros(2, 3) for i in range(n)}
    adam = {i: {'step': torch.zeros(()), 'exp_avg': torch.zeros(2), 'exp_avg_sq': torch.zeros(2)} for i in range(n)}
    optimizer = {'state': adam, 'param_groups': [{'lr': 1e-4, 'params': list(range(n))}]}
    torch.save({'state_dict': weights, 'optimizer': optimizer}, tmp_path / 'iter_9.pth')
    found = measured(lambda: len(open_checkpoint(tmp_path / 'iter_9.pth').specs()))
    assert_bounded(found)
    assert found.result == n
