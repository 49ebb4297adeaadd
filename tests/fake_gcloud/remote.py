"""ssh to a worker, with the faults of a connection and with gcloud's own reruns, and ssh without gcloud.

What the real `tpu-vm ssh` does when ssh itself fails (exit code 255: no connection, a lost one, or a remote command
that a signal ended): it runs the same command line again, up to ten times in all, for one worker as for many, with
whatever is left on its standard input. Any other exit code is passed on.
Source: lib/googlecloudsdk/command_lib/compute/tpus/tpu_vm/ssh.py (AttemptRunWithRetries) of Google Cloud SDK 528.0.0.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

from cloud import Cloud
from synopsis import Call

ATTEMPTS = 10
# Faults of which one attempt of ten is enough to lose the caller's command, and what ssh says to each.
WORDS = {
    "ssh255_before": "ssh: connect to host {ip} port 22: Connection timed out",
    "ssh255_after": "client_loop: send disconnect: Broken pipe",
    "drop_midstream": "Connection to {ip} closed by remote host.\nclient_loop: send disconnect: Broken pipe",
    "keys_not_propagated": "me@{ip}: Permission denied (publickey).",
}


class Link:
    """The way to one worker of a TPU."""

    def __init__(self, cloud: Cloud, name: str, worker: int, ip: str) -> None:
        self.cloud, self.name, self.worker, self.ip = cloud, name, worker, ip
        self.real = None
        if "FAKE_GCLOUD_SSH" in os.environ:
            self.real = json.loads(pathlib.Path(os.environ["FAKE_GCLOUD_SSH"]).read_text())

    @property
    def id(self) -> str:
        """The TPU's number, which is part of its hosts' keys' names."""
        return self.cloud.load("nodes", self.name)["id"]

    def alive(self) -> bool:
        """Says whether the machine is there."""
        node = self.cloud.load("nodes", self.name)
        return node is not None and node["state"] == "READY"

    def options(self) -> list[str]:
        """Returns the options of a real ssh."""
        given = [word for one in self.real.get("options", []) for word in ([one] if one[:1] == "-" else ["-o", one])]
        return ["-i", self.real["identity"], *given]

    def start(self, command: str, stdout: int | None = None, stderr: int | None = None) -> subprocess.Popen:
        """Starts a command on the worker, as sshd does: a shell of its own session, nothing of our environment."""
        if self.real:
            target = f"{self.real['user']}@{self.ip}"
            argv = ["ssh", "-T", *self.options(), target, "--", command]
            return subprocess.Popen(argv, stdout=stdout, stderr=stderr)
        return subprocess.Popen(
            ["/bin/bash", "-c", command],
            cwd=self.cloud.home(self.name, self.worker),
            env=self.cloud.environment(self.name, self.worker),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def leave(self, process: subprocess.Popen) -> None:
        """Cuts the connection: what was started there goes on."""
        if self.real:
            process.kill()


def connect(cloud: Cloud, call: Call) -> int:
    """Does an ssh command and returns its exit code; raises RefusedError."""
    if call.remainder or "--output-directory" in call.flags:
        raise SystemExit("fake gcloud: this part of ssh is not played here")
    worker = call.flags.get("--worker", "0")
    if worker == "all" and "--dry-run" in call.flags:
        return _dry_run(cloud, call)
    if not worker.isdigit():
        # The real one takes "all", lists and ranges. Nobody here should: see the module's text.
        raise call.refuse(f"Invalid value for [--worker]: one ssh per host here, not {worker!r}", 2)
    if "--command" not in call.flags:
        raise SystemExit("fake gcloud: ssh without --command would open a shell")
    name, remote = _target(call)
    link = _link(cloud, call, name, int(worker))
    with cloud.lock():
        fault = cloud.fault("tpu-vm", "ssh", link.worker, remote)
    kind = fault["fault"] if fault else None
    if kind == "silent":
        time.sleep(fault.get("seconds", 24 * 3600))
    begin = "Using ssh batch size of 1. Attempting to SSH into 1 nodes with a total of 1 workers."
    print(begin, file=sys.stderr)
    for attempt in range(ATTEMPTS):
        print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
        failing = kind in WORDS and attempt < fault.get("attempts", ATTEMPTS)
        code = _attempt(link, call, fault if failing else None, attempt)
        if code != 255:
            return code
        what = f"[/usr/bin/ssh] exited with return code [{code}]."
        if attempt < ATTEMPTS - 1:
            print(f"Retrying: SSH command error: {what}", file=sys.stderr, flush=True)
            time.sleep(cloud.settings()["retry_seconds"])
    raise call.refuse(what, code)


def _dry_run(cloud: Cloud, call: Call) -> int:
    """Prints the ssh command of each worker, as gcloud does: joined by spaces, nothing quoted."""
    name, remote = _target(call)
    user = call.positionals[0].rpartition("@")[0] or "me"
    with cloud.lock():
        hosts = len((cloud.load("nodes", name) or {}).get("networkEndpoints", ()))
    for worker in range(hosts):
        link = _link(cloud, call, name, worker)
        home = "/home/some one" if not link.real else str(pathlib.Path.home())
        identity = link.real["identity"] if link.real else call.flags.get("--ssh-key-file", f"{home}/.ssh/google_key")
        options = {
            "CheckHostIP": "no", "HashKnownHosts": "no", "HostKeyAlias": f"tpu.{link.id}-{worker}-0+Sf9A",
            "IdentitiesOnly": "yes", "StrictHostKeyChecking": call.flags.get("--strict-host-key-checking", "no"),
            "UserKnownHostsFile": f"{home}/.ssh/google_compute_known_hosts",
        }  # fmt: skip
        if link.real:
            user = link.real["user"]
            options = dict(word.removeprefix("-o").split("=", 1) for word in link.real["options"])
        if "--tunnel-through-iap" in call.flags:
            options["ProxyCommand"] = (
                f"'/usr/bin/python3' '-S' '/usr/lib/gcloud.py' alpha compute start-iap-tunnel '{name}-w-{worker}' '%p' "
                f"--listen-on-stdin --project={call.flags['--project']} --zone={call.flags['--zone']}"
            )
        words = [_on_path("ssh"), "-T", "-i", identity, *(f"-o {key}={value}" for key, value in options.items())]
        words += [part for flag in call.flags.get("--ssh-flag", ()) for part in flag.split()]
        print(" ".join([*words, f"{user}@{link.ip}", "--", remote]))
    return 0


def _on_path(program: str) -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return next(f"{folder}/{program}" for folder in folders if os.access(f"{folder}/{program}", os.X_OK))


def alone(cloud: Cloud, argv: list[str]) -> int:
    """Does an ssh that gcloud has not started, and returns its exit code: 255 for what is wrong with it."""
    with_value, without = "iolpFL", "TNCvq"  # options of OpenSSH, as far as they are used here
    words, options = list(argv), {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word[1:] and all(letter in without for letter in word[1:]):
            continue
        if word[1:2] not in tuple(with_value):
            print(f"unknown option -- {word[1:2]}", file=sys.stderr)
            return 255
        value = word[2:] or words.pop(0)
        if word[1] == "o":
            key, _, value = value.partition("=")
            if not value:
                print(f"command-line line 0: missing argument for {key}.", file=sys.stderr)
                return 255
            options[key] = value
    match = re.fullmatch(r"tpu\.([0-9]+)-([0-9]+)-.*", options.get("HostKeyAlias", ""))
    name, worker = _by_alias(cloud, match) if match else ("", 0)
    node = cloud.load("nodes", name) if name else None
    endpoints = (node or {}).get("networkEndpoints", [])
    ip = words[0].rpartition("@")[2]
    if worker >= len(endpoints) or endpoints[worker]["ipAddress"] != ip:
        print(f"ssh: connect to host {ip} port 22: Connection timed out", file=sys.stderr)
        return 255
    call = Call("tpu-vm ssh")
    call.positionals, call.flags["--command"] = [name], " ".join(words[1 + (words[1:2] == ["--"]) :])
    _, remote = _target(call)
    with cloud.lock():  # a fault of the connection meets gcloud's ssh after this one as well
        fault = cloud.fault("tpu-vm", "ssh", worker, remote, kept=tuple(WORDS))
    if fault and fault["fault"] == "silent":
        time.sleep(fault.get("seconds", 24 * 3600))
    return _attempt(Link(cloud, name, worker, ip), call, fault, 0)


def _by_alias(cloud: Cloud, match: re.Match) -> tuple[str, int]:
    nodes = {cloud.load("nodes", name)["id"]: name for name in cloud.names("nodes")}
    return nodes.get(match[1], ""), int(match[2])


def _target(call: Call) -> tuple[str, str]:
    """Returns the TPU's name and the text in which a fault's "match" is looked for."""
    return call.positionals[0].rpartition("@")[2], call.flags["--command"]


def _link(cloud: Cloud, call: Call, name: str, worker: int) -> Link:
    node = cloud.load("nodes", name)
    full = f"projects/{call.flags['--project']}/locations/{call.flags['--zone']}/nodes/{name}"
    if node is None or node["name"] != full:
        raise call.refuse(f"NOT_FOUND: Resource '{full}' was not found.")
    if node["state"] in ("PREEMPTED", "TERMINATED"):
        raise call.refuse(f'This TPU has terminal state "{node["state"]}", so it cannot be used anymore.')
    if node["state"] in ("STOPPED", "STOPPING", "DELETING"):
        raise call.refuse(f'This TPU has state "{node["state"]}", so it cannot be currently connected to.')
    endpoints = node.get("networkEndpoints", [])
    if node["state"] != "READY":
        print(
            f'WARNING: The TPU VM "{name}" is in state "{node["state"]}", therefore the TPU may not be available or '
            "reachable. If the connection fails, please try again later.",
            file=sys.stderr,
        )
    if worker >= len(endpoints):
        raise call.refuse(
            f"Invalid value for [--worker]: worker index {worker} is larger than the valid worker indexes on this TPU "
            f"VM. Please only use indexes in the range [0, {len(endpoints) - 1}], inclusive."
        )
    return Link(cloud, name, worker, endpoints[worker]["ipAddress"])


def _attempt(link: Link, call: Call, fault: dict | None, attempt: int) -> int:
    """Makes one connection; returns ssh's exit code."""
    kind = fault["fault"] if fault else None
    if not link.alive():
        kind = "ssh255_before"
    if kind in ("ssh255_after", "drop_midstream") and attempt > 0:
        # A fault of the connection meets the command once; while it lasts, the reruns don't even get there.
        kind = "ssh255_before"
    if kind in ("ssh255_after", "drop_midstream"):
        _start_and_lose(link, call.flags["--command"], fault)
    if kind:
        print(WORDS[kind].format(ip=link.ip), file=sys.stderr)
        return 255
    code = link.start(call.flags["--command"]).wait()
    # A shell that a signal ended has no exit status to send: ssh gives 255, as for a lost connection.
    return 255 if code < 0 else code


def _start_and_lose(link: Link, command: str, fault: dict) -> None:
    """Starts the command, lets some of its output through (drop_midstream), and goes away: the command goes on."""
    with open(link.cloud.root / f"output-{os.getpid()}", "w+b") as output:
        # Not our stderr: the command lives on, and whoever reads that of gcloud would wait for it.
        process = link.start(command, stdout=output, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + fault.get("seconds", 0.3 if fault["fault"] == "ssh255_after" else 5)
        wanted = fault.get("bytes", 100)
        while time.monotonic() < deadline:
            size = os.fstat(output.fileno()).st_size
            if fault["fault"] == "drop_midstream" and (size > wanted or process.poll() is not None):
                sent = os.pread(output.fileno(), min(wanted, max(size // 2, size - 1) if size <= wanted else wanted), 0)
                sys.stdout.buffer.write(sent)
                sys.stdout.buffer.flush()
                break
            time.sleep(0.01)
        link.leave(process)
