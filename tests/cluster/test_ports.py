"""Listening on a port that somebody holds, on an address that is not ours, on a name that nobody knows yet."""

import socket
import threading

import pytest

from mlm.cluster import ports
from mlm.errors import InputError, StopError
from tests.support.dask_cluster import free_port


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(ports, "REPORT_AFTER", 0.1)
    monkeypatch.setattr(ports, "RETRY", 0.1)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("10.0.0.2", ("10.0.0.2", 8474)),
        ("10.0.0.2:9000", ("10.0.0.2", 9000)),
        (
            "train-0.train.default.svc.cluster.local.:1",
            ("train-0.train.default.svc.cluster.local.", 1),
        ),
        ("::1", ("::1", 8474)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_address(text, where):
    assert ports.parse_address(text, 8474) == where
    assert ports.parse_address(ports.format_address(where), 1) == where


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "http://host",
        "a:b:c",
        "a b",
        "host\n",
        "[::1",
        "a:99999",
        "a:x",
        "a:0",
        "a..b",
        "-\x1b[2J",
    ],
)
def test_bad_address(text):
    with pytest.raises(InputError, match=r"^--coordinator=.*: must be HOST or HOST:PORT") as raised:
        ports.parse_address(text, 8474)
    assert str(raised.value).isprintable()


def test_a_port_is_waited_for(capfd):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    with pytest.raises(StopError, match=rf"port {port} of 127.*in use.*pod.port.*0\.3 s") as raised:
        ports.wait_until_free(("127.0.0.1", port), 0.3)
    assert raised.value.code == 1, "another start may find it free"
    capfd.readouterr()
    threading.Timer(0.5, server.close).start()
    assert ports.wait_until_free(("127.0.0.1", port), 10) == "127.0.0.1"
    assert capfd.readouterr().err.count("\n") == 1


def test_an_address_of_another_machine():
    with pytest.raises(InputError, match=r"192\.0\.2\.1:8474: host 0"):
        ports.wait_until_free(("192.0.2.1", 8474), 60)


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


def test_a_name_that_still_has_the_address_of_an_earlier_pod(monkeypatch):
    """Or none; a name may be loopback on its own machine alone, as Debian's installer writes it into /etc/hosts."""
    resolving(monkeypatch, ["", "192.0.2.1", "127.0.1.1"])
    assert ports.wait_until_free(("train-0", 0), 10) == "0.0.0.0"
    resolving(monkeypatch, ["10.0.0.5"])
    assert [ports.interface(host) for host in ("train-0", "127.0.0.1")] == ["10.0.0.5", "127.0.0.1"]
    assert ports.interface("localhost") in ("127.0.0.1", "::1")


def test_host_0_is_waited_for(capfd):
    place = ("127.0.0.1", free_port())
    servers = []
    sentence = r"host 0 .* 127.* \(waited 0.2 s, config.pod.start_timeout\)"
    with pytest.raises(StopError, match=sentence):
        ports.wait_for_host_0(place, 0.2)
    capfd.readouterr()
    threading.Timer(0.5, lambda: servers.append(socket.create_server(place))).start()
    assert ports.wait_for_host_0(place, 20) == "127.0.0.1"
    servers[0].close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"127.0.0.1:{place[1]}" in said
