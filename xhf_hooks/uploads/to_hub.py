"""Uploads to the Hugging Face Hub: one commit for each save, and a tag with its name."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xhf_hooks.errors import StoreError
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.planning.types import Step
from xhf_hooks.stores.publication import take_name
from xhf_hooks.stores.secrets import without_secrets
from xhf_hooks.uploads.job import Means, UploadJob

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = 'hf://'
#: Files that the Hub creates in a new repository or that users edit there. A save does not delete them.
_NOT_OURS = ('.gitattributes', 'README.md')


class HubDestination:
    """A :class:`.Destination` that is a model repository of the Hub. huggingface_hub retries and resumes by itself.

    Commits are atomic, so a branch holds the old or the new save. The newest save is on ``main``; saves of another name
    are on a branch of that name.

    Args:
        url: ``hf://organization/name``.
        name: Name of the saves.
        is_first: Whether this is the name of the newest saves.
    """

    takes_from_all_ranks = False

    def __init__(self, url: str, name: str, *, is_first: bool) -> None:
        self.where, self._repository, self._name = url, url.removeprefix(PREFIX), name
        self._branch = 'main' if is_first else name
        self._tags: set[str] = set()
        self._committed: str | None = None

    def claim(self) -> None:
        """Create a private repository if there is none; check access by creating and deleting a branch."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise StoreError(f'{self.where}: there is no token for the Hub; run "hf auth login", or set HF_TOKEN')
        if self._repository.count('/') != 1:
            raise StoreError(f'{self.where}: expected hf://organization/name; set upload_to to that')
        with self._told('write'):
            api, probe = self._api(), f'xhf-probe-{uuid.uuid4().hex[:12]}'
            api.create_repo(self._repository, private=True, exist_ok=True)
            api.create_branch(self._repository, branch=probe)
            api.delete_branch(self._repository, branch=probe)
            if self._branch != 'main':
                api.create_branch(self._repository, branch=self._branch, exist_ok=True)
            self._tags = {tag.name for tag in api.list_repo_refs(self._repository).tags}

    def require_usable(self) -> None:
        """Does nothing: only rank 0 uploads."""

    def new_place(self, step: Step) -> str:
        """A new tag."""
        return take_name(f'{self._name}_{step.label}', self._tags)

    def send(self, job: UploadJob, names: Sequence[str], means: Means) -> int:
        """Does nothing: files are sent with the commit."""
        return 0

    def missing(self, job: UploadJob) -> list[str]:
        """Always empty: files are sent with the commit."""
        return []

    def publish(self, job: UploadJob) -> None:
        """Commit all files at once, remove those of the previous save, and tag the commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        names = [*job.manifest.files, MANIFEST_NAME]
        with self._told('write'):
            api = self._api()
            if self._committed != job.place:
                there = api.list_repo_files(self._repository, revision=self._branch)
                others = [name for name in there if name not in names and name not in _NOT_OURS]
                added = [CommitOperationAdd(name, str(job.folder / name)) for name in names]
                removed = [CommitOperationDelete(name) for name in others]
                api.create_commit(self._repository, [*added, *removed], commit_message=job.place, revision=self._branch)
                self._committed = job.place
            api.create_tag(self._repository, tag=job.place, revision=self._branch, exist_ok=True)

    def abandon(self, job: UploadJob) -> None:
        """Does nothing: the branch has only commits."""

    def release(self) -> None:
        """Does nothing: there is no lock."""

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(library_name='xhf_hooks')

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            said = without_secrets(f'{type(error).__name__}: {error}')
            raise StoreError(f'{self.where}: cannot {what}: {said}; check upload_to and your token') from None
