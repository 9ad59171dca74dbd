"""Checkpoint folders of a few bytes, planned and written like real ones. No torch."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from xhf_hooks.files.manifest import CommitRecord, describe_folder
from xhf_hooks.files.writer import Writer
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import SavePlan, WrittenSave
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Chunk, ExportEntry, Step, TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy

N_TENSORS, N_ELEMENTS = 3, 5


def tiny_plan() -> SavePlan:
    """A plan of three tensors, each in a separate file."""
    specs = [TensorSpec(f'w{i}', (N_ELEMENTS,), 'U8') for i in range(N_TENSORS)]
    entries = [ExportEntry(spec.name, spec.shape, spec.dtype, (spec.name,)) for spec in specs]
    return make_plan(entries, specs, max_shard_nbytes=N_ELEMENTS, bucket_nbytes=1, strategy=WriteStrategy.GATHER)


def stage(folder: CheckpointFolder, number: int, **facts: Any) -> WrittenSave:
    """Fill the staging folder with a save of iteration ``number``, which is every byte of every tensor."""
    plan = tiny_plan()
    with closing(Writer(pending_nbytes=1).start()) as writer:
        made = writer.create(plan, folder.open_staging())
        writer.open(plan, folder.staging, made)
        for placement in plan.placements:
            writer.write(Chunk(placement, memoryview(bytes([number]) * placement.nbytes)))
        return WrittenSave(plan, writer.finish().written(), iteration(number), facts)


def iteration(number: int) -> Step:
    return Step('iter', number, number)


def commit_one(folder: CheckpointFolder, number: int, **facts: Any) -> None:
    """Make a complete save of iteration ``number``, and wait until what it replaces is deleted."""
    folder.commit(stage(folder, number, **facts))
    folder.siblings.deletion.wait()


def content(path: Path) -> int:
    """The number that a complete folder is filled with.

    Raises:
        AssertionError: The folder is incomplete, or mixes saves.
    """
    plan = tiny_plan()
    numbers = set()
    for placement in plan.placements:
        data = (path / placement.file).read_bytes()
        assert len(data) == next(file.nbytes for file in plan.files if file.name == placement.file)
        numbers |= set(data[placement.offset : placement.offset + placement.nbytes])
    assert len(numbers) == 1, f'{path} holds parts of several saves: {numbers}'
    return numbers.pop()


def visible(parent: Path) -> dict[str, int]:
    """The folders that a user sees (names without a dot), and the number in each."""
    return {path.name: content(path) for path in sorted(parent.iterdir()) if not path.name.startswith('.')}


def put_whole(folder: CheckpointFolder, name: str, number: int) -> Path:
    """Make a complete folder of ours under ``name``, as a killed run may leave it."""
    save = stage(folder, number)
    manifest = describe_folder(folder.staging, save, CommitRecord(save.step, name=folder.name))
    (folder.staging / MANIFEST_NAME).write_bytes(manifest)
    path = folder.path.with_name(name)
    os.rename(folder.staging, path)
    return path


def put_partial(folder: CheckpointFolder, name: str) -> Path:
    """Make what a run leaves if it is killed while writing: an incomplete file and no manifest."""
    path = folder.path.with_name(name)
    path.mkdir()
    (path / 'model-00001-of-00003.safetensors').write_bytes(b'half a')
    return path
