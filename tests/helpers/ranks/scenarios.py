"""Runs many scenarios in one launch of real processes, each reported as a separate test.

Example:
    @pytest.fixture(scope="module")
    def results():
        return run_scenarios({name: partial(save_family, name) for name in FAMILIES}, 2)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_family(results, name):
        check(results, name)
"""

import gc
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.ranks.launch import run_ranks


class ScenarioFailure(AssertionError):
    """A scenario raised on at least one rank; the message has the tracebacks."""


@dataclass(frozen=True)
class Outcome:
    """What one scenario did on one rank: its value, or its traceback in `error`."""

    value: Any = None
    error: str | None = None


class Results(dict[str, list[Outcome]]):
    """Outcomes by name of the scenario, in rank order.

    Attributes:
        root: Below it, each scenario has saved in the folder of its name.
    """

    root = Path()

    def folder(self, name: str) -> Path:
        """The folder of a scenario, which must have succeeded."""
        check(self, name)
        return self.root / name


def run_scenarios(
    scenarios: Mapping[str, Callable[[], Any]], world_size: int, root: Path = Path(), **options: Any
) -> Results:
    """Runs many scenarios, one after the other, in one launch.

    Call it in a fixture of the module; each parametrized test then `check`s its own scenario.

    Args:
        scenarios: Name to picklable callable without arguments (`functools.partial` helps). An
            exception ends that scenario only. One that hangs ends the launch; the message then
            also has the errors of the scenarios before it.
        world_size: Number of processes.
        root: Where they save, for the results.
        **options: Options of `run_ranks`; `init` must not be None.
    """
    if options.get('init', 'deepspeed') is None:
        raise ValueError("init: scenarios agree through a process group, so it can't be None")
    per_rank = run_ranks(run_scenarios_on_rank, world_size, dict(scenarios), **options)
    results = Results({name: [outcomes[name] for outcomes in per_rank] for name in scenarios})
    results.root = root
    return results


def check(results: Mapping[str, Sequence[Outcome]], name: str) -> list[Any]:
    """Returns the values of scenario `name` in rank order.

    Raises:
        ScenarioFailure: It failed on some rank.
    """
    outcomes = results[name]
    errors = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
    if errors:
        details = '\n'.join(f'--- rank {rank}\n{error}' for rank, error in errors.items())
        raise ScenarioFailure(f'{name} failed on {len(errors)} of {len(outcomes)} ranks\n{details}')
    return [outcome.value for outcome in outcomes]


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What this package raises in a call, as ``Type: message``; empty if nothing. Runs on: all ranks, or one."""
    from xhf_hooks.errors import XhfError

    try:
        function(*args, **options)
    except XhfError as error:
        return f'{type(error).__name__}: {error}'
    return ''


def run_scenarios_of(module: str, root: Path) -> dict[str, Outcome]:
    """One rank's part of ``scenarios(root)`` of a module, which only the ranks import. Runs on: all ranks."""
    return run_scenarios_on_rank(importlib.import_module(module).scenarios(root))


def run_scenarios_on_rank(scenarios: Mapping[str, Callable[[], Any]]) -> dict[str, Outcome]:
    """One rank's part of :func:`run_scenarios`. Runs on: all ranks, in a process group."""
    import torch.distributed as dist

    # A separate group: what a rank that failed early sends here must not be mistaken for its part in the
    # collective in which its peers still are.
    agreement = dist.new_group(backend='gloo')
    outcomes = {}
    for name, scenario in scenarios.items():
        print(f'scenario {name}', file=sys.stderr, flush=True)
        try:
            outcomes[name] = Outcome(value=scenario())
        except Exception:
            outcomes[name] = Outcome(error=traceback.format_exc())
        gc.collect()
        gc.freeze()  # as at the start of the rank: DeepSpeed collects garbage several times for each engine
        # All ranks start the next scenario together, and rank 0 prints every failure, which matters if a
        # later scenario hangs and no result comes back.
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, outcomes[name].error, group=agreement)
        if dist.get_rank() == 0:
            for rank, error in enumerate(errors):
                if error:
                    print(f'{name} failed on rank {rank}:\n{error}', file=sys.stderr, flush=True)
    return outcomes
