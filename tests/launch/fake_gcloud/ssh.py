"""ssh to a host."""

import shutil

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.fake_gcloud.commands import parent, worded
from tests.launch.fake_gcloud.synopsis import Call
from tests.launch.tpu_api.errors import named


def connect(cloud: Cloud, call: Call) -> int:
    """Does an ssh command and returns its exit code; raises RefusedError."""
    node, worker = ready_node(cloud, call), call.flags["--worker"]
    addresses = [end["ipAddress"] for end in node.get("networkEndpoints", ())]
    if "--dry-run" in call.flags:
        for index in range(len(addresses)) if worker == "all" else [int(worker)]:
            print(" ".join(line(cloud, call, node, index, addresses[index])))  # nothing is quoted
        return 0
    if worker == "all":  # which the real one takes; nobody here should: each host has its own answer
        raise call.refuse("one ssh per host here", 2)
    words = line(cloud, call, node, int(worker), addresses[int(worker)])
    code = cloud.connect(node, int(worker), words)
    if code == 255:  # after ten tries of its own
        raise call.refuse("[/usr/bin/ssh] exited with return code [255].", 255)
    return code


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
    words += [part for flag in call.ssh_flags for part in flag.split()]
    key = flags.get("--ssh-key-file", f"{folder}/google_compute_engine")
    return [shutil.which("ssh"), "-T", "-i", key, *words, f"{user}@{address}", "--", flags["--command"]]
