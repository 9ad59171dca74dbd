"""An HTTP proxy between a client and S3 that refuses requests, hangs or cuts connections on demand."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

#: What happens instead of forwarding a request: a status, 'cut', 'hang', or 'lose' (forward it, but cut the answer).
Fault = int | str | None
#: Longer than clients wait.
HANG_SECS = 30.0
_CODES = {403: 'AccessDenied', 404: 'NoSuchKey', 500: 'InternalError', 501: 'NotImplemented', 503: 'SlowDown'}
#: Headers that botocore sends since 1.36, and that older stores do not know.
_CHECKSUM_HEADERS = ('x-amz-checksum', 'x-amz-sdk-checksum', 'x-amz-trailer')


@dataclass
class FaultyProxy:
    """A running proxy.

    Attributes:
        decide: Called with the method and path of each request, from many threads; returns the fault.
        knows_checksums: Whether it takes what is written with a checksum in its headers.
    """

    url: str
    server_url: str
    decide: Callable[[str, str], Fault] = lambda method, path: None
    knows_checksums: bool = True


@contextmanager
def faulty_proxy(server_url: str) -> Iterator[FaultyProxy]:
    """Forward requests to a server, unless ``decide`` returns a fault."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def handle_all(self) -> None:
            body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
            path = unquote(self.path)
            fault = proxy.decide(self.command, path)
            if not proxy.knows_checksums and any(n.lower().startswith(_CHECKSUM_HEADERS) for n in self.headers):
                fault, self.close_connection = 501, True  # its body was not read: it may be in chunks
            if fault == 'hang':
                ended.wait(HANG_SECS)
                fault = 'cut'
            if fault == 'cut':
                self.close_connection = True
            elif isinstance(fault, int):
                code = _CODES[fault]
                said = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code} by the test</Message></Error>'
                self.answer(fault, [], b'' if self.command == 'HEAD' else said.encode())
            else:
                self.pass_on(body, lose=fault == 'lose')

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_all

        def pass_on(self, body: bytes, *, lose: bool) -> None:
            connection = http.client.HTTPConnection(server_url.removeprefix('http://'), timeout=60)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                got = connection.getresponse()
                data = got.read()
            except OSError:
                self.close_connection = True
                return
            finally:
                connection.close()
            if lose:
                self.close_connection = True
                return
            dropped = ('transfer-encoding', 'connection', 'date', 'server')
            headers = [(name, value) for name, value in got.getheaders() if name.lower() not in dropped]
            self.answer(got.status, headers, data)

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() != 'content-length' or self.command == 'HEAD':
                    self.send_header(name, value)
            if self.command != 'HEAD':
                self.send_header('Content-Length', str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """Ignore clients that have gone: they were killed."""

    server = Server(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    proxy = FaultyProxy(f'http://127.0.0.1:{server.server_port}', server_url)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield proxy
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


class EachInTurn:
    """Fails each request once, with the faults in turn; when it is repeated, it passes.

    Args:
        matters: Whether a method and path is to fail.
    """

    def __init__(self, matters: Callable[[str, str], bool], faults: tuple[Fault, ...]) -> None:
        self._matters, self._faults = matters, faults
        self._failed: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> Fault:
        """Used as :attr:`FaultyProxy.decide`."""
        with self._lock:
            if not self._matters(method, path) or (method, path) in self._failed:
                return None
            self._failed.add((method, path))
            return self._faults[len(self._failed) % len(self._faults)]


class AwayFor:
    """Cuts all connections for some time, from the first request that matters on."""

    def __init__(self, matters: Callable[[str, str], bool], secs: float, fault: Fault = 'cut') -> None:
        self._matters, self._secs, self._fault = matters, secs, fault
        self._began: float | None = None

    def __call__(self, method: str, path: str) -> Fault:
        """Used as :attr:`FaultyProxy.decide`."""
        if self._matters(method, path) and self._began is None:
            self._began = time.monotonic()
        is_away = self._began is not None and time.monotonic() - self._began < self._secs
        return self._fault if is_away and self._matters(method, path) else None
