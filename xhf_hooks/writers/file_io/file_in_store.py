"""One file that is sent to an object store, from its first byte to its last."""

from __future__ import annotations

from xhf_hooks.errors import IncompleteError
from xhf_hooks.format.checksum import crc32
from xhf_hooks.planning.types import OutputFile
from xhf_hooks.stores.senders import Senders
from xhf_hooks.stores.stored_folder import StoredFolder


class FileInStore:
    """A planned file that is sent in order; bytes that come early wait for those before them (front_to_back.py).

    Used by: one thread. The object is visible once its last byte was sent.

    Args:
        senders: Threads that send its parts.

    Attributes:
        crc32: Checksum of the bytes sent so far.
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
        """Accept bytes; waits while two parts are unsent.

        Raises:
            IncompleteError: Bytes from ``offset`` were already sent.
            StoreError: Earlier bytes could not be sent.
        """
        if offset < self._position:
            raise IncompleteError(
                f'{self._url}: bytes from {offset} on arrived after those up to {self._position} were sent'
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
        """Returns the checksum of the file, which is now visible.

        Raises:
            IncompleteError: Bytes are missing.
        """
        if self._is_open:
            raise IncompleteError(f'{self._url}: expected {self._nbytes} bytes, only {self._position} were sent')
        return self.crc32

    def close(self) -> None:
        """Discard the object unless it is complete."""
        if self._is_open:
            self._is_open = False
            self._object.discard()

    def _send(self, data: memoryview) -> None:
        self._object.write(data)
        self.crc32 = crc32(data, self.crc32)
        self._position += data.nbytes
