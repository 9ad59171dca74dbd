"""The part of the Hub that uploading a model needs: answers huggingface_hub's requests from memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = 'hf_averysecrettokenofatest'
Files = dict[str, bytes]


@dataclass
class HubServer:
    """The state of the server.

    Attributes:
        branches: Branches of the only repository; empty if there is no repository.
        tags: Name to files.
        lfs: Contents uploaded outside of commits, by SHA-256.
    """

    url: str = ''
    branches: dict[str, Files] = field(default_factory=dict)
    tags: dict[str, Files] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    private: bool = False
    refuses: bool = False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Returns status and JSON."""
        name, _, rest = path.removeprefix('/api/models/org/name/').partition('/')
        if path == '/api/repos/create':
            asked = json.loads(body)
            self.private = asked.get('private') is True or asked.get('visibility') == 'private'
            self.branches.setdefault('main', {'.gitattributes': b'*'})
            return 200, {'url': f'{self.url}/org/name'}
        if path.startswith('/lfs/'):
            self.lfs[path.removeprefix('/lfs/')] = body
            return 200, {}
        if path.endswith('/info/lfs/objects/batch'):
            return 200, {'transfer': 'basic', 'objects': [self._lfs_object(one) for one in json.loads(body)['objects']]}
        if name == 'branch':
            if method == 'DELETE':
                del self.branches[rest]
            else:
                self.branches.setdefault(rest, dict(self.branches['main']))
            return 200, {}
        if name == 'refs':
            refs = [{'name': tag, 'ref': f'refs/tags/{tag}', 'targetCommit': '0' * 40} for tag in self.tags]
            return 200, {'branches': [], 'converts': [], 'tags': refs}
        if name == 'tree':
            files = self.branches[rest]
            return 200, [{'type': 'file', 'path': p, 'size': len(data), 'oid': '0' * 40} for p, data in files.items()]
        if name == 'preupload':
            modes = [(one['path'], one['path'].endswith('.safetensors')) for one in json.loads(body)['files']]
            return 200, {
                'files': [
                    {'path': p, 'uploadMode': 'lfs' if large else 'regular', 'shouldIgnore': False, 'oid': None}
                    for p, large in modes
                ]
            }
        if name == 'commit':
            return 200, self._commit(rest, body)
        if name == 'tag':
            self.tags[json.loads(body)['tag']] = dict(self.branches[rest])
            return 200, {}
        if path == '/api/models/org/name':
            return 200, {'id': 'org/name', 'sha': '0' * 40, 'siblings': []}
        return 404, {'error': f'{method} {path} is not known to the test'}

    def _lfs_object(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = {'oid': asked['oid'], 'size': asked['size']}
        if asked['oid'] in self.lfs:
            return found
        return {**found, 'actions': {'upload': {'href': f'{self.url}/lfs/{asked["oid"]}', 'header': {}}}}

    def _commit(self, branch: str, body: bytes) -> dict[str, Any]:
        files = dict(self.branches[branch])
        for line in body.decode().splitlines():
            operation = json.loads(line)
            value = operation['value']
            if operation['key'] == 'header':
                self.commits.append(value['summary'])
            elif operation['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif operation['key'] == 'lfsFile':
                files[value['path']] = self.lfs[value['oid']]
            elif operation['key'] == 'deletedFile':
                del files[value['path']]
        self.branches[branch] = files
        oid = hashlib.sha1(body).hexdigest()
        return {'success': True, 'commitOid': oid, 'commitUrl': f'{self.url}/org/name/commit/{oid}', 'hookOutput': ''}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a server until the block ends."""
    hub, lock = HubServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def handle_all(self) -> None:
            body = self._body()
            path = re.sub(r'\?.*', '', unquote(self.path))
            with lock:
                if hub.refuses or (TOKEN not in self.headers.get('Authorization', '') and not path.startswith('/lfs/')):
                    status, content = 403, {'error': 'forbidden by the test'}
                else:
                    status, content = hub.answer(self.command, path, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header('Content-Type', 'application/json')
            self.send_header('Content-Length', str(len(data)))
            self.end_headers()
            if self.command != 'HEAD':
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_all

        def _body(self) -> bytes:
            if self.headers.get('Transfer-Encoding') != 'chunked':
                return self.rfile.read(int(self.headers.get('Content-Length', 0)))
            data = b''
            while nbytes := int(self.rfile.readline(), 16):
                data += self.rfile.read(nbytes)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    hub.url = f'http://127.0.0.1:{server.server_address[1]}'
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
