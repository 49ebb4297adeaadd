"""ssh to a host, with gcloud's own reruns and the faults of a connection, and ssh without gcloud.

What the real `tpu-vm ssh` does when ssh itself fails (exit code 255: no connection, a lost one, or a remote command
that a signal ended): it runs the same command line again, up to ten times in all, with whatever is left on its standard
input. Any other exit code is passed on.
Source: lib/googlecloudsdk/command_lib/compute/tpus/tpu_vm/ssh.py (AttemptRunWithRetries) of Google Cloud SDK 528.0.0.
"""

import getopt
import os
import re
import subprocess
import sys
import time

from tests.launch.fake_gcloud.cloud import SSH_FAULTS, Cloud
from tests.launch.fake_gcloud.commands import parent, worded
from tests.launch.fake_gcloud.synopsis import Call
from tests.launch.tpu_api.errors import named

ATTEMPTS = 10
# What ssh says to each fault.
REASONS = {
    "ssh255_before": "ssh: connect to host {ip} port 22: Connection timed out",
    "ssh255_after": "client_loop: send disconnect: Broken pipe",
    "drop_midstream": "Connection to {ip} closed by remote host.\nclient_loop: send disconnect: Broken pipe",
    "keys_not_propagated": "me@{ip}: Permission denied (publickey).",
}
FAILED = "[/usr/bin/ssh] exited with return code [255]."


def connect(cloud: Cloud, call: Call) -> int:
    """Does an ssh command and returns its exit code; raises RefusedError."""
    node, worker = ready_node(cloud, call), call.flags.get("--worker", "0")
    addresses = [end["ipAddress"] for end in node.get("networkEndpoints", ())]
    addresses = addresses[:: max(1, len(node.get("networkConfigs", ())))]
    workers = range(len(addresses)) if worker == "all" else [int(worker)]
    batch = len(workers) if call.track else 1
    begin = f"Using ssh batch size of {batch}. Attempting to SSH into 1 nodes with a total of {len(workers)} workers."
    if max(workers) >= len(addresses):
        raise call.refuse(
            f"Invalid value for [--worker]: worker index {worker} is larger than the valid worker indexes on this TPU "
            f"VM. Please only use indexes in the range [0, {len(addresses) - 1}], inclusive."
        )
    lines = [line(cloud, call, node, index, addresses[index]) for index in workers]
    print(begin, file=sys.stderr)
    if "--dry-run" in call.flags:
        print("\n".join(" ".join(words) for words in lines))  # nothing is quoted
        return 0
    if worker == "all":  # which the real one takes; nobody here should: see the module's text
        raise call.refuse("one ssh per host here", 2)
    connection = getattr(cloud, "Connection", Connection)(cloud, node, int(worker), lines[0])
    for attempt in range(ATTEMPTS):
        print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
        if (code := connection.attempt(attempt)) != 255:
            return code
        if attempt < ATTEMPTS - 1:
            print(f"Retrying: SSH command error: {FAILED}", file=sys.stderr, flush=True)
            time.sleep(cloud.settings()["retry_seconds"])
    raise call.refuse(FAILED, 255)


def ready_node(cloud: Cloud, call: Call) -> dict:
    """Returns the node, if ssh may go there; raises RefusedError."""
    resource = f"{parent(call)}/nodes/{call.target.rpartition('@')[2]}"
    node = cloud.look(resource)
    if node is None:
        raise call.refuse(worded(named("absent", resource=resource)))
    if node["state"] in ("PREEMPTED", "TERMINATED"):
        raise call.refuse(f'This TPU has terminal state "{node["state"]}", so it cannot be used anymore.')
    if node["state"] in ("STOPPED", "STOPPING", "DELETING"):
        raise call.refuse(f'This TPU has state "{node["state"]}", so it cannot be currently connected to.')
    return node


def line(cloud: Cloud, call: Call, node: dict, worker: int, address: str) -> list[str]:
    """Returns the ssh command of one worker; an option is one word, "-o NAME=VALUE"."""
    user, flags, folder = call.target.rpartition("@")[0] or cloud.user, call.flags, f"{cloud.user_home}/.ssh"
    options = {
        "CheckHostIP": "no", "HashKnownHosts": "no", "HostKeyAlias": f"tpu.{node['id']}-{worker}-0+Sf9A",
        "IdentitiesOnly": "yes", "StrictHostKeyChecking": flags.get("--strict-host-key-checking", "no"),
        "UserKnownHostsFile": f"{folder}/google_compute_known_hosts",
    }  # fmt: skip
    words = [f"-o {name}={value}" for name, value in options.items()]
    if "--tunnel-through-iap" in flags:
        place = f"--project={flags['--project']} --zone={flags['--zone']} --verbosity=warning"
        host = f"t1v-n-{node['id']}-w-{worker}"
        tunnel = f"alpha compute start-iap-tunnel '{host}' '%p' --listen-on-stdin {place}"
        words += [f"-o ProxyCommand /usr/bin/python3 /usr/lib/gcloud.py {tunnel}", "-o ProxyUseFdpass=no"]
    words += [part for flag in flags.get("--ssh-flag", ()) for part in flag.split()]
    program = next(f"{path}/ssh" for path in os.environ["PATH"].split(os.pathsep) if os.access(f"{path}/ssh", os.X_OK))
    key = flags.get("--ssh-key-file", f"{folder}/google_compute_engine")
    return [program, "-T", "-i", key, *words, f"{user}@{address}", "--", flags["--command"]]


class Connection:
    """To a host that is a folder; `attempt` returns ssh's exit code."""

    def __init__(self, cloud: Cloud, node: dict, worker: int, words: list[str]):
        self.cloud, self.name, self.worker = cloud, node["name"].rpartition("/")[2], worker
        self.command, self.ip = words[-1], words[-3].rpartition("@")[2]
        with cloud.lock():
            self.fault = cloud.fault("tpu-vm ssh", SSH_FAULTS, self.command, worker)
        if self.fault.get("fault") == "silent":
            time.sleep(24 * 3600)

    def attempt(self, number: int) -> int:
        kind = self.fault.get("fault")
        if (self.cloud.load("nodes", self.name) or {}).get("state") != "READY":
            kind = "ssh255_before"
        elif kind in ("ssh255_after", "drop_midstream") and number == 0:
            self._start_and_lose(kind)
        elif kind in ("ssh255_after", "drop_midstream"):  # while it lasts, the reruns don't even get there
            kind = "ssh255_before"
        elif kind is None:
            code = self._start().wait() if self.command != "true" else 0
            # A shell that a signal ended has no exit status to send: ssh gives 255, as for a lost connection.
            return 255 if code < 0 else code
        print(REASONS[kind].format(ip=self.ip), file=sys.stderr)
        return 255

    def _start(self, stdout: int | None = None, stderr: int | None = None) -> subprocess.Popen:
        """Starts a command on the host, as sshd does: a shell of its own session, nothing of our environment."""
        return subprocess.Popen(
            ["/bin/bash", "-c", self.command],
            cwd=self.cloud.home(self.name, self.worker),
            env=self.cloud.environment(self.name, self.worker),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def _start_and_lose(self, kind: str) -> None:
        """Starts the command, lets half of its first output through (drop_midstream), and goes away: it goes on."""
        with open(self.cloud.root / f"output-{os.getpid()}", "w+b") as output:
            # Not our stderr: the command lives on, and whoever reads that of gcloud would wait for it.
            process = self._start(output, subprocess.DEVNULL)
            deadline = time.monotonic() + (0.3 if kind == "ssh255_after" else 5)
            while time.monotonic() < deadline:
                size = os.fstat(output.fileno()).st_size
                if kind == "drop_midstream" and (size or process.poll() is not None):
                    os.write(sys.stdout.fileno(), os.pread(output.fileno(), size // 2, 0))
                    return
                time.sleep(0.01)


def host_of(cloud: Cloud, argv: list[str]) -> tuple[dict, int]:
    """Returns the node and the worker that an ssh without gcloud reaches; raises ValueError for what is wrong."""
    flags, (target, *_) = getopt.getopt(argv, "TNCvqi:o:l:p:F:L:")
    match = re.search(r"HostKeyAlias=tpu\.([0-9]+)-([0-9]+)-", " ".join(value for _, value in flags))
    nodes, ip = {node["id"]: node for node in cloud.all("nodes").values()}, target.rpartition("@")[2]
    node = nodes.get(match and match[1], {})
    if ip not in [end["ipAddress"] for end in node.get("networkEndpoints", ())]:
        raise ValueError(REASONS["ssh255_before"].format(ip=ip))
    return node, int(match[2])


def alone(cloud: Cloud, argv: list[str]) -> int:
    """Does an ssh that gcloud has not started, and returns its exit code: 255 for what is wrong with it."""
    try:
        node, worker = host_of(cloud, argv)
    except (getopt.GetoptError, ValueError) as error:
        print(error, file=sys.stderr)
        return 255
    return Connection(cloud, node, worker, argv[-3:]).attempt(0)
