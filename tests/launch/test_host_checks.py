"""host_checks.py: what a host says of itself before a run."""

import fcntl
import json
import os
import pathlib
import socket
import threading

import pytest
from jax._src import hardware_utils

pytestmark = pytest.mark.standard


@pytest.fixture
def free_ports() -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    numbers = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return numbers


def test_preflight_sees_who_holds_the_accelerator(host, tmp_path):
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    device, lock = tmp_path / "dev" / "accel0", tmp_path / "libtpu_lockfile"
    device.touch()
    where = {"MLM_POD_DEVICES": str(tmp_path / "dev"), "MLM_POD_LIBTPU_LOCK": str(lock)}
    found = host.ask("preflight", **where)
    assert found["accelerators"] == [str(device)] and found["holders"] == [] and found["libtpu_lock"] == "absent"
    assert found["disk_free"] > 0 and found["memory_free"] > 0 and found["code"] == [host.code]
    lock.touch()
    assert host.ask("preflight", **where)["libtpu_lock"] == "stale" and lock.exists()
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert host.ask("preflight", "--clear-lock", **where)["libtpu_lock"] == "held" and lock.exists()
    with device.open():
        held = host.ask("preflight", "--clear-lock", **where)
    assert [holder["pid"] for holder in held["holders"]] == [os.getpid()]
    assert held["libtpu_lock"] == "held" and lock.exists()
    assert host.ask("preflight", "--clear-lock", **where)["libtpu_lock"] == "absent" and not lock.exists()


def tpu(root: pathlib.Path, device: str, pages: str) -> pathlib.Path:
    """A /sys with a TPU of a kind, as Linux shows it; returns its file of huge pages."""
    folder, file = root / "bus/pci/devices/0000:00:05.0", root / "kernel/mm/transparent_hugepage/enabled"
    folder.mkdir(parents=True)
    file.parent.mkdir(parents=True)
    (folder / "vendor").write_text(hardware_utils._GOOGLE_PCI_VENDOR_ID + "\n")
    (folder / "device").write_text(device + "\n")
    file.write_text(pages + "\n")
    return file


@pytest.mark.parametrize("device", hardware_utils._TPU_PCI_DEVICE_IDS)
def test_huge_pages_where_jax_asks_for_them(host, tmp_path, monkeypatch, device):
    import host_checks

    file = tpu(tmp_path / "sys", device, "always [madvise] never")
    (tmp_path / "sudo").write_text(
        f"#!/bin/sh\nprintf '%s ' \"$@\" >{tmp_path}/asked; echo '[always] madvise never' >{file}\n"
    )
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setattr(host_checks.os, "access", lambda *_: False)  # these tests may be root's
    more = {"MLM_POD_SYS": str(tmp_path / "sys"), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert host.ask("preflight", **more)["huge_pages"] == ""
    asked = hardware_utils._TPU_PCI_DEVICE_IDS[device] >= hardware_utils.TpuVersion.v5e  # as jax's cloud_tpu_init does
    assert file.read_text().startswith("[always]" if asked else "always [madvise]")
    assert not asked or (tmp_path / "asked").read_text() == f"-n tee {file} "


def test_huge_pages_that_nobody_may_set(host, tmp_path, monkeypatch):
    import host_checks

    file = tpu(tmp_path / "sys", "0x0063", "always [madvise] never")
    (tmp_path / "sudo").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setattr(host_checks.os, "access", lambda *_: False)
    more = {"MLM_POD_SYS": str(tmp_path / "sys")}
    for path in (f"{tmp_path}:/usr/bin:/bin", str(tmp_path / "empty")):  # a password is wanted; there is no sudo
        assert host.ask("preflight", PATH=path, **more)["huge_pages"] == f"sudo sh -c 'echo always > {file}'"
    monkeypatch.undo()
    file.write_text("[always] madvise never\n")
    assert host.ask("preflight", **more)["huge_pages"] == ""


def together(host, address: str, numbers: list[int], workers: int) -> list[dict]:
    """What `ports` says on each worker, all at the same time."""
    variables = {"MLM_POD_PORTS": ",".join(map(str, numbers))}
    processes = [host.popen("ports", address, str(i), str(workers), **variables) for i in range(workers)]
    found = [process.communicate(timeout=60)[0] for process in processes]
    return [json.loads(text.removeprefix("mlm-host "))["ports"] for text in found]


def test_ports_that_all_reach(host, free_ports):
    assert together(host, "127.0.0.1", free_ports, 3) == [{str(number): "" for number in free_ports}] * 3


def test_a_port_that_is_held(host, free_ports, monkeypatch):
    import host_checks

    monkeypatch.setattr(host_checks, "WAIT", 0.5)
    with socket.create_server(("127.0.0.1", free_ports[0])):
        found = host.ask("ports", "127.0.0.1", "0", "1", MLM_POD_PORTS=",".join(map(str, free_ports)))["ports"]
    assert found == {str(free_ports[0]): "can't be bound (Address already in use)", str(free_ports[1]): ""}


def test_a_port_that_nobody_reaches(host, free_ports, monkeypatch):
    """A stranger who connects is no host."""
    import host_checks

    monkeypatch.setattr(host_checks, "WAIT", 1.0)
    variables = {"MLM_POD_PORTS": str(free_ports[0])}

    def knock() -> None:
        with socket.create_connection(("127.0.0.1", free_ports[0])) as connection:
            connection.sendall(b"GET /")

    threading.Timer(0.3, knock).start()
    assert host.ask("ports", "127.0.0.1", "0", "2", **variables)["ports"] == {str(free_ports[0]): ""}
    assert host.ask("ports", "127.0.0.1", "1", "2", **variables)["ports"] == {str(free_ports[0]): "Connection refused"}
    found = host.ask("ports", "203.0.113.1", "0", "1", **variables)["ports"][str(free_ports[0])]
    assert found == "can't be bound (Cannot assign requested address)"
