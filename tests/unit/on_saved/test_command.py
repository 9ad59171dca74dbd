"""What a command is called with, and what it sees of the rank that calls it."""

from __future__ import annotations

import pytest

from xhf_hooks.config.checks import PLACEHOLDERS
from xhf_hooks.errors import OptionError
from xhf_hooks.on_saved.action import resolve_action
from xhf_hooks.on_saved.command import fill_in
from xhf_hooks.on_saved.environment import without_ranks

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def test_placeholders():
    values = dict(zip(PLACEHOLDERS, ['/a b/{step}', 's3://b/x', 5, 'iter_5', 'hf_model', '/out'], strict=True))
    command = ['x', 'pretrained={path},step={step}', '{label}{name}', '{"json": 1}', '${HOME}', '{output}/{}', '{url}']
    assert fill_in(command, values) == [
        *('x', 'pretrained=/a b/{step},step=5', 'iter_5hf_model', '{"json": 1}', '${HOME}', '/out/{}', 's3://b/x'),
    ]


def test_a_command_is_no_rank():
    kept = {'PATH': '/bin', 'CUDA_VISIBLE_DEVICES': '7', 'HF_HOME': '/hf', 'OMP_NUM_THREADS': '1', 'RANKING': 'x'}
    of_a_rank = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID']
    of_a_rank += ['ACCELERATE_USE_DEEPSPEED', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID', 'GROUP_RANK']
    assert without_ranks(kept | dict.fromkeys(of_a_rank, '1')) == kept


class NotCallable:
    """What a config may build."""


def function(path, iteration, factor):
    """One number."""
    return {'x': factor * iteration}


class Callable:
    """What a config has to build."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, path, iteration):
        """One number."""
        return {'x': self.factor * iteration}


def test_what_is_to_be_done_is_checked():
    assert resolve_action(('sh', '-c', 'x')) == ('sh', '-c', 'x')
    assert resolve_action(print) is print
    for named in (f'{__name__}.Callable', f'{__name__}.function', function):
        assert resolve_action(dict(type=named, factor=3))(None, 5) == {'x': 15}
    with pytest.raises(OptionError, match=r"on_saved: expected a program .*'no_such_program'"):
        resolve_action(('no_such_program', 'x'))
    for wrong in ('NotCallable', 'no_such_function'):
        with pytest.raises(OptionError, match='on_saved: expected a type that can be called'):
            resolve_action(dict(type=f'{__name__}.{wrong}'))


def with_url(path, iteration, url):
    """An action for uploads."""


def test_a_function_is_called_in_this_way():
    assert resolve_action(with_url, takes_url=True) is with_url
    assert resolve_action(min) is min, 'it tells nothing of its arguments'
    with pytest.raises(OptionError, match=r"on_saved: .*\(path, iteration\) \(missing a required argument: 'url'\)"):
        resolve_action(with_url)
    for action in (function, dict(type=f'{__name__}.Callable', factor=3)):
        with pytest.raises(OptionError, match=r'on_saved: .*\(path, iteration, url=url\) \('):
            resolve_action(action, takes_url=True)
