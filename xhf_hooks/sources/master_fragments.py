"""Finds the fp32 masters of DeepSpeed ZeRO-1 and 2: fragments of flat buffers that are split evenly over the ranks.

A rank knows only its own fragment of each parameter (DeepSpeed ``utils/tensor_fragment.py``,
``get_hp_fragment_mapping``; ``utils/mixed_precision_linkage.py``). Ranks therefore exchange two numbers per tensor,
from which all fragments follow. A list of all fragments would have as many entries as ranks times tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from xhf_hooks.errors import OptionError
from xhf_hooks.planning.spread import Spread, in_rank_order
from xhf_hooks.ranks.collective import Collective

#: A rank and the end of its fragment in one number, so that the smallest one is that of the first rank.
_RANK_FACTOR, _NO_RANK = 2**43, 2**62


def may_have_master(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed's ZeRO-1 or 2 trains this parameter."""
    return hasattr(tensor, '_hp_mapping')


def local_fragment(tensor: torch.Tensor) -> range | None:
    """The elements of a parameter's master that this rank holds; None if all are on other ranks."""
    mapping = getattr(tensor, '_hp_mapping', None)
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    return range(address.start, address.start + address.numel)


def master_of_fragment(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of the master, where :func:`local_fragment` says that there are some."""
    fragment: torch.Tensor = tensor._hp_mapping.get_hp_fragment()
    return fragment.detach().reshape(-1)


def spread_of_fragments(tensors: Mapping[str, torch.Tensor], collective: Collective) -> dict[str, Spread]:
    """Which elements of the masters each rank holds. Runs on: all ranks, with the same names.

    Raises:
        AgreedError: A rank does not know which elements it holds.
    """

    def fragments_of_this_rank() -> tuple[np.ndarray, np.ndarray]:
        ends, lengths = np.full(len(tensors), _NO_RANK), np.zeros(len(tensors), np.int64)
        for number, tensor in enumerate(tensors.values()):
            if (fragment := local_fragment(tensor)) is not None:
                ends[number] = collective.rank * _RANK_FACTOR + fragment.stop
                lengths[number] = len(fragment)
        return ends, lengths

    if not tensors:
        return {}
    firsts, longest = collective.reduce_over_ranks('plan', fragments_of_this_rank, ('MIN', 'MAX'))
    rows = zip(tensors.items(), firsts.tolist(), longest.tolist(), strict=True)
    world_size = collective.world_size
    return {name: _spread(tensor.numel(), first, most, world_size) for (name, tensor), first, most in rows}


def _spread(numel: int, first: int, longest: int, world_size: int) -> Spread:
    """The spread for parts as long as the longest fragment.

    This needs no knowledge of the flat buffer. With three or more fragments, the longest is a whole part; with two, any
    part of at least that length gives the same spread.
    """
    (first_rank, first_end), each = divmod(first, _RANK_FACTOR), max(1, longest)
    return in_rank_order(numel, each, world_size, (first_rank + 1) * each - first_end)


def refuse_unreadable_fp32_masters(engine_or_optimizer: Any) -> None:
    """Raise if DeepSpeed returns the wrong fp32 master weights.

    0.19.6: of other parameters (``_link_all_hp_params``); or, with ZenFlow (``runtime/zenflow/zenflow_utils.py``),
    transposed, and updated some steps later.

    Args:
        engine_or_optimizer: DeepSpeed's engine or optimizer, a wrapper of it, or anything else.

    Raises:
        OptionError: It does so.
    """
    optimizer = getattr(engine_or_optimizer, 'optimizer', None)
    for name, does in (('round_robin_gradients', 'misnames'), ('zenflow', 'transposes and delays')):
        if any(getattr(found, name, False) is True for found in (engine_or_optimizer, optimizer)):
            expected = f"None, or no {name} in DeepSpeed's config, which {does} the fp32 master weights"
            raise OptionError('dtype', expected, 'another one than in training, which is made of them')


def refuse_unnamed_fp32_masters(engine_or_optimizer: Any) -> None:
    """Raise if DeepSpeed keeps fp32 master weights that parameters do not refer to, as stage 0 does in 16 bits.

    ``FP16_UnfusedOptimizer`` and ``FP16_Optimizer`` of ``runtime/fp16``.

    Args:
        engine_or_optimizer: DeepSpeed's engine or optimizer, a wrapper of it, or anything else.

    Raises:
        OptionError: It does so.
    """
    for found in (engine_or_optimizer, getattr(engine_or_optimizer, 'optimizer', None)):
        if any(hasattr(found, name) for name in ('fp32_groups', 'fp32_groups_flat')):
            expected = (
                f"ZeRO stage 1, 2 or 3 for 'float32' (zero_optimization in DeepSpeed's config; at stage 0, "
                f'{type(found).__name__} does not show which parameter each fp32 master weight belongs to)'
            )
            raise OptionError('dtype', expected, 0)
