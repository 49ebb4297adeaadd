"""What a host has before a run: disk, memory, accelerators, huge pages, and the ports of the coordinator.

For host.py, on a host: the standard library of Python 3.10 and later.
"""

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

PORTS = (8474, 8476)  # of jax's coordination service and of Dask (config key pod.port)
# of a TPU VM
DEVICES, SYS, LOCK = (pathlib.Path(path) for path in ("/dev", "/sys", "/tmp/libtpu_lockfile"))
LITTLE_DISK = 10e9  # bytes: packages and a checkpoint that is being written
WAIT = 20.0  # seconds in which all hosts come to the first one's ports
GOOGLE = "0x1ae0"  # PCI vendor
# v5e, v6e, TPU7x, TPU8i, TPU8t: jax asks for huge pages
EAGER = ("0x0063", "0x006f", "0x0076", "0x0083", "0x007c")


def preflight(root: pathlib.Path, code: str, runs: list[dict]) -> dict:
    """Returns what this host has, and sentences about it: "problems" keep a run from starting, "remarks" do not.

    code: hash; "packages": the hash of those installed for it, or None; runs: [{"id", "attempt"}] that are alive here.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    # not vfio/vfio, which is of no device
    accelerators = [*DEVICES.glob("accel*"), *DEVICES.glob("vfio/[0-9]*")]
    has_code = (root / "code" / code).is_dir()
    packages = (read(root / "code" / f".{code}.json") or {}).get("packages")
    if not packages or not (root / "venv" / packages / "python.json").exists():
        packages = None
    holders = ", ".join(_holders({os.path.realpath(path) for path in accelerators}))
    alive = ", ".join(f"{run['id']!r} (attempt {run['attempt']})" for run in runs)
    disk = shutil.disk_usage(root).free
    line = _set_huge_pages()
    memory = re.search("MemAvailable: +([0-9]+)", pathlib.Path("/proc/meminfo").read_text())[1]
    problems = {
        f"code {code[:12]} is missing: launch/tpu.py sync": not has_code,
        "its packages are not installed: launch/tpu.py sync": has_code and not packages,
        f"the accelerator is held by process {holders}": holders,
        "libtpu's lock is held by a process that we can't see": not holders and _is_locked(LOCK),
        f"run {alive} is alive there: launch/tpu.py stop": runs,
    }
    remarks = {
        "less than 10 GB of disk are free": disk < LITTLE_DISK,
        "no accelerator is to be seen": not accelerators,
        f"transparent huge pages are off, and a TPU starts slowly: {line}": line,
    }
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "has_code": has_code,
        "packages": packages,
        "accelerators": len(accelerators),
        "free": f"disk {disk / 1e9:.0f} GB, memory {int(memory) / 1e6:.0f} GB",
        "runs": runs,
        "problems": [sentence for sentence, is_true in problems.items() if is_true],
        "remarks": [sentence for sentence, is_true in remarks.items() if is_true],
    }


def _holders(paths: set[str]) -> list[str]:
    """Returns "PID (NAME)" of the processes that have one of these files open, as far as we may see them."""
    names = {}
    # not pathlib's: a process may end meanwhile
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*") if paths else ():
        with contextlib.suppress(OSError):
            if str(pathlib.Path(descriptor).readlink()) in paths:
                process = descriptor.split("/")[2]
                # the name alone: arguments are private
                names[process] = pathlib.Path(f"/proc/{process}/comm").read_text().strip()
    return [f"{process} ({name})" for process, name in sorted(names.items())]


def _is_locked(lock: pathlib.Path) -> bool:
    """Whether libtpu's lock file is in use. Removes one that nobody holds, which libtpu leaves when it is killed."""
    try:
        inode = lock.stat().st_ino
    except OSError:
        return False
    if f":{inode} " in pathlib.Path("/proc/locks").read_text():  # of every kind, and of every user
        return True
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"{lock} is stale and can't be removed ({error.strerror}): sudo rm {lock}"
        ) from error
    return False


def _set_huge_pages() -> str:
    """Turns transparent huge pages on where jax warns without them; returns "" or the line that a person must type."""
    devices = [path for path in SYS.glob("bus/pci/devices/*") if (path / "vendor").exists()]
    models = {
        (path / "device").read_text().strip()
        for path in devices
        if GOOGLE in (path / "vendor").read_text()
    }
    file = SYS / "kernel/mm/transparent_hugepage/enabled"
    if not models & set(EAGER) or not file.exists() or "[always]" in file.read_text():
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if os.access(file, os.W_OK):
            file.write_text("always")
        else:
            subprocess.run(
                ["sudo", "-n", "tee", file],
                input=b"always",
                capture_output=True,
                timeout=10,
                check=False,
            )
    return "" if "[always]" in file.read_text() else f"sudo sh -c 'echo always > {file}'"


def ports(_: pathlib.Path, address: str, worker: int, workers: int) -> dict:
    """Tries the coordinator's ports at `address`, the first host's, all hosts at the same time.

    Worker 0 listens until each of the others has been there, and these connect. Returns {"ports": {number: "" or what
    is wrong}}, of worker 0 as the end of "port N ...", of the others as the reason why it can't be reached.
    """
    limit = time.monotonic() + WAIT
    if worker:
        return {
            "ports": {str(number): _connect(address, number, worker, limit) for number in PORTS}
        }
    faults = dict.fromkeys(map(str, PORTS), "")
    missing = {}
    for number in PORTS:
        try:
            missing[socket.create_server((address, number), backlog=workers)] = set(
                range(1, workers)
            )
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
