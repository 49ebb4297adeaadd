"""The ports of process 0: listening, waiting for a port that an earlier attempt still holds, and naming its holder."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import sys
import time
from pathlib import Path

from mlm.cluster.messages import one_line
from mlm.errors import InputError, StopError

RETRY = 0.5  # seconds between two tries
STALE = 30.0  # seconds for which a name server may still give the address of a machine that is no more
LISTEN = "0A"  # the state in /proc/net/tcp
PROC = Path("/proc")


def address(text: str, default_port: int) -> tuple[str, int]:
    """Returns (host, port) of "HOST" or "HOST:PORT"; an IPv6 address with a port is in brackets. Raises InputError."""
    found = re.fullmatch(r"\[(?P<six>[^\]]*)\](:(?P<port>[0-9]{1,5}))?", text) or re.fullmatch(
        r"(?P<six>[^:]*:[^:]*:.*)|(?P<name>[^:]*)(:(?P<port>[0-9]{1,5}))?", text
    )
    parts = found.groupdict() if found else {}
    port = int(parts.get("port") or default_port)
    host = parts.get("six") or parts.get("name") or ""
    labels = host.removesuffix(".").split(".")
    good = _is_number(host) if parts.get("six") else all(re.fullmatch(r"[\w-]{1,63}", x, re.ASCII) for x in labels)
    if not good or len(host) > 253 or not 0 < port < 65536:
        raise InputError(f"--coordinator={one_line(text)}: must be HOST or HOST:PORT, the address of process 0.")
    return host, port


def joined(where: tuple[str, int]) -> str:
    """Returns "host:port"."""
    host, port = where
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(where: tuple[str, int], limit: float, *, key: str = "config.pod.port") -> socket.socket:
    """Listens at `where`, on no other interface; waits while the port is held or the name does not resolve.

    Args:
      where: host and port.
      limit: seconds to wait, which is config.pod.start_timeout.
      key: of the config that sets the port.

    Raises:
      InputError: it is no address of this machine, or nobody may listen there.
      StopError: the port was not released, or the name has not resolved, in time.
    """
    begin, noted = time.monotonic(), set()
    while True:
        try:
            return _listen(where)
        except OSError as error:
            problem, kind, patience = _problem(where, error, key, limit)
            code = error.errno
        if time.monotonic() - begin >= patience:
            waited = f" (waited {patience:g} s{', config.pod.start_timeout' * (patience == limit)})"
            raise kind(f"{problem}{waited * (patience > 0)}.")
        if code not in noted:
            noted.add(code)
            print(f"mlm: {problem}; waiting for up to {patience:g} s.", file=sys.stderr, flush=True)
        time.sleep(RETRY)


def interface(host: str) -> str:
    """Returns where process 0 listens for those that reach it as `host`: there, and nowhere else.

    Debian's installer writes a machine's own name into its /etc/hosts as 127.0.1.1, where no other host would reach it;
    for such a name it is every interface.
    """
    if _is_number(host) or host == "localhost":
        return host
    places = {place[0].partition("%")[0] for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return "0.0.0.0" if all(ipaddress.ip_address(place).is_loopback for place in places) else host


def _listen(where: tuple[str, int]) -> socket.socket:
    """Listens at the first address of a name that allows it."""
    failure: OSError | None = None
    for family, _, _, _, place in socket.getaddrinfo(interface(where[0]), where[1], type=socket.SOCK_STREAM):
        try:
            return socket.create_server(place, family=family, backlog=1024)
        except OSError as error:
            if failure is None or error.errno == errno.EADDRINUSE:
                failure = error
    raise failure


def _problem(where: tuple[str, int], error: OSError, key: str, limit: float) -> tuple[str, type[StopError], float]:
    """Returns (what is wrong and what to do, the class of the error, the seconds for which it may pass)."""
    host, port = where
    if isinstance(error, socket.gaierror):
        what = f"coordinator {host}: the name does not resolve on host 0; check the name and the DNS"
        return what, StopError, limit
    if error.errno == errno.EADDRINUSE:
        what = f"port {port} of {host} is held by {holder(where)}; end that, or set another port ({key})"
        return what, StopError, limit
    if error.errno == errno.EADDRNOTAVAIL:
        own = one_line(socket.gethostname())
        what = f"coordinator {host}: not an address of host 0 ({own}); name one of its own that the other hosts reach"
        return what, InputError, 0.0 if _is_number(host) else min(STALE, limit)
    what = f"coordinator {joined(where)}: host 0 can't listen there ({error.strerror}); set another port ({key})"
    return what, InputError, 0.0


def holder(where: tuple[str, int]) -> str:
    """Returns which process listens on a port of this machine, as /proc shows it."""
    for inode in _listening(where):
        for process in (path for path in PROC.iterdir() if path.name.isdecimal()):
            if _holds(process, inode):
                with contextlib.suppress(OSError):
                    return f"{one_line((process / 'comm').read_text(errors='replace'), 40)} (process {process.name})"
        return "a process of another user"
    return "a process that cannot be seen from here"


def _holds(process: Path, inode: str) -> bool:
    with contextlib.suppress(OSError):  # it is another user's, or gone
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(file.readlink()) == f"socket:[{inode}]":
                    return True
    return False


def _listening(where: tuple[str, int]) -> list[str]:
    """Returns the inodes of the sockets that listen where we would."""
    inodes = []
    with contextlib.suppress(OSError):
        own = {place[0] for *_, place in socket.getaddrinfo(*where, type=socket.SOCK_STREAM)}
        own = {_kernel(host) for host in own} | {_kernel(f"::ffff:{host}") for host in own if ":" not in host}
        for name in ("tcp", "tcp6"):
            for row in (PROC / "net" / name).read_text().splitlines()[1:]:
                _, local, _, state, *rest = row.split()
                place, _, port = local.partition(":")
                if state == LISTEN and int(port, 16) == where[1] and (place in own or not place.strip("0")):
                    inodes.append(rest[5])
    return inodes


def _kernel(host: str) -> str:
    """Returns an address as /proc/net writes it: words of 32 bits in the machine's byte order."""
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    order = -1 if sys.byteorder == "little" else 1
    return "".join(packed[i : i + 4][::order].hex() for i in range(0, len(packed), 4)).upper()


def _is_number(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
