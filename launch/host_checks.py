"""What a host has before a run: disk, memory, accelerators, huge pages, and the ports of the coordinator.

For host.py, on a host: the standard library of Python 3.10 and later. $MLM_POD_DEVICES, $MLM_POD_SYS, $MLM_POD_PORTS
and $MLM_POD_LIBTPU_LOCK name others than a TPU VM's.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import platform
import re
import select
import shutil
import socket
import subprocess
import time

from host_setup import HostError, read

PORTS = (8474, 8476)  # of jax's coordination service and of Dask (config keys pod.port and pod.engine_port)
WAIT = 20.0  # seconds in which all hosts come to the first one's ports
GOOGLE = "0x1ae0"  # PCI vendor
EAGER = ("0x0063", "0x006f", "0x0076")  # PCI devices v5e, v6e and TPU7x: for them jax asks for huge pages


def preflight(root: pathlib.Path, code: str, clear_lock: bool) -> dict:
    """Returns what this host has, and who holds it; "installed": the hash of the packages for `code`, or None."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    devices = os.environ.get("MLM_POD_DEVICES", "/dev")
    lock = pathlib.Path(os.environ.get("MLM_POD_LIBTPU_LOCK", "/tmp/libtpu_lockfile"))
    accelerators = sorted(glob.glob(f"{devices}/accel*") + glob.glob(f"{devices}/vfio/*"))
    holders = _holders({os.path.realpath(path) for path in accelerators})
    state = _lock_state(lock, bool(holders))
    if clear_lock and state == "stale":
        try:
            lock.unlink(missing_ok=True)
            state = "absent"
        except OSError as error:
            raise HostError(f"{lock} is stale and can't be removed ({error.strerror}): sudo rm {lock}") from error
    installed = (read(root / "code" / f".{code}.json") or {}).get("requirements")
    complete = installed and (root / "venv" / installed / "python.json").exists()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "code": [path.name for path in (root / "code").glob("[0-9a-f]*") if code in ("", path.name)],
        "installed": installed if complete else None,
        "disk_free": shutil.disk_usage(root).free,
        "memory_free": 1024 * int(re.search("MemAvailable: +([0-9]+)", pathlib.Path("/proc/meminfo").read_text())[1]),
        "accelerators": accelerators,
        "holders": holders,
        "libtpu_lock": state,
        "huge_pages": _set_huge_pages(),
    }


def _holders(paths: set[str]) -> list[dict]:
    """Returns [{"pid", "command"}] of the processes that have one of these files open, as far as we may see them."""
    commands = {}
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*") if paths else ():  # not pathlib's: a process may end meanwhile
        with contextlib.suppress(OSError):
            if str(pathlib.Path(descriptor).readlink()) in paths:
                process = descriptor.split("/")[2]
                # the name alone: arguments are private
                commands[int(process)] = pathlib.Path(f"/proc/{process}/comm").read_text().strip()
    return [{"pid": process, "command": commands[process]} for process in sorted(commands)]


def _lock_state(lock: pathlib.Path, in_use: bool) -> str:
    """Returns "absent", "held" or "stale": libtpu leaves its lock file behind when it is killed."""
    try:
        inode = lock.stat().st_ino
    except OSError:
        return "absent"
    locks = pathlib.Path("/proc/locks").read_text()  # of every kind, and of every user
    return "held" if f":{inode} " in locks or in_use or _holders({str(lock.resolve())}) else "stale"


def _set_huge_pages() -> str:
    """Turns transparent huge pages on where jax warns without them; returns "" or the line that a person must type."""
    root = pathlib.Path(os.environ.get("MLM_POD_SYS", "/sys"))
    devices = [path for path in root.glob("bus/pci/devices/*") if (path / "vendor").exists()]
    models = {(path / "device").read_text().strip() for path in devices if GOOGLE in (path / "vendor").read_text()}
    file = root / "kernel/mm/transparent_hugepage/enabled"
    if not models & set(EAGER) or not file.exists() or "[always]" in file.read_text():
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if os.access(file, os.W_OK):
            file.write_text("always")
        else:
            subprocess.run(["sudo", "-n", "tee", file], input=b"always", capture_output=True, timeout=10, check=False)
    return "" if "[always]" in file.read_text() else f"sudo sh -c 'echo always > {file}'"


def ports(address: str, worker: int, workers: int) -> dict:
    """Tries the coordinator's ports at `address`, the first host's, all hosts at the same time.

    Worker 0 listens until each of the others has been there, and these connect. Returns {"ports": {number: "" or what
    is wrong}}, of worker 0 as the end of "port N ...", of the others as the reason why it can't be reached.
    """
    numbers = [int(number) for number in os.environ.get("MLM_POD_PORTS", "").split(",") if number] or PORTS
    limit = time.monotonic() + WAIT
    if worker:
        return {"ports": {str(number): _connect(address, number, worker, limit) for number in numbers}}
    faults, missing = dict.fromkeys(map(str, numbers), ""), {}
    for number in numbers:
        try:
            missing[socket.create_server((address, number), backlog=workers)] = set(range(1, workers))
        except OSError as error:
            faults[str(number)] = f"can't be bound ({os.strerror(error.errno)})"
    while any(missing.values()) and time.monotonic() < limit:
        for server in select.select(list(missing), [], [], 0.5)[0]:
            with contextlib.suppress(OSError, ValueError), server.accept()[0] as connection:
                connection.settimeout(2.0)
                missing[server].discard(int(connection.recv(8)))
    for server in missing:
        server.close()
    return {"ports": faults}


def _connect(address: str, number: int, worker: int, limit: float) -> str:
    """Returns "" once the first host has taken our number, or why it has not."""
    while True:
        try:
            with socket.create_connection((address, number), timeout=5.0) as connection:
                connection.sendall(str(worker).encode())
                return ""
        except OSError as error:  # the first host may come later than we do
            if time.monotonic() > limit:
                return error.strerror or str(error)
            time.sleep(0.2)
