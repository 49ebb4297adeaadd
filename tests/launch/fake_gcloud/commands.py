"""Everything but ssh: a command becomes a request to the TPU API, and its answer what gcloud prints."""

import json

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.fake_gcloud.synopsis import Call
from tests.launch.tpu_api.errors import ApiError

METHODS = {"create": "POST", "start": "POST", "delete": "DELETE"}


def run(cloud: Cloud, call: Call) -> int:
    """Carries out one command and returns its exit code; raises RefusedError."""
    group, verb = call.name.split(" ")
    nodes = group == "tpu-vm"
    kind = "nodes" if nodes else "queuedResources"
    path, query, body = f"/v2/{parent(call)}/{kind}", {}, None
    if verb == "create":
        query = {"nodeId" if nodes else "queuedResourceId": call.target}
        body = _node(call) if nodes else _queued(call)
    elif verb != "list":
        path += f"/{call.target}" + (":start" if verb == "start" else "")
    try:
        answer = cloud.request(METHODS.get(verb, "GET"), path, query, body)
        if verb in ("describe", "list"):
            print(json.dumps(answer if verb == "describe" else answer[kind], indent=2, sort_keys=True))
            return 0
        # The real one waits until the operation is done. A launcher that was interrupted in the wait meets resources
        # that are not ready; here it always does, and one that copes with it copes with the other.
        error = cloud.request("GET", f"/v2/{answer['name']}").get("error")
    except ApiError as error:
        raise call.refuse(worded(error.error)) from error
    if error:
        raise call.refuse(json.dumps(error, indent=2))
    return 0


def parent(call: Call) -> str:
    """Returns the name of the project and zone."""
    return f"projects/{call.flags['--project']}/locations/{call.flags['--zone']}"


def _node(call: Call) -> dict:
    flags = call.flags
    labels = dict(pair.split("=", 1) for pair in flags.get("--labels", "").split(",") if pair)
    return {"acceleratorType": flags["--accelerator-type"], "labels": labels}


def _queued(call: Call) -> dict:
    return {"tpu": {"nodeSpec": [{"node": _node(call), "nodeId": call.flags["--node-id"], "parent": parent(call)}]}}


def worded(error: dict) -> str:
    """Returns an error of the API in gcloud's words."""
    if error["code"] == 503:  # after half a minute of its own tries
        content = json.dumps({"error": error}, indent=2)
        return f"HttpError accessing <https://tpu.googleapis.com/>: response: <{{'status': 503}}>, content <{content}>"
    return f"{error['status']}: {error['message']}"
