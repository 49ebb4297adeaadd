"""The ports of process 0: waiting for one that an earlier attempt still holds, or until process 0 listens."""

import contextlib
import errno
import ipaddress
import re
import socket
import time
import urllib.parse
from collections.abc import Callable

from mlm.errors import InputError, StopError
from mlm.text import printable, say

RETRY = 0.5  # seconds between two tries
CONNECT_TIMEOUT = 5.0  # seconds
REPORT_AFTER = 2.0  # seconds until the reason why it is waiting is printed


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Returns (host, port) of "HOST", "HOST:PORT" or "[IPV6]:PORT"; raises InputError."""
    if is_ip(text):
        return text, default_port
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        port = default_port if parts.port is None else parts.port
        name = r"([\w-]{1,63}\.)*[\w-]{1,63}\.?"
        if port and re.fullmatch(rf"(\[.+\]|{name})(:\d+)?", text, re.ASCII):
            return parts.hostname, port
    except ValueError:
        pass
    message = "must be HOST or HOST:PORT, the address of process 0"
    raise InputError(f"--coordinator={printable(text)}: {message}.")


def format_address(address: tuple[str, int]) -> str:
    """Returns "host:port"."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_until_free(address: tuple[str, int], timeout: float) -> str:
    """Waits until this machine can listen there; returns the IP to listen at, 0.0.0.0 for every interface.

    Raises StopError after `timeout` seconds, InputError where waiting can't help.
    """
    host, port = address
    fix = "set another port (config.pod.port)"

    def listen() -> socket.socket:
        ip = interface(host)
        return socket.create_server(
            (ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET
        )

    def explain(error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {host} is in use; stop the process that listens there, or {fix}"
        problem = (
            f"coordinator {format_address(address)}: host 0 can't listen there ({error.strerror})"
        )
        problem += f"; give an address of host 0 that the others reach, or {fix}"
        if is_ip(host):  # a name server may still give the address of an earlier pod of this name
            raise InputError(f"{problem}.") from None
        return problem

    return _wait(listen, explain, timeout)


def wait_for_host_0(address: tuple[str, int], timeout: float) -> str:
    """Waits until something listens there; returns the IP of this machine that reaches it; raises StopError."""

    def explain(error: OSError) -> str:
        reason = error.strerror or error
        fix = "see whether it runs there, and whether a firewall closes the port"
        return f"host 0 has not answered at {format_address(address)} ({reason}); {fix}"

    return _wait(
        lambda: socket.create_connection(address, timeout=CONNECT_TIMEOUT), explain, timeout
    )


def _wait(
    open_socket: Callable[[], socket.socket], explain: Callable[[OSError], str], timeout: float
) -> str:
    """Waits until a socket opens, and returns its IP; reports once why it does not, and raises StopError."""
    begin = time.monotonic()
    is_reported = False
    while True:
        try:
            with open_socket() as opened:
                return opened.getsockname()[0]
        except OSError as error:
            problem = explain(error)
        waited = time.monotonic() - begin
        if waited >= timeout:
            raise StopError(f"{problem} (waited {timeout:g} s, config.pod.start_timeout).")
        if waited >= REPORT_AFTER and not is_reported:
            is_reported = True
            say(f"mlm: {problem}; waiting for up to {timeout:g} s.")
        time.sleep(RETRY)


def interface(host: str) -> str:
    """Returns the IP to listen at so that others reach this machine as `host`: that of it, or every interface."""
    if is_ip(host):
        return host
    ip = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    # Debian's /etc/hosts has 127.0.1.1 for a machine's own name.
    return "0.0.0.0" if ipaddress.ip_address(ip).is_loopback and host != "localhost" else ip


def is_ip(host: str) -> bool:
    """Returns whether a host is named by its address."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
