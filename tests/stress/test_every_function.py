"""Each function that a save calls fails once, on one rank: all ranks raise the same error, and the next save is good."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenarios import check, run_scenarios

WORLD_SIZE = 2
import os

WAYS = (
    os.environ['WAYS'].split()
    if 'WAYS' in os.environ
    else [
        f'{writer}{"_async" * in_background}{"_upload" * uploads}'
        for writer in ('positional', 'parallel', 'stream', 'gather')
        for in_background in (False, True)
        for uploads in (False, True)
    ]
)
#: What is not made to fail, and why: these functions themselves ...
ENTRANCES = {
    'saves.manager.CheckpointManager.save': 'calls what stands in agreed blocks, and nothing before',
    'saves.manager.CheckpointManager.collect': 'raises or reports what all ranks have',
    'saves.save.Saver.outcome': 'raises or returns what all ranks have',
    'saves.save.Save.finish': 'calls what stands in agreed blocks, and nothing before, in a thread of its own',
    'system.threads.Background.run': 'calls Save.finish, and keeps what comes of it',
    'system.threads.Background.wait': 'waits for the background thread alone',
    'system.threads.Background.outcome': 'raises or returns what all ranks have',
}
#: ... and what these call, too. A name stands for all that begin with it.
INSIDE = {
    'collective.': 'how ranks agree: without it they cannot',
    'sources.zero3.Zero3Source.opened': 'DeepSpeed gathers in it (docs/reliability.md)',
    'sources.zero3.Zero3Source.gathered': 'DeepSpeed gathers in it (docs/reliability.md)',
}


#: In each rank: what makes faults, and the chains of calls whose last one has failed already.
_FAULTS, _DONE = None, set()


class Run:
    """Saves of a tiny model at ZeRO-3. Runs on: all ranks."""

    def __init__(self, parent: Path, way: str) -> None:
        import deepspeed
        import torch

        from tests.helpers.zero_config import zero_config
        from tests.helpers.zoo.llamas import odd_llama

        with deepspeed.zero.Init(config_dict_or_path=zero_config(3), dtype=torch.bfloat16):
            self.model = odd_llama(tied=True)
        writer, *more = way.split('_')
        self.parent, self.number = parent, 0
        self.options = dict(writer=writer, async_save='async' in more, bucket_size=10_000, max_shard_size=30_000)
        if 'upload' in more:
            self.options |= dict(upload_to=f'file://{parent}/store', upload_keep=1)
        self.open()

    def open(self) -> None:
        from xhf_hooks.collective import Collective
        from xhf_hooks.options import HookOptions
        from xhf_hooks.saves.manager import CheckpointManager
        from xhf_hooks.saves.telemetry import RunLog
        from xhf_hooks.saves.unwrap import unwrap

        self.lines: list[str] = []
        logger = logging.Logger('run')
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        logger.addHandler(handler)
        self.saves = CheckpointManager(
            unwrap(self.model),
            self.parent / 'hf_model',
            HookOptions(on_error='raise', interval=1, **self.options),
            RunLog(logger, 'run'),
            collective=Collective(timeout_secs=20),
        )
        self.saves.prepare(None, when='always')

    def save(self) -> str:
        """What came of a save; empty when all is well."""
        from tests.helpers.kill_runs import fill
        from xhf_hooks.planning.types import Step

        self.number += 1
        fill(self.model, self.number)
        self.lines.clear()
        try:
            self.saves.save(Step('iter', self.number, self.number))
            self.saves.collect()
        except Exception as error:
            return f'{type(error).__name__}: {error}'
        return ''.join(line for line in self.lines if 'is saved, but' in line)

    def saved(self) -> int:
        return json.loads((self.parent / 'hf_model' / 'xhf_manifest.json').read_text())['iteration']


def fail_everywhere(parent: Path, way: str) -> dict[str, Any]:
    import torch.distributed as dist

    from tests.helpers.faults_everywhere import Faults

    global _FAULTS
    _FAULTS = faults = _FAULTS or Faults()
    rank, group = dist.get_rank(), dist.new_group(backend='gloo')

    def gather(value: Any) -> list[Any]:
        values = [None] * WORLD_SIZE
        dist.all_gather_object(values, value, group=group)
        return values

    parent = parent / way
    if rank == 0:
        parent.mkdir(parents=True)
    gather(0)
    run = Run(parent, way)
    faults.called.clear()
    assert not run.save()
    called = {
        name: chain
        for name, chain in faults.called.items()
        if name not in ENTRANCES and not any(outer.startswith(tuple(INSIDE)) for outer in chain)
    }
    names = [name for name, chain in called.items() if chain not in _DONE]
    _DONE.update(called.values())
    report: dict[str, Any] = dict(n=0, wrong=[])
    began = time.time()
    for failing, name in [(r, n) for r, found in enumerate(gather(names)) for n in found]:
        print(f'{time.time():.1f} {way} {failing} {name}', file=open(f'/tmp/logs/progress{rank}', 'a'), flush=True)
        if rank == failing:
            faults.arm(name)
        started = time.time()
        outcome = run.save()
        took = time.time() - started
        fired = faults.disarm()
        outcomes = gather(outcome)
        told = {outcome for outcome in outcomes}
        is_fine = len(told) == 1 and all(name in o and ('AgreedError' in o or 'is saved, but' in o) for o in outcomes)
        is_fine |= told == {''} and run.saved() == run.number
        gone = any('RankLost' in o or 'Injected' in o for o in outcomes) or len(told) > 1
        if gone:
            run.saves.collective.abandon()
            try:
                run.saves.close()
            except Exception as error:
                print('closing', error)
            gather(0)
            run.open()
        good = run.save()
        found = gather((good, run.saved() == run.number, fired))
        report['n'] += 1
        if not is_fine or any(good or not saved for good, saved, _ in found):
            report['wrong'].append((failing, name, outcomes, found, round(took, 2)))
    report['secs'] = time.time() - began
    run.saves.close()
    return report


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('every')
    return run_scenarios({way: partial(fail_everywhere, folder, way) for way in WAYS}, WORLD_SIZE)


@pytest.mark.parametrize('way', WAYS)
def test_every_function(results, way):
    report = check(results, way)[0]
    print(way, report['n'], report['secs'])
    assert not report['wrong'], '\n'.join(map(str, report['wrong']))
