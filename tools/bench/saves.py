"""Launches the benchmarks of ranks with a partitioned model: ``save``, ``throttled``, ``memory`` and ``stall``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from bench.arguments import add_billions, add_number, add_ranks
from bench.launch import MODELS, run_worker
from bench.ways import FLAT, HSDP, OURS, WRITERS, choose, name_of_ours, ways_to_save
from xhf_hooks.options import parse_size

#: Bytes per second that a rank may write if its connection to a share is the limit.
LIMIT = 300 * 10**6
_BUCKET = '128MB'
#: Consecutive runs; the first in a process creates what stays, such as connections.
_MEMORY_RUNS = 2


def add_save_options(parser: ArgumentParser, billions: float = 0.8, ranks: int = 2) -> None:
    _add_common_options(parser, billions=[billions], ranks=ranks, repeats=5)
    add_number(parser, '--in-a-row', 3, 'consecutive runs per measurement; only the last one counts')
    _add_ways_option(parser)


def add_floors_options(parser: ArgumentParser) -> None:
    add_save_options(parser)
    parser.set_defaults(ways=['floor: ', OURS])


def add_hsdp_options(parser: ArgumentParser) -> None:
    add_save_options(parser, billions=0.2, ranks=4)


def add_throttled_options(parser: ArgumentParser) -> None:
    _add_common_options(parser, billions=[0.8], ranks=[2, 4], repeats=3)
    _add_ways_option(parser)


def add_memory_options(parser: ArgumentParser) -> None:
    _add_common_options(parser, billions=[0.2, 0.8, 1.6], ranks=[2, 4], repeats=1)
    _add_ways_option(parser)


def add_stall_options(parser: ArgumentParser) -> None:
    _add_common_options(parser, billions=[0.8], ranks=2, repeats=5)
    add_number(parser, '--iterations', 4, 'iterations without a save, for comparison')


def _add_common_options(parser: ArgumentParser, billions: list[float], ranks: int | list[int], repeats: int) -> None:
    add_billions(parser, billions, MODELS)
    add_ranks(parser, ranks)
    add_number(parser, '--repeats', repeats, 'measurements per table row')
    parser.add_argument(
        '--bucket-size', default=_BUCKET, metavar='SIZE', help='bucket_size of the saves (default: %(default)s)'
    )


def _add_ways_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        '--ways',
        nargs='+',
        default=[],
        metavar='WORDS',
        help='measure only table rows whose name contains one of these words; default: all',
    )


def measure_save(args: Namespace) -> dict[str, Any]:
    """Saves of a ZeRO-3 model, with every writer and every peer."""
    return _measure_sizes(args, 'save', ways_to_save(WRITERS))


def measure_floors(args: Namespace) -> dict[str, Any]:
    """Saves with every writer, compared with how fast disk and loopback can move as many bytes."""
    return measure_save(args)


def measure_hsdp(args: Namespace) -> dict[str, Any]:
    """Saves of an HSDP model with two replicas, compared with FSDP2 of as many ranks."""
    return _measure_sizes(args, 'hsdp', [f'{OURS}{writer}{kind}' for writer in WRITERS for kind in (FLAT, HSDP)])


def measure_throttled(args: Namespace) -> dict[str, Any]:
    """Saves with every writer and a limited bandwidth from each rank to the disk."""
    ways = choose([f'{OURS}{writer}' for writer in WRITERS], args.ways)
    cases = []
    for size in args.billions:
        for n_ranks in args.ranks:
            job = _job(args, 'throttled', size, ways=ways, limit_nbytes_per_sec=LIMIT)
            cases.append({'ranks': n_ranks, **run_worker(n_ranks, job, args.out)})
    return {'repeats': args.repeats, 'cases': cases}


def measure_memory(args: Namespace) -> dict[str, Any]:
    """Memory and network traffic of every writer."""
    ways = choose([name_of_ours(writer, True) for writer in WRITERS], args.ways)
    cases = []
    for n_ranks in args.ranks:
        for size in args.billions:
            job = _job(args, 'save', size, ways=ways, in_a_row=_MEMORY_RUNS)
            cases.append({'ranks': n_ranks, **run_worker(n_ranks, job, args.out)})
    return {'repeats': args.repeats, 'bucket_nbytes': parse_size(args.bucket_size), 'cases': cases}


def measure_stall(args: Namespace) -> dict[str, Any]:
    """How long a save stops training, and how much it slows training down."""
    jobs = [_job(args, 'stall', size, iterations=args.iterations) for size in args.billions]
    return {**_head(args), 'sizes': [run_worker(args.ranks, job, args.out) for job in jobs]}


def _measure_sizes(args: Namespace, what: str, ways: list[str]) -> dict[str, Any]:
    chosen = choose(ways, args.ways)
    jobs = [_job(args, what, size, ways=chosen, in_a_row=args.in_a_row) for size in args.billions]
    return {**_head(args), 'sizes': [run_worker(args.ranks, job, args.out) for job in jobs]}


def _job(args: Namespace, what: str, billions: float, **more: Any) -> dict[str, Any]:
    common = {'what': what, 'billions': billions, 'repeats': args.repeats}
    return {**common, 'bucket_nbytes': parse_size(args.bucket_size), **more}


def _head(args: Namespace) -> dict[str, Any]:
    return {'ranks': args.ranks, 'repeats': args.repeats}
