"""ssh to a host, with gcloud's own reruns.

What the real `tpu-vm ssh` does when ssh itself fails (exit code 255: no connection, a lost one, or a remote command
that a signal ended): it runs the same command line again, up to ten times in all, with whatever is left on its standard
input. Any other exit code is passed on.
Source: lib/googlecloudsdk/command_lib/compute/tpus/tpu_vm/ssh.py (AttemptRunWithRetries) of Google Cloud SDK 528.0.0.
"""

import shutil
import sys
import time

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.fake_gcloud.commands import parent, worded
from tests.launch.fake_gcloud.synopsis import Call
from tests.launch.tpu_api.errors import named

ATTEMPTS = 10
FAILED = "[/usr/bin/ssh] exited with return code [255]."


def connect(cloud: Cloud, call: Call) -> int:
    """Does an ssh command and returns its exit code; raises RefusedError."""
    node, worker = ready_node(cloud, call), call.flags["--worker"]
    addresses = [end["ipAddress"] for end in node.get("networkEndpoints", ())]
    if "--dry-run" in call.flags:
        for index in range(len(addresses)) if worker == "all" else [int(worker)]:
            print(" ".join(line(cloud, call, node, index, addresses[index])))  # nothing is quoted
        return 0
    if worker == "all":  # which the real one takes; nobody here should: see the module's text
        raise call.refuse("one ssh per host here", 2)
    words = line(cloud, call, node, int(worker), addresses[int(worker)])
    connection = cloud.connection(node, int(worker), words)
    for attempt in range(ATTEMPTS):
        if (code := connection()) != 255:
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
        raise call.refuse(worded(named("absent", resource)))
    if node["state"] != "READY":
        raise call.refuse(f'This TPU has state "{node["state"]}", so it cannot be currently connected to.')
    return node


def line(cloud: Cloud, call: Call, node: dict, worker: int, address: str) -> list[str]:
    """Returns the ssh command of one worker; an option is one word, "-o NAME=VALUE"."""
    user, flags, folder = call.target.rpartition("@")[0] or cloud.user, call.flags, f"{cloud.user_home}/.ssh"
    options = {
        "CheckHostIP": "no",
        "HostKeyAlias": f"tpu.{node['id']}-{worker}-0+Sf9A",
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": f"{folder}/google_compute_known_hosts",
    }
    words = [f"-o {name}={value}" for name, value in options.items()]
    words += [part for flag in flags.get("--ssh-flag", ()) for part in flag.split()]
    key = flags.get("--ssh-key-file", f"{folder}/google_compute_engine")
    return [shutil.which("ssh"), "-T", "-i", key, *words, f"{user}@{address}", "--", flags["--command"]]
