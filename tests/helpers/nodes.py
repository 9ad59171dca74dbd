"""Two nodes on one machine: connected network namespaces and, on request, a separate disk for the second.

Needs root, and iproute2 with veth for the network. Without these, the nodes share the machine's network
and differ only in their ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import namespaces

RANKS_PER_NODE = 2
_ADDRESSES = ('10.77.0.1', '10.77.0.2')


@contextlib.contextmanager
def network() -> Iterator[list[str] | None]:
    """The names of two connected network namespaces; None if the system does not allow them."""
    names = [f'xhf{os.getpid()}n{node}' for node in range(2)]
    try:
        try:
            for name in names:
                _ip('netns', 'add', name)
            _ip('link', 'add', 'veth', 'netns', names[0], 'type', 'veth', 'peer', 'name', 'veth', 'netns', names[1])
            for name, address in zip(names, _ADDRESSES, strict=True):
                _ip('-n', name, 'addr', 'add', f'{address}/24', 'dev', 'veth')
                _ip('-n', name, 'link', 'set', 'veth', 'up')
                _ip('-n', name, 'link', 'set', 'lo', 'up')
        except (OSError, subprocess.CalledProcessError) as error:
            print(f'no network namespaces, so both nodes share one: {error}')
            yield None
        else:
            yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip('netns', 'del', name)


def move_in(names: list[str] | None) -> int:
    """Move this rank to its node, before it joins a process group. Runs on: all ranks.

    Returns:
        The number of the node.
    """
    rank = int(os.environ['RANK'])
    node = rank // RANKS_PER_NODE
    os.environ |= {'LOCAL_RANK': str(rank % RANKS_PER_NODE), 'LOCAL_WORLD_SIZE': str(RANKS_PER_NODE)}
    os.environ |= {'GROUP_RANK': str(node), 'NODE_RANK': str(node)}
    if names is not None:
        os.environ |= {'MASTER_ADDR': _ADDRESSES[0], 'GLOO_SOCKET_IFNAME': 'veth'}
        namespaces.enter_named_network(names[node])
    return node


def mount_own_disk(folder: Path, meeting: Path) -> None:
    """Mount an empty file system at ``folder``, only for the ranks of this node.

    Args:
        meeting: A file outside of it, through which the ranks find each other.
    """
    if os.environ['LOCAL_RANK'] == '0':
        namespaces.leave_mounts()
        subprocess.run(['mount', '--make-rprivate', '/'], check=True)
        subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', folder], check=True)
        meeting.with_suffix('.tmp').write_text(str(os.getpid()))
        meeting.with_suffix('.tmp').rename(meeting)
        return
    deadline = time.monotonic() + 600  # for a busy machine
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f'{meeting} did not appear')
        time.sleep(0.02)
    namespaces.enter(int(meeting.read_text()), 'mnt')


def _ip(*arguments: str) -> None:
    subprocess.run(['ip', *arguments], check=True, capture_output=True, text=True)
