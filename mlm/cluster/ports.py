"""The ports of process 0: waiting for one that an earlier attempt still holds, or until process 0 listens."""

import contextlib
import errno
import ipaddress
import re
import socket
import sys
import time

import psutil

from mlm.errors import InputError, StopError
from mlm.text import printable

RETRY = 0.5  # seconds between two tries
CONNECT_TIMEOUT = 5.0  # seconds
REPORT_AFTER = 10.0  # seconds until the reason why host 0 can't be reached is printed
STALE = 30.0  # seconds for which a name server may still give the address of a machine that is gone


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Returns (host, port) of "HOST", "HOST:PORT" or "[IPV6]:PORT"; raises InputError."""
    match = re.fullmatch(r"(?:\[([^\]]*:[^\]]*)\]|([^:]*))(?::([0-9]{1,5}))?", text)
    host, port = (match[1] or match[2], int(match[3] or default_port)) if match else (text, default_port)
    labels = host.removesuffix(".").split(".")
    good = is_ip(host) if ":" in host else all(re.fullmatch(r"[\w-]{1,63}", label, re.ASCII) for label in labels)
    if not good or len(host) > 253 or not 0 < port < 65536:
        raise InputError(f"--coordinator={printable(text)}: must be HOST or HOST:PORT, the address of process 0.")
    return host, port


def format_address(address: tuple[str, int]) -> str:
    """Returns "host:port"."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_until_free(address: tuple[str, int], timeout: float, *, key: str = "config.pod.port") -> None:
    """Waits while the port is in use or the name does not resolve.

    Raises InputError where waiting can't help, StopError after `timeout`; `key` of the config sets the port.
    """
    begin, reported = time.monotonic(), set()
    while True:
        try:
            return _listen(address).close()
        except OSError as error:
            problem, kind, limit = _problem(address, error, key, timeout)
            code = error.errno
        if time.monotonic() - begin >= limit:
            key_of_limit = ", config.pod.start_timeout" if limit == timeout else ""
            raise kind(f"{problem} (waited {limit:g} s{key_of_limit})." if limit > 0 else f"{problem}.")
        if code not in reported:
            reported.add(code)
            print(f"mlm: {problem}; waiting for up to {limit:g} s.", file=sys.stderr, flush=True)
        time.sleep(RETRY)


def wait_for_host_0(address: tuple[str, int], timeout: float) -> None:
    """Waits until something listens at the address; raises StopError after `timeout`."""
    begin, reported, place = time.monotonic(), set(), format_address(address)
    while True:
        try:
            return socket.create_connection(address, timeout=CONNECT_TIMEOUT).close()
        except socket.gaierror:
            problem = f"the coordinator's name {address[0]} does not resolve; check the name and the DNS"
        except OSError as error:
            problem = f"host 0 has not answered at {place} ({error.strerror or error}); see whether it runs there"
        if time.monotonic() - begin > timeout:
            raise StopError(f"{problem} (tried for {timeout:g} s, config.pod.start_timeout).")
        if problem not in reported and time.monotonic() - begin > REPORT_AFTER:
            reported.add(problem)
            print(f"mlm: {problem}; trying again.", file=sys.stderr, flush=True)
        time.sleep(RETRY)


def connected(port: int) -> set[tuple[str, int]]:
    """Returns the (IP, port) of those that are connected to a port of this process."""
    connections = psutil.Process().net_connections("tcp")
    mine = [c for c in connections if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port]
    return {(connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port) for connection in mine}


def addresses_of(host: str) -> set[str]:
    """Returns the IPs of a host, none of one whose name does not resolve."""
    with contextlib.suppress(OSError):
        return {sockaddr[0].partition("%")[0] for *_, sockaddr in socket.getaddrinfo(host, None)}
    return set()


def interface(host: str) -> str:
    """Returns the address to listen at so that others reach this machine as `host`: it, or every interface."""
    if is_ip(host) or host == "localhost":
        return host
    ips = {sockaddr[0].partition("%")[0] for *_, sockaddr in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    # Debian's /etc/hosts has 127.0.1.1 for a machine's own name.
    return "0.0.0.0" if all(ipaddress.ip_address(ip).is_loopback for ip in ips) else host


def holder(address: tuple[str, int]) -> str:
    """Returns which process of this machine listens at an address."""
    with contextlib.suppress(OSError, RuntimeError, psutil.Error):  # what it cannot read is not worth a failure
        ips = {sockaddr[0] for *_, sockaddr in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}
        ips |= {f"::ffff:{ip}" for ip in ips} | {"0.0.0.0", "::"}
        for listener in psutil.net_connections("tcp"):
            ip, port = listener.laddr or ("", 0)
            if listener.status == psutil.CONN_LISTEN and port == address[1] and ip in ips:
                if listener.pid is None:
                    return "a process of another user"
                return f"{printable(psutil.Process(listener.pid).name())} (process {listener.pid})"
    return "a process that cannot be seen from here"


def _listen(address: tuple[str, int]) -> socket.socket:
    """Listens at the first address of a name that allows it."""
    errors = []
    for family, _, _, _, sockaddr in socket.getaddrinfo(interface(address[0]), address[1], type=socket.SOCK_STREAM):
        try:
            return socket.create_server(sockaddr, family=family, backlog=1024)
        except OSError as error:
            errors.append(error)
    raise max(errors, key=lambda error: error.errno == errno.EADDRINUSE)


def _problem(address: tuple[str, int], error: OSError, key: str, timeout: float) -> tuple[str, type[StopError], float]:
    """Returns (what is wrong and what to do, the class of the error, the seconds to wait for it to pass)."""
    host, port = address
    if isinstance(error, socket.gaierror):
        what = f"coordinator {host}: the name does not resolve on host 0; check the name and the DNS"
        return what, StopError, timeout
    if error.errno == errno.EADDRINUSE:
        what = f"port {port} of {host} is held by {holder(address)}; stop that process, or set another port ({key})"
        return what, StopError, timeout
    if error.errno == errno.EADDRNOTAVAIL:
        name = printable(socket.gethostname())
        what = f"coordinator {host}: not an address of host 0 ({name}); give an address of host 0 that the others reach"
        return what, InputError, 0.0 if is_ip(host) else min(STALE, timeout)
    what = f"coordinator {format_address(address)}: host 0 can't listen there ({error.strerror}); set another port"
    return f"{what} ({key})", InputError, 0.0


def is_ip(host: str) -> bool:
    """Returns whether a host is named by its address."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
