"""Listening on a port that somebody holds, on an address that is not ours, on a name that nobody knows yet."""

import os
import socket
import threading
import time

import psutil
import pytest

from mlm.cluster import ports
from mlm.errors import InputError, StopError
from tests.support.dask_cluster import free_port


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("10.0.0.2", ("10.0.0.2", 8474)),
        ("10.0.0.2:9000", ("10.0.0.2", 9000)),
        ("train-workers-0-0.train", ("train-workers-0-0.train", 8474)),
        (
            "train-0.train.default.svc.cluster.local.:1",
            ("train-0.train.default.svc.cluster.local.", 1),
        ),
        ("::1", ("::1", 8474)),
        ("[::1]", ("::1", 8474)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_address(text, where):
    assert ports.parse_address(text, 8474) == where
    assert ports.parse_address(ports.format_address(where), 1) == where


NO_HOST = [
    "",
    ":1",
    "host:",
    "http://host",
    "a:b:c",
    "[]",
    "[host]:1",
    "a b",
    "a..b",
    "host\n",
    "[::1",
    "a/b",
]
NO_PORT = ["1.2.3.4:0", "1.2.3.4:99999", "1.2.3.4:x", "1.2.3.4:" + "9" * 5000, "::1]:5", "-\x1b[2J"]


@pytest.mark.parametrize("text", [*NO_HOST, "x" * 64, *NO_PORT])
def test_bad_address(text):
    with pytest.raises(InputError, match=r"^--coordinator=.*: must be HOST or HOST:PORT") as raised:
        ports.parse_address(text, 8474)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_holder_is_named(host, monkeypatch):
    """A name may hold anything."""
    monkeypatch.setattr(psutil.Process, "name", lambda process: "\x1b[2Jx")
    with socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as server:
        assert ports.holder(server.getsockname()[1]) == f"\\u001b[2Jx (process {os.getpid()})"
    assert ports.holder(free_port()) == "a process that can't be seen from here"


def test_a_port_is_waited_for_and_its_holder_named_once(capfd, monkeypatch):
    monkeypatch.setattr(ports, "REPORT_AFTER", 0.1)
    monkeypatch.setattr(ports, "RETRY", 0.1)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    with pytest.raises(
        StopError, match=rf"port {port} of 127.*process {os.getpid()}.*pod.port.*0\.3 s"
    ) as raised:
        ports.wait_until_free(("127.0.0.1", port), 0.3)
    assert raised.value.code == 1, "another start may find it free"
    capfd.readouterr()
    threading.Timer(0.5, server.close).start()
    assert ports.wait_until_free(("127.0.0.1", port), 10) == "127.0.0.1"
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1 and f"(process {os.getpid()})" in printed


def test_an_address_of_another_machine():
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"192\.0\.2\.1:8474: host 0"):
        ports.wait_until_free(("192.0.2.1", 8474), 60)
    assert time.monotonic() - begin < 1


def resolving(monkeypatch, to: list[str]) -> None:
    """The name "train-0" has each of these addresses for one request, and then the last for good; "" is none."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **keywords):
        if host == "train-0":
            host = to.pop(0) if len(to) > 1 else to[0]
            if not host:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_that_still_has_the_address_of_an_earlier_pod(monkeypatch, capfd):
    monkeypatch.setattr(ports, "REPORT_AFTER", 0.1)
    monkeypatch.setattr(ports, "RETRY", 0.1)
    resolving(monkeypatch, ["", "192.0.2.1", "10.255.255.1", "127.0.0.1"])  # or no address yet
    assert ports.wait_until_free(("train-0", 0), 10) == "0.0.0.0", (
        "another machine would resolve it otherwise"
    )
    assert "coordinator train-0:0: host 0" in capfd.readouterr().err


def test_host_0_is_waited_for(capfd, monkeypatch):
    monkeypatch.setattr(ports, "REPORT_AFTER", 0.1)
    monkeypatch.setattr(ports, "RETRY", 0.1)
    place = ("127.0.0.1", free_port())
    servers = []
    with pytest.raises(
        StopError, match=r"host 0 .* 127.* \(waited 0.2 s, config.pod.start_timeout\)"
    ):
        ports.wait_for_host_0(place, 0.2)
    capfd.readouterr()
    threading.Timer(0.5, lambda: servers.append(socket.create_server(place))).start()
    assert ports.wait_for_host_0(place, 20) == "127.0.0.1"
    servers[0].close()
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1 and f"127.0.0.1:{place[1]}" in printed
    resolving(monkeypatch, [""])
    with pytest.raises(StopError, match=r"train-0:1 \(Name or service not known\)"):
        ports.wait_for_host_0(("train-0", 1), 0.2)


def test_a_name_that_is_loopback_on_its_own_machine_alone(monkeypatch):
    # the first as Debian's installer writes it into /etc/hosts
    resolving(monkeypatch, ["127.0.1.1", "10.0.0.5"])
    found = [ports.interface(host) for host in ("train-0", "train-0", "127.0.0.1")]
    assert found == ["0.0.0.0", "10.0.0.5", "127.0.0.1"]
    assert ports.interface("localhost") in ("127.0.0.1", "::1")
