"""A stand-in for the Hub, for ``hf upload``: it takes files and commits, and keeps them in memory."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from tests.helpers.checks.answering import JsonHandler, LocalServer

COMMIT = 'c' * 40


@dataclass
class Commit:
    """A commit: its message, its files by name, and the names that it deletes."""

    message: str
    files: dict[str, bytes]
    deleted: list[str]


class Hub(LocalServer):
    """Takes commits to one repository, as huggingface_hub 2.4 makes them without Xet.

    Attributes:
        commits: The commits, in order.
        names: The files of the repository, to begin with.
        objects: What was uploaded for commits, by SHA-256.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(_Handler)
        self.commits: list[Commit] = []
        self.names = names
        self.objects: dict[str, bytes] = {}

    def commit(self, lines: list[bytes]) -> None:
        found = Commit('', {}, [])
        for line in map(json.loads, lines):
            value = line['value']
            if line['key'] == 'header':
                found.message = value['summary']
            elif line['key'] == 'file':
                found.files[value['path']] = base64.b64decode(value['content'])
            elif line['key'] == 'lfsFile':
                found.files[value['path']] = self.objects[value['oid']]
            elif line['key'] == 'deletedFile':
                found.deleted.append(value['path'])
        self.commits.append(found)


class _Handler(JsonHandler):
    server: Hub

    def _handle(self) -> None:
        self.answer(200, self._answer(self.read()))

    do_GET = do_POST = do_PUT = _handle

    def _answer(self, body: bytes) -> Any:
        hub, path = self.server, self.path.partition('?')[0]
        if path.startswith('/objects/'):
            hub.objects[path.rpartition('/')[2]] = body
        elif '/tree/' in path:
            return [{'type': 'file', 'path': name, 'size': 1, 'oid': COMMIT} for name in hub.names]
        elif '/preupload/' in path:
            names = [file['path'] for file in json.loads(body)['files']]
            kinds = {name: 'lfs' if name.endswith('.safetensors') else 'regular' for name in names}
            return {
                'files': [{'path': name, 'uploadMode': kind, 'shouldIgnore': False} for name, kind in kinds.items()]
            }
        elif path.endswith('/lfs/objects/batch'):
            uploads = [
                {**wanted, 'actions': {'upload': {'href': f'{hub.url}/objects/{wanted["oid"]}'}}}
                for wanted in json.loads(body)['objects']
            ]
            return {'transfer': 'basic', 'objects': uploads}
        elif '/commit/' in path:
            assert self.headers['Authorization'] == 'Bearer hf_token'
            hub.commit(body.splitlines())
            return {'success': True, 'commitOid': COMMIT, 'commitUrl': f'{hub.url}/organization/name/commit/{COMMIT}'}
        return {'id': 'organization/name', 'url': f'{hub.url}/organization/name', 'sha': COMMIT, 'siblings': []}
