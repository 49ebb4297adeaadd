"""ssh to a host, with gcloud's own reruns.

What the real `tpu-vm ssh` does when ssh itself fails (exit code 255: no connection, a lost one, or a remote command
that a signal ended): it runs the same command line again, up to ten times in all, with whatever is left on its standard
input. Any other exit code is passed on.
Source: lib/googlecloudsdk/command_lib/compute/tpus/tpu_vm/ssh.py (AttemptRunWithRetries) of Google Cloud SDK 528.0.0.
"""

import os
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
    node, worker = ready_node(cloud, call), call.flags.get("--worker", "0")
    addresses = [end["ipAddress"] for end in node.get("networkEndpoints", ())]
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
    connection = cloud.connection(node, int(worker), lines[0])
    for attempt in range(ATTEMPTS):
        print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
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
