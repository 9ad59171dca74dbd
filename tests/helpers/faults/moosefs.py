"""A network file system whose clients cache names: MooseFS servers and hosts on this machine.

The servers and all hosts share a separate network namespace, so ports never clash with those of another test run. A
host is a mount namespace, a host name and one `mfsmount`. Everything ends with the process that made it: namespaces
and mounts live as long as the processes in them, which die with their parent.

Needs root, FUSE, iproute2 and Debian's moosefs-master, moosefs-chunkserver and moosefs-client.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.helpers.ranks.namespaces import enter
from tests.helpers.ranks.processes import absent, run, started, wait_until

_ADDRESS = '10.77.0.1'
PACKAGES = ('moosefs-master', 'moosefs-chunkserver', 'moosefs-client')
_PROGRAMS = ('mfsmaster', 'mfschunkserver', 'mfsmount', 'mfssetgoal', 'nsenter', 'unshare', 'setpriv', 'ip')
_SERVER = 'WORKING_USER = root\nWORKING_GROUP = root\nDISABLE_OOM_KILLER = 0\nDATA_PATH = {folder}\n'
_MASTER = (
    _SERVER
    + f"""
EXPORTS_FILENAME = {{folder}}/mfsexports.cfg
TOPOLOGY_FILENAME = {{folder}}/mfstopology.cfg
MATOML_LISTEN_HOST = {_ADDRESS}
MATOCS_LISTEN_HOST = {_ADDRESS}
MATOCL_LISTEN_HOST = {_ADDRESS}
SESSION_SUSTAIN_TIME = 60
"""
)
_CHUNKS = (
    _SERVER
    + f"""
HDD_CONF_FILENAME = {{folder}}/mfshdd.cfg
HDD_LEAVE_SPACE_DEFAULT = 1GiB
CSSERV_LISTEN_HOST = {_ADDRESS}
BIND_HOST = {_ADDRESS}
MASTER_HOST = {_ADDRESS}
MASTER_RECONNECTION_DELAY = 1
"""
)


@dataclass(frozen=True)
class Host:
    """One client of the file system. Picklable, so that it can be passed to a rank.

    Attributes:
        pid: Process id of its `mfsmount`.
    """

    pid: int

    def enter(self) -> None:
        """Move this process, which must not have threads yet, to the host. Runs on: a rank."""
        enter(self.pid, 'net', 'uts', 'mnt')
        os.environ |= {'MASTER_ADDR': _ADDRESS, 'GLOO_SOCKET_IFNAME': 'lo'}

    def sees(self, path: Path) -> Path:
        """The path by which any process on this machine sees ``path`` as this host does."""
        return Path('/proc', str(self.pid), 'root', path.relative_to('/'))

    def die(self) -> None:
        """Kill its client without notice, like a host that loses power."""
        os.kill(self.pid, signal.SIGKILL)


class MooseFS:
    """A running file system.

    Attributes:
        hosts: Hosts added by :meth:`add_host`, by name.
    """

    def __init__(self, folder: Path, running: contextlib.ExitStack, network: int) -> None:
        self._folder, self._running, self._network = folder, running, network
        self.mounted = folder / 'mnt'
        self.hosts: dict[str, Host] = {}

    def add_host(self, name: str, cache_secs: float) -> Host:
        """Start one more client."""
        caches = [f'{what}cacheto={cache_secs:g}' for what in ('mfsentry', 'mfsdirentry', 'mfsnegentry', 'mfsattr')]
        script = 'hostname "$1" && shift && exec "$@"'
        mount = ['mfsmount', self.mounted, '-f', '-H', _ADDRESS, '-o', ','.join(caches)]
        log = self._folder / f'{name}.log'
        own = ['nsenter', f'--net=/proc/{self._network}/ns/net']
        own += ['unshare', '--mount', '--uts', '--propagation', 'private', 'sh', '-c', script, 'sh', name]
        process = self._running.enter_context(started([*own, *mount], log))
        mounts = Path(f'/proc/{process.pid}/mountinfo')
        wait_until(lambda: f' {self.mounted} ' in mounts.read_text(), process, log, f'{name} mounted')
        host = Host(process.pid)
        # The server accepts nothing until it knows a disk
        seen = host.sees(self.mounted)
        wait_until(lambda: os.statvfs(seen).f_bavail > 0, process, log, f'{name} had room to write')
        if not self.hosts:  # one copy per file: with a single disk and two, a second writer waits 30 s at each turn
            inside = ['nsenter', f'--net=/proc/{host.pid}/ns/net', f'--mount=/proc/{host.pid}/ns/mnt']
            run(*inside, 'mfssetgoal', '1', self.mounted)
        self.hosts[name] = host
        return host


def missing() -> str | None:
    """Why this machine cannot run MooseFS; None if it can."""
    if os.geteuid() != 0:
        return 'only root can mount it'
    if not os.access('/dev/fuse', os.R_OK | os.W_OK):
        return 'there is no /dev/fuse'
    if lacking := absent(_PROGRAMS):
        return f'{", ".join(lacking)} not found (on Debian: apt-get install {" ".join(PACKAGES)})'
    tried = subprocess.run(['unshare', '--net', '--mount', '--uts', 'true'], capture_output=True, text=True)
    return f'no namespaces here: {tried.stderr.strip()}' if tried.returncode else None


@contextlib.contextmanager
def moosefs(folder: Path) -> Iterator[MooseFS]:
    """Run the servers until the block ends, and end all hosts with them.

    Args:
        folder: An empty folder on an ordinary disk, for the servers' data and logs.
    """
    (folder / 'mnt').mkdir(parents=True)
    with contextlib.ExitStack() as running:
        namespace = running.enter_context(started(['unshare', '--net', 'sleep', 'infinity'], folder / 'net.log'))
        own = os.readlink('/proc/self/ns/net')
        of_namespace = Path(f'/proc/{namespace.pid}/ns/net')
        wait_until(lambda: os.readlink(of_namespace) != own, namespace, folder / 'net.log', 'there was a network')
        inside = ['nsenter', f'--net={of_namespace}']
        for command in (['link', 'set', 'lo', 'up'], ['addr', 'add', f'{_ADDRESS}/24', 'dev', 'lo']):
            run(*inside, 'ip', *command)
        master, chunks, disk = folder / 'master', folder / 'chunks', folder / 'disk'
        for made in (master, chunks, disk):
            made.mkdir()
        (master / 'metadata.mfs').write_bytes(b'MFSM NEW')
        (master / 'mfsexports.cfg').write_text('* / rw,alldirs,admin,maproot=0:0\n')
        (master / 'mfstopology.cfg').touch()
        (chunks / 'mfshdd.cfg').write_text(f'{disk}\n')
        for program, where, text in (('mfsmaster', master, _MASTER), ('mfschunkserver', chunks, _CHUNKS)):
            config = where / f'{program}.cfg'
            config.write_text(text.format(folder=where))
            server = running.enter_context(started([*inside, program, '-f', '-c', config, 'start'], where / 'log'))
            ready = f'{program} daemon initialized properly'
            wait_until(partial(_says, where / 'log', ready), server, where / 'log', f'{program} was ready')
        yield MooseFS(folder, running, namespace.pid)


def _says(log: Path, text: str) -> bool:
    return text in log.read_text(errors='replace')
