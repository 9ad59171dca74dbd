"""Host memory: a buffer comes back when nobody refers to it any more; devices that were copied from are waited for."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.runs.engines import Saver, save_folder
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Group, Placement, TensorSpec
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.preflight import reserve_snapshot
from xhf_hooks.sources import WholeTensorsSource
from xhf_hooks.sources.host_memory import BufferPool, SnapshotMemory, host_memory
from xhf_hooks.sources.read import made_from

NBYTES = 1000


def address(buffer) -> int:
    return buffer.__array_interface__['data'][0]


@pytest.mark.parametrize('view', [lambda b: b[3:5].data, lambda b: b.data[3:5], lambda b: torch.from_numpy(b)[3:5]])
def test_not_while_a_part_of_it_is_in_use(view):
    pool = BufferPool(NBYTES, 1)
    buffer = pool.take()
    where, part = address(buffer), view(buffer)
    del buffer
    second = pool.take()
    assert address(second) != where
    del part
    assert address(pool.take()) == where


class OnFirst(torch.Tensor):
    """A tensor on the CPU that says to be on another device, for want of one."""

    device = property(lambda self: torch.device('cuda', 0))

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class OnSecond(torch.Tensor):
    """Another."""

    device = property(lambda self: torch.device('cuda', 1))


@pytest.fixture
def waited_for():
    """Gives the devices, and forgets them. There seems to be a GPU."""
    with mock.patch('torch.cuda.synchronize') as synchronize, mock.patch('torch.cuda.is_available', return_value=True):

        def devices() -> list[str]:
            found = sorted(str(device) for call in synchronize.call_args_list for device in call.args)
            synchronize.reset_mock()
            return found

        yield devices


def test_the_devices_of_the_model_and_no_other(waited_for):
    """Streams of the user may still write to the weights."""
    model = nn.Linear(2, 3)
    WholeTensorsSource(model).synchronize()
    assert waited_for() == []
    model.weight = nn.Parameter(model.weight.data.as_subclass(OnSecond))
    WholeTensorsSource(model).synchronize()
    assert waited_for() == ['cuda:1']


def test_every_device_that_was_copied_from(waited_for):
    """A model on the CPU of a machine with a GPU is copied, too: pinned memory may fail there."""
    memory, ones = SnapshotMemory(), torch.ones(3)
    first, second = ones.as_subclass(OnFirst), ones.as_subclass(OnSecond)
    for tensors, devices in (([ones], []), ([first, ones, second], ['cuda:0', 'cuda:1']), ([second], ['cuda:1'])):
        for tensor in tensors:
            assert torch.equal(memory.hold(tensor, 0), ones.view(torch.uint8))
        memory.synchronize()
        assert waited_for() == devices
        memory.clear()


def test_memory_that_cannot_be_pinned_is_told():
    with mock.patch('torch.empty', side_effect=RuntimeError('injected')), pytest.warns(match='pinned, .* injected'):
        assert host_memory(10, pinned=True).numel() == 10


def test_what_is_computed_is_computed_on_the_host():
    """Merged adapters, for example: the hook's bytes are those of a conversion, which has no GPU."""

    def double(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {'doubled': tensors['weight'] + tensors['weight']}

    place = Placement('doubled', (3,), 'F32', 'model.safetensors', 0, 12)
    group = Group((TensorSpec('weight', (3,), 'F32'),), (place,), double)
    ((_, made),) = made_from(group, {'weight': torch.ones(3).as_subclass(OnFirst)}, 0)
    assert made.device.type == 'cpu' and made.tolist() == [2] * 3


@pytest.mark.parametrize('in_background', [False, True])
@pytest.mark.parametrize('writer', ['stream', 'parallel', 'gather'])
def test_one_process_saves(tmp_path, writer, in_background):
    model = odd_llama(bf16=True)
    model.save_pretrained(tmp_path / 'expected')
    plan, committed = save_folder(
        model, tmp_path / 'hf_model', writer=writer, in_background=in_background, bucket_size=4000
    )
    assert bool(plan.rounds) == (writer != 'gather') and bool(plan.buckets) == (writer == 'gather')
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)


def test_memory_of_background_saves_is_given_back_at_close(tmp_path):
    """Not when the run is forgotten, which may be at the end of the process."""
    saver = Saver(odd_llama(), Collective.connect(), in_background=True)
    folder = CheckpointFolder(tmp_path / 'hf_model', 1)
    saver.start(folder, iteration(1)).result()
    blocks = [*saver.context.memory._blocks]
    assert blocks and reserve_snapshot(saver.context) > 0
    alive = [weakref.ref(block) for block in blocks]
    del blocks
    saver.close()
    gc.collect()
    assert [block() for block in alive] == [None] * len(alive)
