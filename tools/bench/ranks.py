"""Saves of many small tensors by many processes: the cost of agreement, with almost nothing to write."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from bench.arguments import add_number, add_ranks
from tests.helpers.free_port import free_port

#: Modules that the server imports once for all ranks of all launches.
PRELOADED = ('torch.distributed', 'transformers.models.llama.modeling_llama', 'xhf_hooks.api', 'bench.ranks')
N_LAYERS = 222  # of nine tensors each, plus three tensors


def add_options(parser: ArgumentParser) -> None:
    add_ranks(parser, [2, 4, 8, 16, 32])
    add_number(parser, '--repeats', 5, 'calls after the first one')


def expected_secs(args: Namespace) -> float:
    """Estimated duration on two cores."""
    return 10 + sum(n_ranks * (1.0 + 0.3 * args.repeats) for n_ranks in args.ranks)


def measure(args: Namespace) -> dict[str, Any]:
    """Save with each number of ranks: one call, then ``args.repeats`` more."""
    return {'repeats': args.repeats, 'runs': _measure(args.ranks, args.repeats, args.out)}


def _measure(numbers: list[int], repeats: int, out: Path) -> list[dict[str, Any]]:
    os.environ.update(OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(list(PRELOADED))
    measured = []
    for n_ranks in numbers:
        print(f'{n_ranks} ranks, 1 + {repeats} calls ...', file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=out) as name:
            folder, port = Path(name), free_port()
            launched = [
                context.Process(target=run_rank, args=(rank, n_ranks, port, repeats, folder)) for rank in range(n_ranks)
            ]
            for process in launched:
                process.start()
            for process in launched:
                process.join()
            if any(process.exitcode for process in launched):
                sys.exit(f'{n_ranks} ranks failed: exit statuses {[process.exitcode for process in launched]}')
            measured.append(_summarize([pickle.loads((folder / f'{r}.pickle').read_bytes()) for r in range(n_ranks)]))
    return measured


def run_rank(rank: int, n_ranks: int, port: int, repeats: int, folder: Path) -> None:
    """Run one process: call save_hf repeatedly, and write the cost of each call."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from xhf_hooks import save_hf

    torch.set_num_threads(1)
    store = f'tcp://127.0.0.1:{port}'
    dist.init_process_group('gloo', init_method=store, rank=rank, world_size=n_ranks)
    small = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)  # DDP would make the copies equal
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=N_LAYERS, **small))
    calls = []
    for _ in range(1 + repeats):
        dist.barrier()
        started = time.perf_counter()
        cost = save_hf(model, folder / 'hf_model', writer='positional').cost
        dist.barrier()
        seconds = time.perf_counter() - started
        calls.append({'seconds': seconds, 'told': cost.seconds, 'nbytes': cost.nbytes, **cost.stage_secs})
    content = {'tensors': len(model.state_dict()), 'calls': calls}
    (folder / f'{rank}.pickle').write_bytes(pickle.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


def _summarize(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The first call, and medians of the others; each figure is the largest of all ranks."""
    n_calls = len(of_ranks[0]['calls'])
    keys = of_ranks[0]['calls'][0]
    calls = [{key: max(found['calls'][i][key] for found in of_ranks) for key in keys} for i in range(n_calls)]
    later = {key: statistics.median(call[key] for call in calls[1:]) for key in keys}
    return {'ranks': len(of_ranks), 'tensors': of_ranks[0]['tensors'], 'first': calls[0], 'later': later}
