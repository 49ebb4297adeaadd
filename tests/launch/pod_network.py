"""Hosts on one machine, for tests/pod.sh: each with an address, a name, a home and processes of its own, and an sshd.

A host is a network, mount, name and process namespace. To kill its first process is to pull its plug: everything that
ran there is gone at once, and nothing answers at its address. Needs root, iproute2 and openssh-server.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from typing import Self

NETWORK = "10.77.0"  # .1, .2, ... are the hosts, .254 is the researcher's laptop
BRIDGE = "mlmpod"
# $1: the host's network namespace, $2: its address
JOIN = f"""
set -e
ip netns add $1
ip link add ${{1}}v type veth peer name eth0 netns $1
ip link set ${{1}}v master {BRIDGE} up
ip -n $1 address add $2/24 dev eth0
ip -n $1 link set eth0 up
ip -n $1 link set lo up
"""
# In the new namespaces: $1 is the host's name, $2 has its /etc, and a TPU on the PCI bus, for jax.
FIRST_PROCESS = """
hostname "$1" && mount --bind "$2/passwd" /etc/passwd && mount --bind "$2/hosts" /etc/hosts &&
  mount --bind "$2/pci" /sys/bus/pci/devices && exec /usr/sbin/sshd -D -e -f "$2/sshd_config"
"""
SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
AuthorizedKeysCommand {keys_command}
AuthorizedKeysCommandUser root
StrictModes no
UsePAM no
PidFile none
SetEnv {variables}
"""
SSH = "-oIdentitiesOnly=yes -oBatchMode=yes -oConnectTimeout=2 -oStrictHostKeyChecking=no -oLogLevel=ERROR"


class Hosts:
    """Hosts joined by a bridge; a context manager that leaves nothing behind."""

    def __init__(self, folder: pathlib.Path, variables: list[dict[str, str]], keys_command: str):
        """None runs yet; a key of ours logs in, and those that the command prints.

        Args: folder for keys, homes and logs; variables of the environment of each host.
        """
        self.folder = folder
        self.count = len(variables)
        self.variables = variables
        self.keys_command = keys_command
        self.addresses = [f"{NETWORK}.{index + 1}" for index in range(self.count)]
        self.key = folder / "key"
        self._first: dict[int, subprocess.Popen] = {}
        # hosts die by the plug, by a deleted TPU and by the test's end
        self._changing = threading.RLock()

    def __enter__(self) -> Self:
        self._remove_network()  # of a test that was killed
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("key", "host_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        _do("ip", "link", "add", BRIDGE, "type", "bridge")
        _do("ip", "address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        _do("ip", "link", "set", BRIDGE, "up")
        for index, address in enumerate(self.addresses):
            _do("bash", "-c", JOIN, "bash", f"{BRIDGE}{index}", address)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, stack: types.TracebackType | None
    ) -> None:
        for index in range(self.count):
            self.kill(index)
        self._remove_network()

    def home(self, index: int) -> pathlib.Path:
        """Returns the home of a host's user, as the machine that carries all hosts sees it."""
        return self.folder / str(index) / "home"

    def start(self, index: int) -> None:
        """Starts a host as a new machine: its home is empty. Returns when it takes connections."""
        folder = self.folder / str(index)
        shutil.rmtree(folder, ignore_errors=True)
        self.home(index).mkdir(parents=True)
        others = [
            user
            for user in pathlib.Path("/etc/passwd").read_text().splitlines()
            if not user.startswith("root:")
        ]
        users = [f"root:x:0:0:root:{self.home(index)}:/bin/bash", *others]
        (folder / "passwd").write_text("\n".join(users) + "\n")
        names = [f"{address} {BRIDGE}-{number}" for number, address in enumerate(self.addresses)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        chip = folder / "pci" / "0000:00:05.0"
        chip.mkdir(parents=True)
        (chip / "vendor").write_text("0x1ae0\n")
        (chip / "device").write_text("0x005e\n")  # v4
        (chip / "class").write_text("0x120000\n")  # which gloo reads
        _do("ip", "link", "set", f"{BRIDGE}{index}v", "up")
        variables = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"} | self.variables[index]
        config = SSHD.format(
            address=self.addresses[index],
            folder=self.folder,
            keys_command=self.keys_command,
            variables=" ".join(f'"{name}={value}"' for name, value in variables.items()),
        )
        (folder / "sshd_config").write_text(config)
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        first = ["bash", "-c", FIRST_PROCESS, "bash", f"{BRIDGE}-{index}", folder]
        with (folder / "sshd.log").open("w") as log:
            command = ["ip", "netns", "exec", f"{BRIDGE}{index}", *own, *first]
            self._first[index] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 20
        while not _answers(self.addresses[index]):
            assert time.monotonic() < deadline, (folder / "sshd.log").read_text()
            time.sleep(0.1)

    def kill(self, index: int) -> None:
        """Pulls the plug of a host: its network first, so that nobody is told of its end."""
        with self._changing:
            if index in self._first:
                _do("ip", "link", "set", f"{BRIDGE}{index}v", "down")
                self._first[index].kill()
                self._first.pop(index).wait()

    def ssh(self, index: int, command: str) -> list[str]:
        """Returns the arguments that run a command on a host."""
        known = ["-oUserKnownHostsFile=/dev/null", f"-oIdentityFile={self.key}"]
        return ["ssh", *SSH.split(), *known, f"root@{self.addresses[index]}", command]

    def _remove_network(self) -> None:
        # the link by itself: with its namespace it goes some time later
        for index in range(self.count):
            subprocess.run(["ip", "link", "delete", f"{BRIDGE}{index}v"], capture_output=True)
            subprocess.run(["ip", "netns", "delete", f"{BRIDGE}{index}"], capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _do(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
