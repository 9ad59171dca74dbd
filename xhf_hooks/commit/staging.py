"""The way from a staging folder to its final name, and the clearing of what a killed run left.

Only rank 0 runs anything here. At every instant the final name holds the old or the new checkpoint,
whole: on Linux the two folders are exchanged in one call; elsewhere the old one is first put aside
under a name from which :meth:`CheckpointFolder.recover` brings it back.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

from xhf_hooks.commit import retention
from xhf_hooks.commit.contents import assemble
from xhf_hooks.commit.exchange import exchange
from xhf_hooks.commit.lock import RunLock
from xhf_hooks.commit.manifest import describe_folder, read_step, write_manifest
from xhf_hooks.errors import TargetError
from xhf_hooks.records import SavePlan, Step, WriteReceipt, WrittenTensor
from xhf_hooks.safetensors_format import check_file
from xhf_hooks.verify.against_manifest import check_folder
from xhf_hooks.verify.threads import WorkerThreads

VERIFY_LEVELS = ('off', 'sizes', 'full')

#: Bytes beside the final name: ``.hf_model.discarded-12``, ``hf_model_iter_500000``.
_MOST_ADDED_TO_NAME = 24
#: And behind it: ``/adapter/model-00001-of-00002.safetensors``, and room for files of remote code.
_MOST_ADDED_TO_PATH = 128


class CheckpointFolder:
    """One final name, such as ``hf_model``, and all that stands beside it on its behalf.

    Args:
        final: The name under which the newest committed save is found.
        max_keep: How many saves are kept, the newest included; -1 keeps all.
        fsync: Flush to the disk before the commit. Only a benchmark turns it off.
    """

    def __init__(self, final: Path, max_keep: int, fsync: bool = True) -> None:
        self.final = final
        self.fsync = fsync
        self.max_keep = max_keep
        self.staging = final.with_name(f'.{final.name}.staging')
        self._aside = final.with_name(f'.{final.name}.previous')
        self._discarded = f'.{final.name}.discarded'  # with a number behind it where that is taken
        self._lock = RunLock(final)

    def claim(self) -> None:
        """Before training: make the parent, prove that it can be written, lock, recover, sweep.

        Raises:
            TargetError: Not writable, a name too long, in use by another run, or holding something that is not ours.
        """
        parent = self.final.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._refuse_long_names()
            self._lock.acquire_or_explain(self.final)
            probe = parent / f'.{self.final.name}.probe'
            probe.write_bytes(b'x')
            probe.unlink()
        except OSError as error:
            self.release()
            raise TargetError(f'{parent} cannot be written: {error}; set out_dir to a folder that can') from error
        try:
            self._refuse_foreign()
            self.recover()
        except (TargetError, OSError):
            self.release()
            raise

    def _refuse_long_names(self) -> None:
        parent, name = self.final.parent, self.final.name
        name_room = os.pathconf(parent, 'PC_NAME_MAX') - _MOST_ADDED_TO_NAME - len(os.fsencode(name))
        path_room = os.pathconf(parent, 'PC_PATH_MAX') - _MOST_ADDED_TO_PATH - len(os.fsencode(self.final))
        excess = -min(name_room, path_room)
        if excess > 0:
            raise TargetError(
                f'{self.final}: {excess} bytes too long for the names that a save adds to it: '
                f'set out_dir to a shorter one'
            )

    def _refuse_foreign(self) -> None:
        final = self.final
        if final.is_symlink() or (final.exists() and not final.is_dir()):
            raise TargetError(f'{final} is not a folder; a save would have to replace it. Remove it or set out_dir')
        if final.is_dir() and any(final.iterdir()) and read_step(final) is None:
            raise TargetError(
                f'{final} holds files that this package did not write, and a save would replace them. '
                f'Move them away or set out_dir'
            )

    def recover(self) -> None:
        """Put right what a killed run left: bring a whole folder to its name, delete a partial one."""
        for leftover in (self._aside, self.staging):
            if leftover.is_dir():
                self._recover(leftover)
        self._delete_discarded()
        _fsync_folder(self.final.parent)
        self._delete_outdated()

    def recover_if_dead(self) -> bool:
        """:meth:`recover`, unless a run that is alive holds the lock."""
        if not self._lock.acquire():
            return False
        self.recover()
        self.release()
        return True

    def _recover(self, leftover: Path) -> None:
        step, current = read_step(leftover), read_step(self.final)
        if step is None:  # partial: the manifest is written last
            self._discard(leftover)
        elif not self.final.exists():
            os.rename(leftover, self.final)
        elif current is not None and step.iteration > current.iteration:
            self._tidy(self._replace_final(leftover), current, step)
        else:
            self._tidy(leftover, step, current)

    def open_staging(self) -> Path:
        """An empty staging folder."""
        if self.staging.exists():
            self._recover(self.staging)
        self.staging.mkdir(parents=True)
        return self.staging

    def free_nbytes(self) -> int:
        """Free bytes where the folder goes."""
        return shutil.disk_usage(self.final.parent).free

    def require_room(self, nbytes: int) -> int:
        """Free bytes where the folder goes.

        Raises:
            TargetError: Fewer than ``nbytes``.
        """
        free = self.free_nbytes()
        if free < nbytes:
            raise TargetError(
                f'{self.final.parent} has {free / 1e9:.2f} GB free, and the save needs {nbytes / 1e9:.2f} GB; '
                f'free some space, set out_dir to a larger disk, or keep fewer with max_keep_ckpts'
            )
        return free

    def commit(
        self,
        plan: SavePlan,
        receipts: list[WriteReceipt],
        step: Step,
        facts: dict[str, Any],
        verify: str = 'sizes',
        threads: WorkerThreads | None = None,
    ) -> list[WrittenTensor]:
        """Check that staging is complete, flush it, and give it the final name; then, and only then, delete.

        Args:
            verify: One of :data:`VERIFY_LEVELS`: 'sizes' looks at sizes and headers, 'full' also reads all bytes
                back, from the disk, and compares them with the checksums taken from memory.
            threads: They read; None starts some.

        Returns:
            What was written.

        Raises:
            IncompleteError: Something planned is not there.
            OSError: The file system refused; the previous checkpoint is still under the final name.
        """
        for name, index in plan.indexes.items():
            with (self.staging / name).open('w', encoding='utf-8') as file:
                file.write(json.dumps(index, indent=2, sort_keys=True) + '\n')
        tensors = assemble(plan, receipts)
        if verify != 'off':
            for file in plan.files:
                check_file(self.staging / file.name, file.header, file.nbytes)
        self._refuse_foreign()
        if self.fsync:
            _fsync_tree(self.staging)
        manifest = describe_folder(self.staging, plan, tensors, step, facts)
        if verify == 'full':
            check_folder(self.staging, manifest, 'full', threads=threads)
        write_manifest(self.staging, manifest)
        _fsync_folder(self.staging)
        self._publish(step)
        with contextlib.suppress(OSError):
            self._delete_outdated()
        return tensors

    def abandon(self) -> None:
        """Remove a staging folder that will not be committed."""
        staged, current = read_step(self.staging), read_step(self.final)
        if staged and current and staged.iteration < current.iteration:
            return  # the folders were swapped before the error: it is the old one, for open_staging() or recover()
        shutil.rmtree(self.staging, ignore_errors=True)

    def release(self) -> None:
        """Let another run use the folder."""
        self._lock.release()

    def _publish(self, step: Step) -> None:
        if not self.final.exists():
            os.rename(self.staging, self.final)
            _fsync_folder(self.final.parent)
            return
        old_step = read_step(self.final)
        displaced = self._replace_final(self.staging)
        _fsync_folder(self.final.parent)
        with contextlib.suppress(OSError):  # the new save is live; what stays is recovered by the next
            self._tidy(displaced, old_step, step)

    def _replace_final(self, new: Path) -> Path:
        """Give ``new`` the final name; returns where the old folder is now."""
        if exchange(new, self.final):
            return new
        if self._aside.exists():
            self._discard(self._aside)
        os.rename(self.final, self._aside)
        os.rename(new, self.final)
        return self._aside

    def _tidy(self, displaced: Path, old_step: Step | None, new_step: Step | None) -> None:
        """Keep or delete a folder that is no longer the newest."""
        if self.max_keep == 1 or old_step in (None, new_step):
            self._discard(displaced)
        else:
            self._archive(displaced, old_step)
            _fsync_folder(self.final.parent)

    def _archive(self, folder: Path, step: Step) -> None:
        name = self.final.with_name(retention.archive_name(self.final.name, step.label))
        if name.exists():
            self._discard(name)
        os.rename(folder, name)

    def _delete_outdated(self) -> None:
        parent = self.final.parent
        for name in retention.outdated(self.final.name, os.listdir(parent), self.max_keep):
            if read_step(parent / name) is not None:  # never delete what is not ours
                self._discard(parent / name)

    def _discard(self, folder: Path) -> None:
        """Delete under another name: a half-deleted folder must not look like a save.

        What cannot be deleted now, such as a file that a reader holds open on NFS, stays under that name until a
        later save or run can, and is in nobody's way.
        """
        self._delete_discarded()
        names = (self._discarded + (f'-{number}' if number else '') for number in itertools.count())
        free = next(path for path in map(self.final.with_name, names) if not path.exists())
        os.rename(folder, free)
        shutil.rmtree(free, ignore_errors=True)

    def _delete_discarded(self) -> None:
        for path in self.final.parent.glob(f'{glob.escape(self._discarded)}*'):
            shutil.rmtree(path, ignore_errors=True)


def sweep_dead_runs(root: Path, final_name: str) -> list[Path]:
    """Recover or clear what killed runs left in the other timestamps of a work_dir.

    Returns:
        The folders that were dealt with. A run that is alive holds its lock and is left alone.
    """
    swept = []
    hidden = f'*/.{glob.escape(final_name)}'
    for pattern in (f'{hidden}.staging', f'{hidden}.previous', f'{hidden}.discarded*'):
        for leftover in sorted(root.glob(pattern)):
            folder = CheckpointFolder(leftover.parent / final_name, max_keep=-1)
            if folder.recover_if_dead():
                swept.append(leftover)
    return swept


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob('*'):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        elif path.is_dir():
            _fsync_folder(path)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
