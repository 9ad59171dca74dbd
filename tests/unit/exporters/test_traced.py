"""Traced tensors say what they are made of, and real tensors are made the same way, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import _find_shared_tensors, _is_complete
from torch import nn

from xhf_hooks.exporters.traced import (
    ChangedInPlaceError,
    ElementRange,
    TracedTensor,
    ValueStandIn,
    computed,
    replay,
    traced,
)

VALUES = {'a': torch.randn(6, 4), 'b': torch.randn(6, 4), 'c': torch.arange(24, dtype=torch.int64).view(6, 4)}


def sources(stand_in: ValueStandIn | None = None) -> list[TracedTensor]:
    return [traced(name, value.shape, value.dtype, stand_in) for name, value in VALUES.items()]


#: What is done to a (6 by 4), and where its elements begin in it; None: they are no consecutive ones.
DONE: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    'itself': (lambda a: a, 0),
    'all of it': (lambda a: a[...], 0),
    'a row': (lambda a: a[2], 8),
    'rows': (lambda a: a[2:5], 8),
    'rows of rows': (lambda a: a[1:][1:3], 8),
    'columns': (lambda a: a[:, 1:3], None),
    'columns, in new memory': (lambda a: a[:, 1:3].contiguous(), None),
    'each other row': (lambda a: a[::2], None),
    'chosen rows': (lambda a: a[torch.tensor([5, 4, 3, 2, 1, 0])], None),
    'another shape': (lambda a: a.view(2, 3, 4)[1], 12),
    'flat, then a part': (lambda a: a.reshape(-1)[5:9], 5),
    'turned': (lambda a: a.t(), None),
    'turned, in new memory': (lambda a: a.t().contiguous(), None),
    'turned twice': (lambda a: a.t().t(), 0),
    'a copy': (lambda a: a[2:].clone(), 8),
    'a copy of columns': (lambda a: a[:, :2].clone(), None),
    'detached': (lambda a: a.detach(), 0),
    'data': (lambda a: a.data, 0),
    'cast': (lambda a: a.to(torch.bfloat16), 0),
    'cast, then a part': (lambda a: a.half()[3:], 12),
    'a part, then cast': (lambda a: a[3:].double(), 12),
    'its bits': (lambda a: a.view(torch.int32), None),
    'expanded': (lambda a: a[:1].expand(3, 4), None),
    'a parameter': (lambda a: nn.Parameter(a[1:]), 4),
    'a frozen parameter': (lambda a: nn.Parameter(a, requires_grad=False), 0),
    'computed': (lambda a: a * 2 + 1, None),
    'a chunk': (lambda a: a.chunk(3)[1], 8),
    'a chunk of columns': (lambda a: torch.chunk(a, 2, dim=1)[1], None),
    'split': (lambda a: torch.split(a, [1, 2, 3])[2], 12),
    'unbound': (lambda a: a.unbind()[3], 12),
    'interleaved heads, as of a rotary embedding': (lambda a: a.view(2, 3, 4).transpose(0, 1).reshape(6, 4), None),
}


@pytest.mark.parametrize('done', DONE)
def test_one_source(done):
    function, offset = DONE[done]
    a, _, _ = sources()
    found, expected = function(a), function(VALUES['a'])
    assert isinstance(found, TracedTensor) and found.sources == ('a',)
    assert found.shape_and_dtype == (tuple(expected.shape), expected.dtype)
    assert found.element_range == (None if offset is None else ElementRange('a', offset))
    made = replay({'x': found}, VALUES)['x']
    assert made.dtype == expected.dtype and torch.equal(made, expected)
    if offset is not None:
        part = VALUES['a'].view(-1)[offset : offset + expected.numel()]
        assert torch.equal(part.to(expected.dtype).view(expected.shape), expected), 'what a run means'


def test_tied_tensors_are_found_as_real_ones_are():
    """By functions of safetensors, which its ``save_model`` calls, as modules of sentence-transformers do."""
    a, b, c = sources(ValueStandIn(1))
    found = {'a': a, 'tied': traced('tied', a.shape, a.dtype, ValueStandIn(1), tied=a), 'whole': a.view(24)}
    found = {**found, 'b': b, 'c': c, 'copy': a.clone()}
    real = {'a': VALUES['a'], 'tied': VALUES['a'], 'whole': VALUES['a'].view(24)}
    real = {**real, 'b': VALUES['b'], 'c': VALUES['c'], 'copy': VALUES['a'].clone()}
    assert sorted(map(sorted, _find_shared_tensors(found))) == sorted(map(sorted, _find_shared_tensors(real)))
    assert all(map(_is_complete, found.values()))


def test_a_part_has_its_place_in_the_whole():
    """transformers asks where a tensor ends by the address of its last element."""
    a, b, _ = sources(ValueStandIn(1))
    real = VALUES['a']
    for part, expected in ((a[2:], real[2:]), (a[2:].view(-1)[-1], real[2:].view(-1)[-1]), (a.t()[1], real.t()[1])):
        assert part.data_ptr() - a.data_ptr() == expected.data_ptr() - real.data_ptr()
    assert abs(b.data_ptr() - a.data_ptr()) > 2**40


#: What is made of a, b and c, and the names of its sources.
JOINED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    'cat': (lambda a, b, c: torch.cat([b, a]), ('b', 'a')),
    'cat of parts': (lambda a, b, c: torch.cat([b.chunk(2)[1], a.chunk(3, dim=0)[0], b[:1]]), ('b', 'a')),
    'stack': (lambda a, b, c: torch.stack([a, b], dim=1), ('a', 'b')),
    'fused experts': (
        lambda a, b, c: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1).transpose(1, 2).contiguous(),
        ('a', 'b'),
    ),
    'arithmetic': (lambda a, b, c: (a + 0.5 * (b.t() @ b)[:1]).to(torch.bfloat16), ('a', 'b')),
    'an index': (lambda a, b, c: a[c[:, 0] % 6], ('a', 'c')),
    'where': (lambda a, b, c: torch.where(c > 5, a, other=b), ('c', 'a', 'b')),
    'a result of several': (lambda a, b, c: torch.max(a + b, dim=0)[1], ('a', 'b')),
}


@pytest.mark.parametrize('joined', JOINED)
def test_several_sources(joined):
    function, names = JOINED[joined]
    found, expected = function(*sources()), function(*VALUES.values())
    assert isinstance(found, TracedTensor) and found.sources == names and found.element_range is None
    assert found.shape_and_dtype == (tuple(expected.shape), expected.dtype)
    made = replay({'x': found}, VALUES)['x']
    assert made.dtype == expected.dtype and torch.equal(made, expected)


@pytest.mark.parametrize(
    'change',
    [
        lambda a: a.add_(1),
        lambda a: a[0].zero_(),
        lambda a: a.__setitem__(0, 1.0),
        lambda a: a.copy_(torch.zeros(6, 4, device='meta')),
        lambda a: nn.init.normal_(a),
        lambda a: torch.add(a, a, out=a),
    ],
)
def test_what_was_changed_in_place_is_refused(change):
    """It would not be repeated, and the values would be wrong."""
    a, b, _ = sources()
    before, view, copied = a * 1, a[:2], a.detach()
    with torch.no_grad():
        change(a)
    for used in (a, view, copied, a.data, a[0], a * 2, torch.cat([b, a]), *a.chunk(2), nn.Parameter(a)):
        with pytest.raises(ChangedInPlaceError, match=r'has changed (b, )?a in place'):
            used.element_range  # noqa: B018
        with pytest.raises(ChangedInPlaceError):
            used.shape_and_dtype  # noqa: B018
    assert b.element_range == ElementRange('b', 0) and torch.equal(replay({'x': before}, VALUES)['x'], VALUES['a'])


def test_what_was_computed_may_be_changed_if_nobody_uses_it():
    a, b, _ = sources()
    total = a + b
    halves = total.chunk(2)
    total.data.normal_()
    for used in (total, *halves, total[0]):
        with pytest.raises(ChangedInPlaceError, match='normal_ has changed a, b in place'):
            used.require_unchanged()
    a.require_unchanged()
    assert torch.equal(replay({'x': a + b}, VALUES)['x'], VALUES['a'] + VALUES['b'])


def test_what_several_need_is_made_once():
    calls = []

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.cat([a, b])

    a, b, _ = sources()
    whole = computed((12, 4), torch.float32, joined, a, b)
    assert calls == [] and whole.sources == ('a', 'b') and whole.element_range is None
    made = replay({'upper': whole[:5], 'lower': whole.chunk(2)[1], 'doubled': whole * 2}, VALUES)
    expected = torch.cat([VALUES['a'], VALUES['b']])
    assert calls == [1]
    assert torch.equal(made['upper'], expected[:5]) and torch.equal(made['lower'], VALUES['b'])
    assert torch.equal(made['doubled'], expected * 2)


def test_copies_of_loading_are_left_out():
    """It casts and moves to the meta device; real tensors are to stay where they are, and as exact as they are."""
    a, b, _ = sources()
    loaded = torch.stack([a.to('meta', torch.bfloat16), b.half().float()]).to(device='meta', dtype=torch.float16)
    made = replay({'x': nn.Parameter(loaded)}, VALUES, with_copies=False)['x']
    assert torch.equal(made, torch.stack([VALUES['a'], VALUES['b']]))


def test_values_are_read_of_a_stand_in_alone():
    stand_in = ValueStandIn(3)
    a, _, c = sources(stand_in)
    assert a.shape == (6, 4) and a.numel() == 24 and not stand_in.was_read
    assert c[0, 0].item() == 3 and bool((c == 3).all()) and stand_in.was_read
    without, _, _ = sources()
    for read in (lambda: without[0, 0].item(), lambda: bool(without.sum() > 0), lambda: without.tolist()):
        with pytest.raises(NotImplementedError, match='no values'):
            read()


def test_a_move_is_none_and_a_parameter_stays_one():
    """transformers moves what it saves to the CPU, and accelerate moves parameters that it loads."""
    parameter = nn.Parameter(traced('a', (2, 3), torch.float32))
    assert isinstance(parameter, nn.Parameter)
    moved = [parameter.cpu(), parameter.to('cpu'), parameter.to(device='meta'), parameter.to('cpu', torch.float32)]
    assert all(one is parameter for one in moved)
    for cast in (parameter.to('cpu', torch.bfloat16), parameter.to(torch.empty(1, dtype=torch.bfloat16))):
        assert cast.element_range == ElementRange('a', 0) and cast.shape_and_dtype == ((2, 3), torch.bfloat16)
