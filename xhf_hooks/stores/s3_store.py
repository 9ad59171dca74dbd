"""S3 and compatible stores: the parts of an object are sent concurrently, and each is checked."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Collection, Iterable
from typing import Any

from xhf_hooks.errors import StoreError
from xhf_hooks.stores.store import LEAST_PART_NBYTES, Store

_MD5 = re.compile(r'[0-9a-f]{32}')
_MOST_PER_DELETE = 1000


class S3Store(Store):
    """A prefix in a bucket, by s3fs. Requests for which s3fs has no method go through its S3 client."""

    least_part_nbytes = LEAST_PART_NBYTES
    most_parts = 10_000
    _sends_in_any_order = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bucket, self._prefix, _ = self._fs.split_path(self._root)
        self._etags_are_md5: bool | None = None

    def call(self, method: str, key: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request to the bucket, with the retries of s3fs."""
        if key is not None:
            arguments['Key'] = self._full_key(key)
        return self._fs.call_s3(method, Bucket=self._bucket, **arguments)

    def delete(self, keys: Collection[str]) -> None:
        todo = list(keys)
        for first in range(0, len(todo), _MOST_PER_DELETE):
            some = todo[first : first + _MOST_PER_DELETE]
            objects = [{'Key': self._full_key(key)} for key in some]
            with self.told(some[0], 'delete'):
                failed = self.call('delete_objects', Delete={'Objects': objects, 'Quiet': True}).get('Errors', [])
                if failed:
                    code, message = failed[0].get('Code'), failed[0].get('Message')
                    raise OSError(f'{len(failed)} objects were not deleted: {code}: {message}')

    def unfinished_uploads(self, prefix: str = '') -> dict[str, str]:
        found: dict[str, str] = {}
        start = self._full_key(prefix)
        arguments: dict[str, Any] = {'Prefix': start}
        with self.told(prefix, 'list uploads of'):
            while True:
                try:
                    answer = self.call('list_multipart_uploads', **arguments)
                except FileNotFoundError:  # rclone's answer if there are none
                    return found
                uploads = [upload for upload in answer.get('Uploads', []) if upload['Key'].startswith(start)]
                found.update({each['UploadId']: each['Key'][len(self._full_key('')) :] for each in uploads})
                if not answer.get('IsTruncated'):
                    return found
                arguments['KeyMarker'] = answer['NextKeyMarker']
                arguments['UploadIdMarker'] = answer['NextUploadIdMarker']

    def abort(self, upload: str, key: str) -> None:
        with self.told(key, 'abort the upload of'):
            self.call('abort_multipart_upload', key, UploadId=upload)

    def require_etag(self, key: str, answer: dict[str, Any], md5: str) -> None:
        """Compare the store's checksum of what it received, if its ETags are checksums.

        Raises:
            StoreError: The store received other bytes.
        """
        etag = answer.get('ETag', '').strip('"')
        is_encrypted = answer.get('ServerSideEncryption', '').startswith('aws:kms') or answer.get(
            'SSECustomerAlgorithm'
        )
        if is_encrypted or not _MD5.fullmatch(etag.partition('-')[0]) or ('-' in etag) != ('-' in md5):
            return
        if self._etags_are_md5 is None:
            self._etags_are_md5 = etag == md5
        if self._etags_are_md5 and etag != md5:
            raise StoreError(f'{self.url}/{key}: the store received other bytes: expected MD5 {md5}, found {etag}')

    def checksums(self, parts: Iterable[bytes | bytearray]) -> set[str]:
        whole, digests = hashlib.md5(usedforsecurity=False), []
        for part in parts:
            whole.update(part)
            digests.append(hashlib.md5(part, usedforsecurity=False).digest())
        of_parts = hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()
        return {whole.hexdigest(), f'{of_parts}-{len(digests)}'}

    def _full_key(self, key: str) -> str:
        return f'{self._prefix}/{key}' if self._prefix else key

    def _put(self, key: str, data: bytes | bytearray) -> str | None:
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.require_etag(key, self.call('put_object', key, Body=data), md5)
        return md5 if self._etags_are_md5 else None

    def _parts(self, key: str, part_nbytes: int) -> _S3Parts:
        return _S3Parts(self, key)


class _S3Parts:
    """A multipart upload; a small object is put instead."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store, self._key = store, key
        self._upload: str | None = None
        self._begin = threading.Lock()
        self._sent: dict[int, tuple[str, bytes, int]] = {}

    def send(self, number: int, data: bytearray) -> None:
        with self._begin:
            if self._upload is None:
                self._upload = self._store.call('create_multipart_upload', self._key)['UploadId']
        md5 = hashlib.md5(data, usedforsecurity=False)
        answer = self._store.call('upload_part', self._key, UploadId=self._upload, PartNumber=number + 1, Body=data)
        self._store.require_etag(self._key, answer, md5.hexdigest())
        self._sent[number] = answer['ETag'], md5.digest(), len(data)

    def finish(self, n_parts: int, whole: bytearray) -> str | None:
        if not n_parts:
            return self._store._put(self._key, whole)
        sent = [self._sent[number] for number in range(n_parts)]
        parts = [{'PartNumber': number, 'ETag': etag} for number, (etag, *_) in enumerate(sent, start=1)]
        of_all = hashlib.md5(b''.join(digest for _, digest, _ in sent), usedforsecurity=False).hexdigest()
        checksum = f'{of_all}-{len(sent)}'
        try:
            answer = self._store.call(
                'complete_multipart_upload', self._key, UploadId=self._upload, MultipartUpload={'Parts': parts}
            )
        except Exception:
            if not self._is_there(sum(nbytes for _, _, nbytes in sent), checksum):
                raise
            answer = {}
        self._upload = None
        self._store.require_etag(self._key, answer, checksum)
        return checksum if self._store._etags_are_md5 else None

    def _is_there(self, nbytes: int, checksum: str) -> bool:
        """Whether the object is complete although the answer was lost, so that a retry finds no upload."""
        found = self._store.info(self._key)
        return found is not None and found.nbytes == nbytes and (found.checksum == checksum or not found.has_parts)

    def discard(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            self._store.abort(upload, self._key)
