"""A stand-in for SGLang's server: it loads a folder when told to, and answers as SGLang does."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.helpers.checks.assert_intact import MANIFEST, assert_whole
from tests.helpers.checks.compare import folder_tensors
from tests.helpers.ranks.launch import HANG_SECS


class Server(ThreadingHTTPServer):
    """Loads what ``POST /update_weights_from_disk`` names, checks it, and serves until the next one.

    While it loads it waits, unless it loads the last save, until a newer one has replaced ``newest``: it then reads the
    folder again.

    Attributes:
        loaded: The iterations of the saves that were loaded.
        tensors: Those of the model that is served.
        wrong: What was wrong with a request; must stay empty.
    """

    daemon_threads = True

    def __init__(self, newest: Path, last: int) -> None:
        super().__init__(('127.0.0.1', 0), _Handler)
        self.newest, self.last = newest, last
        self.loaded: list[int] = []
        self.wrong: list[str] = []
        self.tensors: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'

    def load(self, folder: Path) -> None:
        """Load and serve a folder; raises if it is not whole, or changes."""
        from transformers import AutoModelForCausalLM

        iteration = assert_whole(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        before = folder_tensors(folder)
        deadline = time.monotonic() + HANG_SECS
        while iteration != self.last and _iteration(self.newest) <= iteration:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert assert_whole(folder) == iteration
        after, state = folder_tensors(folder), model.state_dict()
        assert before.keys() == after.keys()
        assert all(before[name].equal(after[name]) and before[name].equal(state[name]) for name in before)
        self.tensors = before
        self.loaded.append(iteration)


def _iteration(folder: Path) -> int:
    return json.loads((folder / MANIFEST).read_text())['iteration']


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        try:
            assert self.path == '/update_weights_from_disk', self.path
            self.server.load(Path(request['model_path']))
        except Exception as error:
            self.server.wrong.append(repr(error))
            self._answer(400, {'success': False, 'message': repr(error)})
        else:
            self._answer(200, {'success': True, 'message': 'Succeeded to update model weights.'})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(newest: Path, last: int) -> Iterator[Server]:
    """A server in a thread of this process.

    Args:
        newest: The folder that every save replaces.
        last: The iteration of the last save.
    """
    with Server(newest, last) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
