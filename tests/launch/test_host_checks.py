"""host_checks.py: what a host says of itself before a run."""

import fcntl
import os
import pathlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import host_checks
import pytest
from jax._src import hardware_utils


def test_preflight_sees_who_holds_the_accelerator_and_removes_a_lock_that_nobody_holds(
    host, tmp_path, monkeypatch
):
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    device = tmp_path / "dev" / "vfio" / "0"
    lock = tmp_path / "libtpu_lockfile"
    device.touch()
    device.with_name("vfio").touch()  # of the driver, as on every host of v5e and v6e

    monkeypatch.setattr(host_checks, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(host_checks, "LOCK", lock)

    def check() -> dict:
        return host.ask("preflight", host.code)

    answer = check()
    assert answer["accelerators"] == 1 and answer["has_code"] and "GB" in answer["free"]
    lock.touch()
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert "libtpu's lock is held" in " ".join(check()["problems"]) and lock.exists()
    with device.open():
        assert f"the accelerator is held by process {os.getpid()} (" in " ".join(
            check()["problems"]
        )
        assert lock.exists()
    assert "held" not in " ".join(check()["problems"]) and not lock.exists()


def tpu(root: pathlib.Path, device: str) -> pathlib.Path:
    """A /sys with a TPU of a kind, as Linux shows it, without huge pages; returns the file that turns them on."""
    folder = root / "bus/pci/devices/0000:00:05.0"
    file = root / "kernel/mm/transparent_hugepage/enabled"
    folder.mkdir(parents=True)
    file.parent.mkdir(parents=True)
    (folder / "vendor").write_text(hardware_utils._GOOGLE_PCI_VENDOR_ID + "\n")
    (folder / "device").write_text(device + "\n")
    file.write_text("always [madvise] never\n")
    return file


def test_huge_pages_are_asked_for_where_jax_does():
    new = hardware_utils.TpuVersion.v5e  # jax's cloud_tpu_init asks from there on
    devices = [
        device for device, version in hardware_utils._TPU_PCI_DEVICE_IDS.items() if version >= new
    ]
    assert set(devices) <= set(host_checks.EAGER), "those that this version of jax knows"
    assert set(host_checks.EAGER) - set(devices) <= {"0x0083", "0x007c"}, (
        "those that jax 0.12 knows, too"
    )


@pytest.mark.standard
def test_huge_pages(host, tmp_path, monkeypatch):
    monkeypatch.setattr(host_checks.os, "access", lambda *_: False)  # these tests may be root's
    sudo = tmp_path / "sudo"
    for device in ("0x005e", "0x0063"):  # v4 does not need them
        root = tmp_path / device
        file = tpu(root, device)
        more = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        monkeypatch.setattr(host_checks, "SYS", root)
        sudo.write_text("#!/bin/sh\nexit 1\n")  # a password is wanted
        sudo.chmod(0o755)
        line = f"sudo sh -c 'echo always > {file}'"
        for path in (more["PATH"], str(tmp_path / "empty")):  # there is no sudo
            remarks = " ".join(host.ask("preflight", host.code, PATH=path)["remarks"])
            assert (line in remarks) == (device in host_checks.EAGER)
        sudo.write_text(
            f"#!/bin/sh\n[ \"$*\" = '-n tee {file}' ] && echo '[always] madvise never' >{file}\n"
        )
        assert line not in " ".join(host.ask("preflight", host.code, **more)["remarks"])
        assert ("[always]" in file.read_text()) == (device in host_checks.EAGER)


@pytest.fixture
def numbers(monkeypatch) -> list[int]:
    """Free ports, which all hosts try for a second."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    found = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    monkeypatch.setattr(host_checks, "PORTS", found)
    monkeypatch.setattr(host_checks, "WAIT", 1.0)
    return found


def test_ports_that_all_reach(numbers):
    with ThreadPoolExecutor() as pool:
        found = list(
            pool.map(
                lambda worker: host_checks.ports(None, "127.0.0.1", worker, 3)["ports"], range(3)
            )
        )
    assert found == [{str(number): "" for number in numbers}] * 3


def test_ports_that_are_held_or_that_nobody_reaches(numbers):
    """A stranger who connects is no host."""
    first, second = map(str, numbers)
    with socket.create_server(("127.0.0.1", numbers[0])):
        found = host_checks.ports(None, "127.0.0.1", 0, 1)["ports"]
    assert found == {first: "can't be bound (Address already in use)", second: ""}

    def knock() -> None:
        with socket.create_connection(("127.0.0.1", numbers[0])) as connection:
            connection.sendall(b"GET /")

    threading.Timer(0.3, knock).start()
    assert host_checks.ports(None, "127.0.0.1", 0, 2)["ports"] == {first: "", second: ""}
    assert host_checks.ports(None, "127.0.0.1", 1, 2)["ports"] == dict.fromkeys(
        (first, second), "Connection refused"
    )
    found = host_checks.ports(None, "203.0.113.1", 0, 1)["ports"][first]
    assert found == "can't be bound (Cannot assign requested address)"
