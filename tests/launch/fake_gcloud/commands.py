"""What gcloud does: a command becomes a request to the TPU API and its answer what gcloud prints, or goes by ssh."""

import json
import shutil

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.fake_gcloud.synopsis import Call
from tests.launch.tpu_api.errors import ApiError

METHODS = {"create": "POST", "start": "POST", "delete": "DELETE"}


def run(cloud: Cloud, call: Call) -> int:
    """Carries out one command and returns its exit code; raises RefusedError."""
    group, verb = call.name.split(" ")
    if verb == "ssh":
        return _ssh(cloud, call)
    nodes = group == "tpu-vm"
    kind = "nodes" if nodes else "queuedResources"
    path = f"/v2/{_parent(call)}/{kind}"
    query = {}
    body = None
    if verb == "create":
        query = {"nodeId" if nodes else "queuedResourceId": call.target}
        body = _node(call) if nodes else _queued(call)
    elif verb != "list":
        path += f"/{call.target}" + (":start" if verb == "start" else "")
    try:
        answer = cloud.request(METHODS.get(verb, "GET"), path, query, body)
        if verb in ("describe", "list"):
            print(
                json.dumps(answer if verb == "describe" else answer[kind], indent=2, sort_keys=True)
            )
            return 0
        error = cloud.request("GET", f"/v2/{answer['name']}").get("error")
    except ApiError as error:
        raise call.refuse(_worded(error.error)) from error
    if error:
        raise call.refuse(json.dumps(error, indent=2))
    return 0


def _parent(call: Call) -> str:
    return f"projects/{call.flags['--project']}/locations/{call.flags['--zone']}"


def _node(call: Call) -> dict:
    flags = call.flags
    labels = dict(pair.split("=", 1) for pair in flags.get("--labels", "").split(",") if pair)
    return {"acceleratorType": flags["--accelerator-type"], "labels": labels}


def _queued(call: Call) -> dict:
    return {
        "tpu": {
            "nodeSpec": [
                {"node": _node(call), "nodeId": call.flags["--node-id"], "parent": _parent(call)}
            ]
        }
    }


def _worded(error: dict) -> str:
    """Returns an error of the API in gcloud's words."""
    if error["code"] == 503:  # after half a minute of its own tries
        content = json.dumps({"error": error}, indent=2)
        return f"HttpError accessing <https://tpu.googleapis.com/>: response: <{{'status': 503}}>, content <{content}>"
    return f"{error['status']}: {error['message']}"


def _ssh(cloud: Cloud, call: Call) -> int:
    user, _, name = call.target.rpartition("@")
    try:
        node = cloud.request("GET", f"/v2/{_parent(call)}/nodes/{name}")
    except ApiError as error:
        raise call.refuse(_worded(error.error)) from error
    if node["state"] != "READY":
        raise call.refuse(
            f'This TPU has state "{node["state"]}", so it cannot be currently connected to.'
        )
    addresses = [end["ipAddress"] for end in node["networkEndpoints"]]
    worker = call.flags["--worker"]
    if call.ssh_args:  # a tunnel, which lasts
        return cloud.connect(node, int(worker), call.ssh_args)
    lines = [
        _line(cloud, call, node, index, f"{user or cloud.user}@{ip}")
        for index, ip in enumerate(addresses)
    ]
    if "--dry-run" in call.flags:
        print("\n".join(" ".join(words) for words in lines))  # nothing is quoted
        return 0
    code = cloud.connect(node, int(worker), lines[int(worker)])
    if code == 255:  # after ten tries of its own
        raise call.refuse("[/usr/bin/ssh] exited with return code [255].", 255)
    return code


def _line(cloud: Cloud, call: Call, node: dict, worker: int, target: str) -> list[str]:
    """Returns the ssh command of one worker; an option is one word, "-o NAME=VALUE"."""
    flags = call.flags
    folder = f"{cloud.user_home}/.ssh"
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
    return [shutil.which("ssh"), "-T", "-i", key, *words, target, "--", flags["--command"]]
