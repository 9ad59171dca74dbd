"""Uploads to the Hugging Face Hub: one commit for each save, and a tag with its name."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xhf_hooks.errors import StoreError
from xhf_hooks.integrity.check import INDEX_SUFFIX, WEIGHTS_SUFFIX
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest
from xhf_hooks.places.objects import again_if_it_fails, without_secrets

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = 'hf://'


class HubSaves:
    """The saves of one name in a model repository of the Hub, all from rank 0. huggingface_hub retries and resumes.

    Commits are atomic, so a branch holds the old or the new save. The newest save is on ``main``; saves of another name
    are on a branch of that name.

    Args:
        url: ``hf://organization/name``.
        name: Name of the saves.
        is_first: Whether this is the name of the newest saves.
        warn: Called when a request fails and will be repeated.
    """

    run = ''

    def __init__(
        self, url: str, name: str, *, is_first: bool, warn: Callable[[str], object] = lambda said: None
    ) -> None:
        self.url, self._repository, self._name = url, url.removeprefix(PREFIX), name
        self._branch, self._warn = 'main' if is_first else name, warn
        self._tags: set[str] = set()

    def claim(self) -> None:
        """Create a private repository if there is none; check access by creating and deleting a branch."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise StoreError(f'{self.url}: there is no token for the Hub; run "hf auth login", or set HF_TOKEN')
        if self._repository.count('/') != 1:
            raise StoreError(f'{self.url}: expected hf://organization/name; set upload_to to that')
        with self._told():
            api, probe = self._api(), f'xhf-probe-{uuid.uuid4().hex[:12]}'
            api.create_repo(self._repository, private=True, exist_ok=True)
            api.create_branch(self._repository, branch=probe)
            api.delete_branch(self._repository, branch=probe)
            if self._branch != 'main':
                api.create_branch(self._repository, branch=self._branch, exist_ok=True)
            self._tags = {tag.name for tag in api.list_repo_refs(self._repository).tags}

    def connect(self) -> None:
        """Does nothing: only rank 0 uploads."""

    def newest_manifest(self) -> None:
        """Not read: the score of the best save is known from the resumed checkpoint."""

    def release(self) -> None:
        """Does nothing: nothing is left to delete."""

    def publish(self, folder: Path, manifest: Manifest) -> str:
        """Commit all files at once, remove other weights beside them, and tag the commit. Files of others stay.

        Returns:
            The tag.
        """
        tag = name = f'{self._name}_{manifest.step.label}'
        count = 1
        while tag in self._tags:
            count += 1
            tag = f'{name}_{count}'
        self._tags.add(tag)
        again_if_it_fails(lambda: self._commit(folder, [*manifest.files, MANIFEST_NAME], tag), self._warn)
        return tag

    def _commit(self, folder: Path, names: Collection[str], tag: str) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        with self._told():
            api = self._api()
            there = api.list_repo_files(self._repository, revision=self._branch)
            # Loaders would mix weights with those of the new save, whoever wrote them; tags keep them
            old = [name for name in there if '/' not in name and name.endswith((WEIGHTS_SUFFIX, INDEX_SUFFIX))]
            added = [CommitOperationAdd(name, str(folder / name)) for name in names]
            removed = [CommitOperationDelete(name) for name in old if name not in names]
            api.create_commit(self._repository, [*added, *removed], commit_message=tag, revision=self._branch)
            api.create_tag(self._repository, tag=tag, revision=self._branch, exist_ok=True)

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(library_name='xhf_hooks')

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            said = without_secrets(f'{type(error).__name__}: {error}')
            raise StoreError(f'{self.url}: cannot write: {said}; check upload_to and your token') from None
