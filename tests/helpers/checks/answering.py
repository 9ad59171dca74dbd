"""Stand-ins for servers that answer in JSON."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeVar


class LocalServer(ThreadingHTTPServer):
    """A server on this machine, at a free port."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(('127.0.0.1', 0), handler)

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'


class JsonHandler(BaseHTTPRequestHandler):
    """Reads requests of a known length, and answers in JSON."""

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


_AnyServer = TypeVar('_AnyServer', bound=LocalServer)


@contextmanager
def answering(server: _AnyServer) -> Iterator[_AnyServer]:
    """Let a server answer in a thread of this process."""
    with server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
