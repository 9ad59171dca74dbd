"""Finds a port for a server of a test."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A free port outside of the system's range for connections, since another test run may open many meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port
