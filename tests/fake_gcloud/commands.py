"""Everything but ssh: a command becomes a request to the TPU API, and its answer what gcloud prints."""

import json
import os
import sys

from tests.fake_gcloud.cloud import Cloud
from tests.fake_gcloud.synopsis import Call
from tests.tpu_api.errors import ApiError

COLLECTIONS = {"tpu-vm": ("nodes", "tpu"), "queued-resources": ("queuedResources", "queued_resource")}
DONE = {"create": "Created", "delete": "Deleted"}


def run(cloud: Cloud, call: Call) -> int:
    """Carries out one command and returns its exit code; raises RefusedError."""
    group, verb = call.name.split(" ")
    with cloud.lock():
        fault = cloud.fault(call.name, {"says"}, call.target)
    if fault:
        print(fault["text"], file=sys.stderr)
        return fault.get("code", 1)
    collection, noun = COLLECTIONS[group]
    path, query, body = f"/{_version(call)}/{parent(call)}/{collection}", {}, None
    try:
        if verb == "list":
            return _show(cloud.request("GET", path).get(collection, []))
        if verb == "describe":
            return _show(cloud.request("GET", f"{path}/{call.target}"))
        if verb == "create":
            query = {"nodeId" if group == "tpu-vm" else "queuedResourceId": call.target}
            body = _node(call) if group == "tpu-vm" else _queued(call)
        elif verb == "delete":
            path, query = f"{path}/{call.target}", {"force": "True"} if "--force" in call.flags else {}
        else:
            path, body = f"{path}/{call.target}:{verb}", {}
        operation = cloud.request("DELETE" if verb == "delete" else "POST", path, query, body)
        issued = {"create": "Create request issued", "delete": "Delete request issued"}.get(verb, "Request issued")
        print(f"{issued} for: [{call.target}]", file=sys.stderr)
        # The real one waits until the operation is done. A launcher that was interrupted in the wait meets resources
        # that are not ready; here it always does, and one that copes with it copes with the other.
        error = cloud.request("GET", f"/{_version(call)}/{operation['name']}").get("error")
    except ApiError as error:
        raise call.refuse(worded(error.error)) from error
    print(f"Waiting for operation [{operation['name']}] to complete...", file=sys.stderr)
    print(f"...{'failed' if error else 'done'}.", file=sys.stderr)
    if error:
        raise call.refuse(json.dumps(error, indent=2, sort_keys=True))
    if verb in DONE:
        print(f"{DONE[verb]} {noun} [{call.target}].", file=sys.stderr)
    return 0


def _version(call: Call) -> str:
    return "v2alpha1" if call.track else "v2"


def parent(call: Call) -> str:
    """Returns the name of the project and zone."""
    return f"projects/{call.flags['--project']}/locations/{call.flags['--zone']}"


def _show(answer: object) -> int:
    print(json.dumps(answer, indent=2, sort_keys=True))
    return 0


def _node(call: Call) -> dict:
    flags, version = call.flags, call.flags.get("--version") or call.flags["--runtime-version"]
    network = {"enableExternalIps": "--internal-ips" not in flags, "network": flags.get("--network", "default")}
    networks = [_pairs(flag) for flag in flags.get("--network-config", ())]
    node = {"acceleratorType": flags.get("--accelerator-type", "v2-8"), "metadata": {}, "runtimeVersion": version}
    node |= {"networkConfig": network} | ({"networkConfigs": networks} if networks else {})
    node |= {"labels": _pairs(flags["--labels"])} if "--labels" in flags else {}
    if call.name == "tpu-vm create":
        scheduling = {name: f"--{name}" in flags for name in ("preemptible", "reserved", "spot")}
        return node | {"schedulingConfig": scheduling, "shieldedInstanceConfig": {"enableSecureBoot": False}}
    return node | {"serviceAccount": {}} | ({"autocheckpointEnabled": False} if call.track else {})


def _queued(call: Call) -> dict:
    spec = {"node": _node(call), "nodeId": call.flags["--node-id"], "parent": parent(call)}
    model = call.flags.get("--provisioning-model", "standard").upper().replace("-", "_")  # beside spot too: a fault
    resource = {"tpu": {"nodeSpec": [spec]}} | ({"provisioningModel": model} if call.track else {})
    return resource | ({"spot": {}} if "--spot" in call.flags else {})


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(","))


def worded(error: dict) -> str:
    """Returns an error of the API in gcloud's words."""
    message, details = f"{error['status']}: {error['message']}", error.get("details", [])
    if error["code"] == 503:  # after half a minute of its own tries
        content = json.dumps({"error": error}, indent=2)
        return (
            f"HttpError accessing <https://tpu.googleapis.com/>: response: <{{'status': 503}}>, content <{content}>\n"
            "This may be due to network connectivity issues. Please check your network settings, and the status of the "
            "service you are trying to reach."
        )
    if error["code"] in (401, 403, 404):
        message = f"{message.removesuffix('.')}. {_credential()}" + "." * message.endswith(".")
    for detail in details:
        if detail["@type"].endswith("LocalizedMessage"):
            message += f"\n{detail['message']}"
    details = [detail for detail in details if not detail["@type"].endswith(("LocalizedMessage", "Help"))]
    return message + ("\n" + "\n".join(_yaml(details, 0)) if details else "")


def _credential() -> str:
    if file := os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"):
        token = f"with an access token from {file} specified by the [auth/access_token_file] property"
        return f"This command is authenticated {token}"
    return (
        "This command is authenticated as me@example.com which is the active account specified by the [core/account] "
        "property"
    )


def _yaml(value: object, column: int) -> list[str]:
    """Returns the lines of a value, for the plain texts that details of errors are made of."""
    indent, lines = " " * column, []
    if isinstance(value, list):
        for one in value:
            first, *rest = _yaml(one, column + 2)
            lines += [f"{indent}- {first.strip()}", *rest]
        return lines
    for key, one in sorted(value.items()):
        name = f"'{key}'" if key[0] == "@" else key
        if isinstance(one, str):
            lines += _folded(f"{indent}{name}: {one}", indent + "  ")
        else:
            lines += [f"{indent}{name}:", *_yaml(one, column + 2 * isinstance(one, dict))]
    return lines


def _folded(text: str, indent: str) -> list[str]:
    """Breaks a line where YAML does: at the first space after 80 columns."""
    lines = [text]
    while (at := lines[-1].find(" ", 81)) >= 0:
        lines[-1:] = [lines[-1][:at], indent + lines[-1][at + 1 :]]
    return lines
