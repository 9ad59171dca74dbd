"""Each function that a save calls fails once, on one rank: all ranks get the same error, and the next save is good.

A function that is called in the same way in several kinds of saves fails in the first of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import os
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.tiny_checkpoint import iteration
from tests.helpers.runs.zero_config import zero_config

WORLD_SIZE = 2
WAYS = [
    f'{writer}{"_async" * in_background}{"_upload" * uploads}'
    for writer in ('positional', 'parallel', 'stream', 'gather')
    for in_background in (False, True)
    for uploads in (False, True)
]
#: What is not made to fail, and why: these functions themselves ...
ENTRANCES = {
    'runs.run.Run.save': 'calls what stands in agreed blocks, and nothing before',
    'runs.run.Run.wait_for_background_save': 'raises or reports what all ranks have',
    'runs.run.Run._log_outcome': 'tells what all ranks have; what it calls may fail',
    'runs.run.Run._call_frontend': 'tells what all ranks have; what it calls may fail',
    'runs.telemetry.RunLog.logging_errors_of_callbacks': 'catches what fails then',
    'runs.save.Save.write_and_commit': 'calls what stands in agreed blocks, and nothing before',
    'runs.ends.background_task.BackgroundTask.add': 'hands what all ranks have begun to the thread that saves',
    'runs.ends.background_task.BackgroundTask._run': 'runs in the thread that saves',
    'runs.save_in_flight.SaveInFlight.save': 'makes the save, and keeps what comes of it',
}
#: ... and what these call, too. A name stands for all that begin with it.
INSIDE = {
    'system.threads.wait_until': 'waits for the background thread alone',
    'ranks.collective.': 'how ranks agree: without it they cannot',
    'sources.zero3.Zero3Source.opened': 'DeepSpeed gathers in it (docs/reliability.md)',
    'sources.zero3.Zero3Source.gathered': 'DeepSpeed gathers in it (docs/reliability.md)',
}
#: Within these, ranks call a function of the save.
CALL_BACK = tuple(
    f'ranks.collective.Collective.{name}' for name in ('from_rank0', 'from_all_ranks', 'reduce_over_ranks')
)
#: After the commit: the save is good, and a rank alone could not tell all of it.
NOT_REPORTED = 'is saved, but a callback failed'
#: After the commit, on all ranks.
NOT_BEGUN = 'is saved, but its upload and on_saved were not begun: '


#: Uploads and commands of on_saved, in threads of their own, are not part of a save.
THREADS = ('MainThread', 'xhf-a-save-in-the-background', 'xhf-writer')
#: Need what may not be installed, and are no part of a save.
LEFT_OUT = ('xhf_hooks.offline.commands', 'xhf_hooks.integrations.axolotl')


class InjectedError(OSError):
    """What an armed function raises."""


@functools.cache
def faults_of_this_process() -> Faults:
    return Faults()


class Faults:
    """Wraps every function and method of the package in this process, before it is used."""

    def __init__(self) -> None:
        self._called: dict[str, tuple[str, ...]] = {}
        self._chains_that_failed: set[tuple[str, ...]] = set()
        self._armed: str | None = None
        self._within = threading.local()
        package = importlib.import_module('xhf_hooks')
        self._folder = str(Path(package.__file__).parent)
        for _, name, _ in pkgutil.walk_packages(package.__path__, 'xhf_hooks.'):
            if not name.startswith(LEFT_OUT):
                importlib.import_module(name)
        modules = [module for name, module in sys.modules.items() if name.startswith('xhf_hooks.')]
        wrapped = {function: self._wrap(function) for module in modules for function in self._functions_of(module)}
        for module in modules:
            for name, value in [*vars(module).items()]:
                if isinstance(value, FunctionType) and value in wrapped:
                    setattr(module, name, wrapped[value])
            for found in self._classes_of(module):
                self._wrap_methods(found)

    def called_by(self, function: Callable[[], object]) -> dict[str, tuple[str, ...]]:
        """Which functions are called meanwhile, and the chain of calls that first led to each, with itself."""
        self._called = {}
        function()
        return dict(self._called)

    def new(self, names: Iterable[str]) -> list[str]:
        """Those of the names that were called by a chain that this has not been asked for before."""
        chains = {name: self._called[name] for name in names}
        found = [name for name, chain in chains.items() if chain not in self._chains_that_failed]
        self._chains_that_failed.update(chains.values())
        return found

    @contextmanager
    def armed(self, name: str | None) -> Iterator[None]:
        """Inside, the first call of the function fails."""
        self._armed = name
        try:
            yield
        finally:
            self._armed = None

    def _happens(self, name: str) -> None:
        if threading.current_thread().name not in THREADS:
            return
        self._called.setdefault(name, self._within.names)
        if name == self._armed:
            self._armed = None
            raise InjectedError(f'injected into {name}')

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = f'{function.__module__.removeprefix("xhf_hooks.")}.{function.__qualname__}'

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            before = getattr(self._within, 'names', ())
            self._within.names = (*before, name)
            try:
                self._happens(name)
                return function(*args, **options)
            finally:
                self._within.names = before

        return call

    def _is_ours(self, function: object) -> bool:
        code = getattr(inspect.unwrap(function), '__code__', None)  # what contextmanager makes wraps one of ours
        return isinstance(function, FunctionType) and code.co_filename.startswith(self._folder)

    def _functions_of(self, module: ModuleType) -> Iterator[Callable[..., Any]]:
        yield from (v for v in vars(module).values() if self._is_ours(v) and v.__module__ == module.__name__)

    def _classes_of(self, module: ModuleType) -> Iterator[type]:
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and not issubclass(value, BaseException):
                yield value

    def _wrap_methods(self, found: type) -> None:
        for name, value in [*vars(found).items()]:
            if isinstance(value, property) and self._is_ours(value.fget):
                setattr(found, name, property(self._wrap(value.fget), value.fset, value.fdel, value.__doc__))
            elif isinstance(value, (classmethod, staticmethod)) and self._is_ours(value.__func__):
                setattr(found, name, type(value)(self._wrap(value.__func__)))
            elif self._is_ours(value):
                setattr(found, name, self._wrap(value))


class Run:
    """Saves of a tiny model at ZeRO-3. Runs on: all ranks."""

    def __init__(self, parent: Path, way: str) -> None:
        from tests.helpers.runs.engines import open_run
        from xhf_hooks.ranks.collective import Collective
        from xhf_hooks.runs.ends.upload import Uploads

        Uploads.patience_secs = 1.0  # with a rank whose upload was not begun
        self.faults, self.rank, self._group = faults_of_this_process(), dist.get_rank(), dist.new_group(backend='gloo')
        with deepspeed.zero.Init(config_dict_or_path=zero_config(3), dtype=torch.bfloat16):
            self.model = odd_llama(tied=True)
        writer, *more = way.split('_')
        options = dict(writer=writer, async_save='async' in more, bucket_size=10_000, max_shard_size=30_000)
        if 'upload' in more:
            options |= dict(upload_to=f'file://{parent}/store', upload_keep=1)
        self.folder, self.number, self.lines = parent / 'hf_model', 0, list[str]()
        logger, handler = logging.Logger('run'), logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        logger.addHandler(handler)
        options |= dict(on_error='raise', collective=Collective.connect(timeout_secs=60))
        self.saves = open_run(self.model, self.folder, logger, **options)

    def save(self) -> str:
        """What came of a save; empty when all is well."""
        from tests.helpers.faults.numbered import fill

        self.number += 1
        fill(self.model, self.number)
        self.lines.clear()
        try:
            self.saves.save(iteration(self.number))
            self.saves.wait_for_background_save()
        except Exception as error:
            return f'{type(error).__name__}: {error}'
        return ''.join(line for line in self.lines if 'is saved, but' in line)

    def end(self) -> None:
        self.saves.finish(iteration(self.number))  # uploads need all ranks
        self.saves.close()

    def is_committed(self) -> bool:
        """Whether the newest save is the last one."""
        return json.loads((self.folder / 'xhf_manifest.json').read_text())['iteration'] == self.number

    def gather(self, value: Any) -> list[Any]:
        values = [None] * WORLD_SIZE
        dist.all_gather_object(values, value, group=self._group)
        return values

    def called(self) -> Iterator[tuple[int, str]]:
        """The functions that a save calls on each rank, but for those that have failed when called by the same."""
        chains = self.faults.called_by(self.save)
        names = [
            name
            for name, chain in chains.items()
            if name not in ENTRANCES
            and not any(outer.startswith(tuple(INSIDE)) for outer in chain if outer not in CALL_BACK)
        ]
        for rank, found in enumerate(self.gather(self.faults.new(names))):
            for name in found:
                yield rank, name


def fail_everywhere(parent: Path, way: str) -> tuple[int, list[str]]:
    """Returns how many functions have failed, and what was wrong then. Runs on: all ranks."""
    run = Run(parent / way, way)
    wrong, n_failed = [], 0
    for failing, name in run.called():
        n_failed += 1
        with run.faults.armed(name if run.rank == failing else None):
            outcomes = run.gather(run.save())
        committed = run.gather(run.is_committed())
        is_same_error = len({*outcomes}) == 1 and 'AgreedError: ' in outcomes[0] and name in outcomes[0]
        is_good = all(committed) and all(not outcome or NOT_REPORTED in outcome for outcome in outcomes)
        is_good |= all(committed) and len({*outcomes}) == 1 and NOT_BEGUN in outcomes[0]
        following = run.gather((run.save(), run.is_committed()))
        if not (is_same_error or is_good) or {*following} != {('', True)}:
            wrong.append(f'{name} on rank {failing}: {outcomes}; the next save: {following}')
        if len({outcome.partition(':')[0] for outcome in outcomes}) > 1 and not is_good:
            break  # ranks are apart
    run.end()
    return n_failed, wrong


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    in_memory = Path('/dev/shm')  # where a flush takes no time: there are thousands
    parent = in_memory if os.access(in_memory, os.W_OK) else tmp_path_factory.mktemp('every')
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        return run_scenarios({way: partial(fail_everywhere, Path(folder), way) for way in WAYS}, WORLD_SIZE)


@pytest.mark.parametrize('name', [*ENTRANCES, *INSIDE, *CALL_BACK])
def test_what_is_left_out_is_there(name):
    """A name that is gone would stand for nothing, and what took its place would not be left out, or be called back."""
    assert pkgutil.resolve_name(f'xhf_hooks.{name.rstrip(".")}')


@pytest.mark.parametrize('way', WAYS)
def test_each_function_may_fail(results, way):
    n_failed, wrong = check(results, way)[0]
    assert not wrong, '\n'.join(wrong)
    assert n_failed > 250 or way != WAYS[0], 'the faults are not where the save is'
