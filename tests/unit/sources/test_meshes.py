"""Which elements each of eight ranks holds, compared with what torch says, in one process."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed.fsdp
from torch import distributed as dist

from tests.helpers.models.zoo.llamas import llama
from tests.helpers.runs.fsdp_runs import split_layers
from xhf_hooks.planning.spread import mesh_strides, spread_over
from xhf_hooks.sources.fsdp import Fsdp2Source

pytestmark = pytest.mark.skipif(not hasattr(torch.distributed.fsdp, 'fully_shard'), reason='this torch has no FSDP2')

WORLD_SIZE = 8
#: Sizes of the mesh: replicas, shards and tensor parallelism.
MESHES = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 2, 1), (1, 4, 2), (1, 2, 4), (2, 2, 2)]


@pytest.fixture
def first_of_eight_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group('fake', rank=0, world_size=WORLD_SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_each_rank_holds_what_torch_says(first_of_eight_ranks, sizes):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = init_device_mesh('cpu', sizes, mesh_dim_names=('replicas', 'shards', 'tp'))
    model = llama(hidden_size=40, intermediate_size=72, num_attention_heads=4, num_key_value_heads=4)
    if sizes[2] > 1:
        split_layers(model, mesh['tp'])
    fully_shard(model, mesh=mesh['replicas', 'shards'] if sizes[0] > 1 else mesh['shards'])
    source = Fsdp2Source.of(model)
    spreads = source.spread(source.specs(), Mock())
    columns = {n for n, _ in model.named_parameters() if sizes[2] > 1 and ('o_proj' in n or 'down_proj' in n)}
    assert spreads.keys() == {name for name, _ in model.named_parameters()} - columns
    for name, tensor in model.named_parameters():
        if name in columns:
            continue
        shares, row_numel = [], math.prod(tensor.shape[1:])
        for rank in range(WORLD_SIZE):
            places = dict(zip(mesh.mesh_dim_names, np.unravel_index(rank, sizes), strict=True))
            place = [int(places[dim]) for dim in tensor.device_mesh.mesh_dim_names]
            split = tensor.shape, tensor.device_mesh.shape, place, tensor.placements
            shape, offset = _compute_local_shape_and_global_offset(*split)
            held, share = spreads[name].held_by(rank, with_replicas=True), spreads[name].held_by(rank)
            assert len(held) == math.prod(shape), name
            assert not held or held.start == offset[0] * row_numel, name
            assert not share or (held.start <= share.start and share.stop <= held.stop), name
            assert rank in spreads[name].holders
            shares += share
        assert sorted(shares) == [*range(tensor.numel())], name


def test_meshes_in_another_order():
    one_dim = {(0, 1, 2, 3): (1,), (4, 5): (1,), (1, 3): (2,), (0, 4): (4,)}
    two_dims = {((0, 2), (4, 6)): (4, 2), ((0, 4), (1, 5)): (1, 4)}
    for ranks, strides in (one_dim | two_dims).items():
        assert mesh_strides(np.array(ranks)) == strides, ranks
    for ranks in ((1, 0), (0, 1, 5), (1, 2), (0, 1, 3, 2), ((0, 1), (3, 2))):
        assert mesh_strides(np.array(ranks)) is None, ranks


@pytest.mark.parametrize(('stride', 'size'), [(1, 8), (1, 4), (2, 2), (4, 2), (2, 4), (1, 1)])
def test_every_element_of_a_flat_buffer_is_saved_once(stride, size):
    """As with FSDP1's HYBRID_SHARD: tensors of 5 elements in a row, in a buffer that is padded."""
    each = -(-23 // size)
    for skipped in (0, 5, 10, 15):
        spread = spread_over(5, [(stride, size, each)], WORLD_SIZE, skipped)
        assert sorted(at for rank in range(WORLD_SIZE) for at in spread.held_by(rank)) == [*range(5)], skipped
        assert (len(spread.replicated) > 0) == (size < WORLD_SIZE)
    assert spread_over(5, [(3, 2, each)], WORLD_SIZE) is None
