"""Saves by ranks on separate hosts, judged from a host that neither writes nor caches.

Each weight is derived from its name and the number of the save, so the judge knows every byte without asking a rank.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.helpers.assert_intact import MANIFEST, assert_whole, hidden
from tests.helpers.compare import folder_tensors
from tests.helpers.kill_runs import tiny_model
from tests.helpers.moosefs import Host
from tests.helpers.scenarios import Outcome, run_scenarios_on_rank

if TYPE_CHECKING:
    import torch
    from torch import nn

    from xhf_hooks.manager import CheckpointManager

NAME = 'hf_model'
WRITERS = ('positional', 'parallel', 'stream')
#: How to save: a `save_hf` call each time; many saves of one run; the same in the background.
DOORS = ('call', 'run', 'async')
#: Gives at least as many files as ranks: with 'parallel', each file has one writer.
SHARD_NBYTES = 8_000


class Eyes(Protocol):
    """A host, or anything else with its own view of files."""

    def sees(self, path: Path) -> Path:
        """The path by which any process can look at ``path`` with this view."""


@dataclass(frozen=True)
class Seen:
    """What the judge finds after one save.

    Attributes:
        folders: Visible folders, name to iteration.
        damage: What is wrong with them; empty if nothing.
        leftovers: Hidden files and folders, except the lock of a live run.
    """

    number: int
    folders: dict[str, int]
    damage: list[str]
    leftovers: list[str]


@dataclass(frozen=True)
class Way:
    """How to save several times in a row."""

    writer: str
    door: str
    max_keep: int = 1

    def __str__(self) -> str:
        return f'{self.writer}_{self.door}' + (f'_keep_{self.max_keep}' if self.max_keep != 1 else '')


def on_hosts(hosts: Sequence[Host], function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` on the host of this rank, in a process group. Runs on: all ranks, with ``init=None``."""
    hosts[int(os.environ['RANK'])].enter()
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend='gloo')
    return function(*args)


def scenarios_on_hosts(hosts: Sequence[Host], scenarios: Mapping[str, Callable[[], Any]]) -> dict[str, Outcome]:
    """`run_scenarios`, with each rank on its host. Runs on: all ranks, with ``init=None``."""
    return on_hosts(hosts, run_scenarios_on_rank, scenarios)


def weights_of(name: str, shape: Sequence[int], number: int) -> torch.Tensor:
    """The weights of parameter ``name`` at save ``number``: noise that is unique to both."""
    import torch

    seed = zlib.crc32(f'{name} {number}'.encode())
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def set_weights(model: nn.Module, number: int) -> None:
    """Set the weights to those of save ``number``: at ZeRO-3 this rank's part of each, else all."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = getattr(parameter, 'ds_tensor', None)
            if part is None:
                parameter.copy_(weights_of(name, parameter.shape, number))
                continue
            whole = weights_of(name, parameter.ds_shape, number).reshape(-1)
            own = whole[dist.get_rank() * part.numel() :][: part.numel()]
            part[: own.numel()].copy_(own)


def save_in_a_row(way: Way, parent: Path, judge: Eyes, numbers: Sequence[int]) -> list[Seen]:
    """Save once for each of ``numbers``; the judge looks after each save. Runs on: all ranks.

    Returns:
        On rank 0 one for each save and one after the end of the run; empty on other ranks.
    """
    import torch.distributed as dist

    model = tiny_model(zero3=True)
    seen: list[Seen] = []

    def look(number: int) -> None:
        if dist.get_rank() == 0:
            seen.append(judged(judge.sees(parent), number))
        dist.barrier()

    if way.door == 'call':
        for number in numbers:
            set_weights(model, number)
            call_save(model, way, parent, number)
            look(number)
    else:
        saves = run_of(model, way, parent)
        try:
            for number in numbers:
                set_weights(model, number)
                save_in_run(saves, number)
                set_weights(model, -1)  # training goes on
                saves.collect()
                look(number)
        finally:
            saves.close()
    look(numbers[-1])
    return seen


def call_save(model: nn.Module, way: Way, parent: Path, number: int) -> None:
    """`save_hf`. Runs on: all ranks."""
    from xhf_hooks import save_hf

    sizes = dict(bucket_size=20_000, max_shard_size=SHARD_NBYTES)
    save_hf(model, parent / NAME, step=number, writer=way.writer, max_keep_ckpts=way.max_keep, **sizes)


def run_of(model: nn.Module, way: Way, parent: Path) -> CheckpointManager:
    """A run that is ready to save, set up like a hook does. Runs on: all ranks."""
    from xhf_hooks.manager import CheckpointManager
    from xhf_hooks.model import unwrap
    from xhf_hooks.options import RunOptions
    from xhf_hooks.telemetry import RunLog

    parsed = RunOptions(
        max_keep_ckpts=way.max_keep,
        bucket_size=20_000,
        max_shard_size=SHARD_NBYTES,
        writer=way.writer,
        async_save=way.door == 'async',
        on_error='raise',
    )
    log = RunLog.of_this_rank('run', logging.getLogger('tests'))
    saves = CheckpointManager(unwrap(model), parent / NAME, parsed, log)
    try:
        saves.prepare(None, when='now')
    except BaseException:
        saves.close()
        raise
    return saves


def save_in_run(saves: CheckpointManager, number: int) -> None:
    """Make one save of a run; a background save may still be running afterwards. Runs on: all ranks."""
    from xhf_hooks.planning.types import Step

    saves.save(Step('iter', number, number))


def judged(parent: Path, number: int) -> Seen:
    """Compare everything visible in ``parent`` with its manifests and with what was to be saved."""
    folders: dict[str, int] = {}
    damage: list[str] = []
    for path in sorted(parent.iterdir()):
        if path.name.startswith('.'):
            continue
        try:
            folders[path.name] = assert_whole(path)
            damage += [f'{path.name}: {problem}' for problem in _other_bytes(path, number)]
        except Exception as error:  # any error is a finding, since other ranks wait for this one
            damage.append(f'{path.name}: {type(error).__name__}: {str(error)[:300]}')
    if folders.get(NAME) != number:
        damage.append(f'{NAME} is of save {folders.get(NAME)}, not {number}')
    return Seen(number, folders, damage, hidden(parent))


def _other_bytes(folder: Path, number: int) -> Iterator[str]:
    """Differences from the weights of save ``number``, as found by xhf-verify and by comparing bytes."""
    from xhf_hooks.verify.folder import verify_folder

    wanted = number if folder.name == NAME else int(folder.name.rpartition('_')[2])
    step = json.loads((folder / MANIFEST).read_text())['step']['number']
    if step != wanted:
        yield f'the manifest is of save {step}, not {wanted}'
    yield from verify_folder(folder, workers=1).problems()
    tensors = folder_tensors(folder)
    expected = {name: parameter.shape for name, parameter in tiny_model(zero3=False).named_parameters()}
    if set(tensors) != set(expected):
        yield f'tensors {sorted(set(tensors) ^ set(expected))} are missing or too many'
    for name in sorted(set(tensors) & set(expected)):
        found, meant = tensors[name], weights_of(name, expected[name], wanted)
        if found.shape != meant.shape or found.dtype != meant.dtype:
            yield f'{name}: {found.dtype}{list(found.shape)}'
        elif bad := int((found != meant).sum()):
            yield f'{name}: {bad} of {found.numel()} elements are others, {int((found == 0).sum())} are 0'


def wait_for(path: Path, secs: float = 120.0) -> str:
    """Wait for a file on the machine's disk that another process writes with :func:`tell`; returns its text.

    Raises:
        TimeoutError: The file did not appear.
    """
    deadline = time.monotonic() + secs
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f'{path} did not appear in {secs:.0f} s')
        time.sleep(0.02)
    return path.read_text()


def tell(path: Path, text: str = '') -> None:
    """Write a file that :func:`wait_for` waits for."""
    path.with_suffix('.unfinished').write_text(text)
    path.with_suffix('.unfinished').rename(path)
