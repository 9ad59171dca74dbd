"""Measures the planner alone, with the shapes of models that are too large for this machine."""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.arguments import add_ranks
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import ExportEntry, Group, Spread, TensorSpec
from xhf_hooks.sources.gather import BUCKETS_PER_AGREEMENT
from xhf_hooks.sources.send import ROUNDS_PER_AGREEMENT

_PART_NBYTES = 8 * 2**20  # written at once by xhf_hooks/sources/local_shards.py, for 2-byte elements

Shape = tuple[int, ...]
#: A tensor of the model, and the tensors that it is split into, in order; empty if it is exported unchanged.
Shapes = Iterator[tuple[str, Shape, list[tuple[str, Shape]]]]


def llama_405b() -> Shapes:
    """meta-llama/Llama-3.1-405B: 126 layers, hidden 16384, 128 heads, 8 key-value heads, FFN 53248."""
    hidden, ffn, kv, vocab = 16384, 53248, 1024, 128256
    yield 'model.embed_tokens.weight', (vocab, hidden), []
    for i in range(126):
        layer = f'model.layers.{i}'
        for name, rows, columns in (('q', hidden, hidden), ('k', kv, hidden), ('v', kv, hidden), ('o', hidden, hidden)):
            yield f'{layer}.self_attn.{name}_proj.weight', (rows, columns), []
        yield f'{layer}.mlp.gate_proj.weight', (ffn, hidden), []
        yield f'{layer}.mlp.up_proj.weight', (ffn, hidden), []
        yield f'{layer}.mlp.down_proj.weight', (hidden, ffn), []
        yield f'{layer}.input_layernorm.weight', (hidden,), []
        yield f'{layer}.post_attention_layernorm.weight', (hidden,), []
    yield 'model.norm.weight', (hidden,), []
    yield 'lm_head.weight', (vocab, hidden), []


def deepseek_v3() -> Shapes:
    """deepseek-ai/DeepSeek-V3 in bf16: 61 layers, 58 of them with 256 fused experts and a shared one; MLA."""
    hidden, ffn, expert, vocab, heads = 7168, 18432, 2048, 129280, 128
    yield 'model.embed_tokens.weight', (vocab, hidden), []
    for i in range(61):
        layer = f'model.layers.{i}'
        yield f'{layer}.self_attn.q_a_proj.weight', (1536, hidden), []
        yield f'{layer}.self_attn.q_a_layernorm.weight', (1536,), []
        yield f'{layer}.self_attn.q_b_proj.weight', (heads * 192, 1536), []
        yield f'{layer}.self_attn.kv_a_proj_with_mqa.weight', (576, hidden), []
        yield f'{layer}.self_attn.kv_a_layernorm.weight', (512,), []
        yield f'{layer}.self_attn.kv_b_proj.weight', (heads * 256, 512), []
        yield f'{layer}.self_attn.o_proj.weight', (hidden, heads * 128), []
        yield f'{layer}.input_layernorm.weight', (hidden,), []
        yield f'{layer}.post_attention_layernorm.weight', (hidden,), []
        block, width = f'{layer}.mlp', ffn
        if i >= 3:
            yield f'{layer}.mlp.gate.weight', (256, hidden), []
            yield f'{layer}.mlp.gate.e_score_correction_bias', (256,), []
            experts = [f'{layer}.mlp.experts.{j}' for j in range(256)]
            parts = [(f'{one}.{part}_proj.weight', (expert, hidden)) for one in experts for part in ('gate', 'up')]
            yield f'{layer}.mlp.experts.gate_up_proj', (256, 2 * expert, hidden), parts
            parts = [(f'{one}.down_proj.weight', (hidden, expert)) for one in experts]
            yield f'{layer}.mlp.experts.down_proj', (256, hidden, expert), parts
            block, width = f'{layer}.mlp.shared_experts', expert
        yield f'{block}.gate_proj.weight', (width, hidden), []
        yield f'{block}.up_proj.weight', (width, hidden), []
        yield f'{block}.down_proj.weight', (hidden, width), []
    yield 'model.norm.weight', (hidden,), []
    yield 'lm_head.weight', (vocab, hidden), []


def deepseek_v3_unfused() -> Shapes:
    """The same with each expert's matrices as separate tensors, as in its published code."""
    for name, shape, parts in deepseek_v3():
        yield from ((part, part_shape, []) for part, part_shape in parts or [(name, shape)])


MODELS: dict[str, Callable[[], Shapes]] = {
    'Llama-3.1-405B': llama_405b,
    'DeepSeek-V3': deepseek_v3,
    'DeepSeek-V3, unfused': deepseek_v3_unfused,
}


def add_options(parser: ArgumentParser) -> None:
    add_ranks(parser, 1024, 'number of ranks to plan for')


def expected_secs(args: Namespace) -> float:
    """Estimated duration."""
    return 25.0


def measure(args: Namespace) -> dict[str, Any]:
    """Plan each model as one of the given number of ranks does."""
    return {'ranks': args.ranks, 'plans': [_measure(name, shapes, args.ranks) for name, shapes in MODELS.items()]}


def _measure(name: str, shapes: Callable[[], Shapes], n_ranks: int) -> dict[str, Any]:
    specs, entries = [], []
    for read, shape, parts in shapes():
        specs.append(TensorSpec(read, shape, 'BF16'))
        if not parts:
            entries.append(ExportEntry(read, shape, 'BF16', (read,)))
        unfuse, first = partial(_unfuse, read), 0
        for part, part_shape in parts:
            entries.append(ExportEntry(part, part_shape, 'BF16', (read,), unfuse, source_offset=first))
            first += math.prod(part_shape)
    spread = {spec.name: Spread(numel := math.prod(spec.shape), -(-numel // n_ranks)) for spec in specs}
    # As in save.py, with a bucket_size of 128 MB
    how = dict(max_shard_nbytes=5 * 10**9, bucket_nbytes=64 * 10**6, round_nbytes=32 * 10**6, n_writers=n_ranks)
    make = partial(make_plan, entries, specs, spread=spread, **how)
    plan = make(sliced=spread, share_files=True)
    seconds = _median_secs(lambda: make(sliced=spread, share_files=True))
    memory = _peak_nbytes(lambda: make(sliced=spread, share_files=True))
    writes = _writes_of_rank(1, plan.sliced, n_ranks)
    # Only sending and gathering need agreement, as in 'parallel'
    sending = make()
    n_rounds, n_buckets = len(sending.rounds), len(sending.buckets)
    n_agreements = sum(
        -(-many // per_agreement) + 1
        for many, per_agreement in ((n_rounds, ROUNDS_PER_AGREEMENT), (n_buckets, BUCKETS_PER_AGREEMENT))
        if many
    )
    return {
        'model': name,
        'parameters': sum(math.prod(spec.shape) for spec in specs),
        'nbytes': plan.nbytes,
        'tensors': len(entries),
        'files': len(plan.files),
        'seconds': seconds,
        'memory_mb': memory / 1e6,
        'writes_per_rank': len(writes),
        'opens_per_rank': len({file for file, _ in writes}),
        'median_write_nbytes': statistics.median(nbytes for _, nbytes in writes),
        'nbytes_per_rank': sum(nbytes for _, nbytes in writes),
        'writers': len({place.owner for place in sending.placements}),
        'rounds': n_rounds,
        'buckets': n_buckets,
        'agreements': n_agreements,
        # A wait goes up a binomial tree of ranks, an agreement up and down
        'steps': (n_rounds + n_buckets + n_agreements) * math.ceil(math.log2(n_ranks)),
    }


def _median_secs(work: Callable[[], object]) -> float:
    """Median of three runs."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _peak_nbytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _unfuse(name: str, tensors: Any) -> Any:
    raise NotImplementedError(f'{name}: nothing is gathered here')


def _writes_of_rank(rank: int, groups: Sequence[Group], n_ranks: int) -> list[tuple[str, int]]:
    """File and bytes of each write, split like ZeRO-3's parameters: ceil(numel / ranks) elements each."""
    writes = []
    for group in groups:
        numel = math.prod(group.reads[0].shape)
        each = -(-numel // n_ranks)
        start, end = rank * each, min((rank + 1) * each, numel)
        for placement in group.placements:
            width = DTYPE_NBYTES[placement.dtype]
            first = max(start, placement.source_offset)
            own = (min(end, placement.source_offset + math.prod(placement.shape)) - first) * width
            writes += [(placement.file, min(_PART_NBYTES, own - done)) for done in range(0, own, _PART_NBYTES)]
    return writes
