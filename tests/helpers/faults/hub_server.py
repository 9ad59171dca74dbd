"""A Hub with one storage bucket, for the installed huggingface_hub. hf_xet keeps the content in a local folder."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BUCKET = 'owner/name'
#: A token that does not expire in this century.
_TOKEN, _EXPIRES = 'token', 4_000_000_000


class HubServer(ThreadingHTTPServer):
    """Run by :func:`hub_server`.

    Attributes:
        url: For ``HF_ENDPOINT``.
        objects: Content by path.
        is_read_only: Whether it refuses what changes the bucket.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(('127.0.0.1', 0), _Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
        self.store = f'local://{folder}'
        self.objects: dict[str, bytes] = {}
        self.is_read_only = False
        self._folder = folder
        self._hashes: dict[str, str] = {}

    @property
    def token_headers(self) -> dict[str, str]:
        """The answer to a request for access to the content."""
        return {
            'X-Xet-Cas-Url': self.store,
            'X-Xet-Access-Token': _TOKEN,
            'X-Xet-Token-Expiration': f'{_EXPIRES}',
        }

    def describe(self, path: str) -> dict[str, Any]:
        """An object as the Hub lists it."""
        return dict(type='file', path=path, size=len(self.objects[path]), xetHash=self._hashes.get(path, '0' * 64))

    def apply(self, operation: dict[str, str]) -> str | None:
        """Add or delete an object; returns why that is impossible."""
        path = operation['path']
        if operation['type'] == 'addFile':
            self._hashes[path] = operation['xetHash']
            self.objects[path] = self._read_content(operation['xetHash'])
        elif self.objects.pop(path, None) is None:
            return 'no such file'
        return None

    def _read_content(self, xet_hash: str) -> bytes:
        import hf_xet

        local = self._folder / 'content'
        session = hf_xet.XetSession()
        with session.new_file_download_group(token_refresh_url=f'{self.url}/xet-read-token') as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash), str(local))
        return local.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server: HubServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.endswith('-token'):
            self._answer(
                dict(accessToken=_TOKEN, casUrl=self.server.store, exp=_EXPIRES), headers=self.server.token_headers
            )
        elif '/tree' in path:  # whose prefix is compared as text
            prefix = path.partition('/tree/')[2]
            found = [self.server.describe(each) for each in self.server.objects if each.startswith(prefix)]
            self._answer([dict(type='directory', path=f'{prefix}/folder'), *found])
        else:
            found = self.server.describe(path.partition('/resolve/')[2])
            headers = {'X-Xet-Hash': found['xetHash'], 'X-Xet-Refresh-Route': f'{self.server.url}/xet-read-token'}
            self._answer({}, headers={**headers, 'X-Linked-Size': f'{found["size"]}'})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers['Content-Length']))
        if self.path.endswith('/paths-info'):
            paths = json.loads(body)['paths']
            self._answer([self.server.describe(path) for path in paths if path in self.server.objects])
        elif self.server.is_read_only:
            self._answer({}, status=403)
        else:
            operations = [json.loads(line) for line in body.splitlines()]
            why = {operation['path']: self.server.apply(operation) for operation in operations}
            self._answer(dict(failed=[dict(path=path, error=error) for path, error in why.items() if error]))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def _answer(self, content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), 'Content-Length': f'{len(body)}'}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    """Run a server until the block ends.

    Args:
        folder: For the content of objects.
    """
    with HubServer(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
