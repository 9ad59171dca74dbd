"""The objects of one save."""

from __future__ import annotations

from xhf_hooks.errors import IncompleteError
from xhf_hooks.stores.store import Store


class StoredFolder:
    """The objects of one save: those whose keys begin with the prefix.

    Args:
        prefix: The prefix, without a final slash.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix

    def key(self, name: str) -> str:
        """The key of a file, named relative to the folder."""
        return f'{self.prefix}/{name}'

    def url_of(self, name: str) -> str:
        """The URL of a file, for messages."""
        return f'{self.store.url}/{self.key(name)}'

    def sizes(self) -> dict[str, int]:
        """Sizes of the existing files, in bytes."""
        start = self.key('')
        return {key.removeprefix(start): info.nbytes for key, info in self.store.list(start).items()}

    def read(self, name: str, start: int, nbytes: int) -> bytes:
        """Bytes of a file as the store returns them; fewer at its end."""
        return self.store.get(self.key(name), start, start + nbytes) or b''

    def require(self, name: str, start: int, data: bytes) -> None:
        """Compare bytes with what the store returns.

        Raises:
            IncompleteError: They differ.
        """
        if self.read(name, start, len(data)) != data:
            raise IncompleteError(
                f'{self.url_of(name)}: bytes {start} to {start + len(data)} differ from those that were sent and '
                f'acknowledged. Something changes objects there; set {self.store.option} to another place'
            )
