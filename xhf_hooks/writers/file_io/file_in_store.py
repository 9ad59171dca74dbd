"""One file on its way into an object store, from its first byte to its last."""

from __future__ import annotations

from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.types import OutputFile
from xhf_hooks.stores.senders import Senders
from xhf_hooks.stores.stored_folder import StoredFolder


class FileInStore:
    """A planned file whose bytes come in their order, but for those that wait for others (front_to_back.py).

    Used by: one thread. It is visible as soon as its last byte has come.

    Args:
        senders: They send its parts.

    Attributes:
        crc32: Of the bytes that were sent so far.
    """

    def __init__(self, folder: StoredFolder, file: OutputFile, senders: Senders) -> None:
        self._url, self._nbytes = folder.url_of(file.name), file.nbytes
        self._object = folder.store.create(folder.key(file.name), file.nbytes, senders=senders)
        self._waiting: dict[int, bytes] = {}
        self._position = self.crc32 = 0
        self._is_open = True
        try:
            self.write(memoryview(file.header), 0)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Take bytes; waits while there are two parts that are not sent.

        Raises:
            IncompleteError: They were sent before.
            StoreError: The store did not take what came before.
        """
        if offset < self._position:
            raise IncompleteError(
                f'{self._url}: bytes from {offset} on come after those up to {self._position} were sent'
            )
        if offset > self._position:
            self._waiting[offset] = bytes(data)
            return
        self._send(data)
        while (waiting := self._waiting.pop(self._position, None)) is not None:
            self._send(memoryview(waiting))
        if self._position == self._nbytes and self._is_open:
            self._is_open = False
            self._object.commit()

    def require_whole(self) -> int:
        """The checksum of the file, which is visible now.

        Raises:
            IncompleteError: Bytes are missing.
        """
        if self._is_open:
            raise IncompleteError(f'{self._url}: expected {self._nbytes} bytes, only {self._position} were sent')
        return self.crc32

    def close(self) -> None:
        """Forget it unless it is whole."""
        if self._is_open:
            self._is_open = False
            self._object.discard()

    def _send(self, data: memoryview) -> None:
        self._object.write(data)
        self.crc32 = crc32(data, self.crc32)
        self._position += data.nbytes
