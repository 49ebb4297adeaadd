"""Everything but ssh: a command becomes a request to the TPU API, and its answer what gcloud prints."""

import json
import os
import sys

from tests.launch.fake_gcloud.cloud import Cloud
from tests.launch.fake_gcloud.synopsis import Call
from tests.launch.tpu_api.errors import ApiError

METHODS = {"create": "POST", "start": "POST", "delete": "DELETE"}


def run(cloud: Cloud, call: Call) -> int:
    """Carries out one command and returns its exit code; raises RefusedError."""
    group, verb = call.name.split(" ")
    nodes, version = group == "tpu-vm", "v2alpha1" if call.track else "v2"
    kind, noun = ("nodes", "tpu") if nodes else ("queuedResources", "queued_resource")
    path, query, body = f"/{version}/{parent(call)}/{kind}", {}, None
    if verb == "create":
        query = {"nodeId" if nodes else "queuedResourceId": call.target}
        body = _node(call) if nodes else _queued(call)
    elif verb != "list":
        path += f"/{call.target}" + (":start" if verb == "start" else "")
        query = {"force": "True"} if "--force" in call.flags else {}
    try:
        answer = cloud.request(METHODS.get(verb, "GET"), path, query, body)
        if verb in ("describe", "list"):
            print(json.dumps(answer if verb == "describe" else answer[kind], indent=2, sort_keys=True))
            return 0
        # The real one waits until the operation is done. A launcher that was interrupted in the wait meets resources
        # that are not ready; here it always does, and one that copes with it copes with the other.
        error = cloud.request("GET", f"/{version}/{answer['name']}").get("error")
    except ApiError as error:
        raise call.refuse(worded(error.error)) from error
    request = {"start": "Request"}.get(verb, f"{verb.capitalize()} request")
    print(f"{request} issued for: [{call.target}]", file=sys.stderr)
    print(f"Waiting for operation [{answer['name']}] to complete...", file=sys.stderr)
    print(f"...{'failed' if error else 'done'}.", file=sys.stderr)
    if error:
        raise call.refuse(json.dumps(error, indent=2, sort_keys=True))
    if verb != "start":
        print(f"{verb.capitalize()}d {noun} [{call.target}].", file=sys.stderr)
    return 0


def parent(call: Call) -> str:
    """Returns the name of the project and zone."""
    return f"projects/{call.flags['--project']}/locations/{call.flags['--zone']}"


def _node(call: Call) -> dict:
    flags, version = call.flags, call.flags.get("--version") or call.flags["--runtime-version"]
    network = {"enableExternalIps": "--internal-ips" not in flags, "network": flags.get("--network", "default")}
    node = {"acceleratorType": flags.get("--accelerator-type", "v2-8"), "metadata": {}, "runtimeVersion": version}
    node |= {"networkConfig": network} | ({"labels": _pairs(flags["--labels"])} if "--labels" in flags else {})
    if call.name == "tpu-vm create":
        scheduling = {name: f"--{name}" in flags for name in ("preemptible", "reserved", "spot")}
        return node | {"schedulingConfig": scheduling, "shieldedInstanceConfig": {"enableSecureBoot": False}}
    return node | {"serviceAccount": {}}


def _queued(call: Call) -> dict:
    spec = {"node": _node(call), "nodeId": call.flags["--node-id"], "parent": parent(call)}
    return {"tpu": {"nodeSpec": [spec]}} | ({"spot": {}} if "--spot" in call.flags else {})


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(","))


def worded(error: dict) -> str:
    """Returns an error of the API in gcloud's words."""
    if error["code"] == 503:  # after half a minute of its own tries
        content = json.dumps({"error": error}, indent=2)
        return (
            f"HttpError accessing <https://tpu.googleapis.com/>: response: <{{'status': 503}}>, content <{content}>\n"
            "This may be due to network connectivity issues. Please check your network settings, and the status of the "
            "service you are trying to reach."
        )
    lines, details = [f"{error['status']}: {error['message']}"], error.get("details", [])
    if error["code"] in (401, 403, 404):
        who = "as me@example.com which is the active account specified by the [core/account] property"
        if file := os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"):
            who = f"with an access token from {file} specified by the [auth/access_token_file] property"
        stop = "." if error["message"].endswith(".") else ""
        lines = [f"{lines[0].removesuffix('.')}. This command is authenticated {who}{stop}"]
    lines += [detail["message"] for detail in details if "LocalizedMessage" in detail["@type"]]
    return "\n".join(lines + _yaml([detail for detail in details if "LocalizedMessage" not in detail["@type"]], ""))


def _yaml(value: list | dict, indent: str) -> list[str]:
    """Returns the lines of a value, for the plain texts that details of errors are made of."""
    lines = []
    if isinstance(value, list):
        for one in value:
            first, *rest = _yaml(one, indent + "  ")
            lines += [f"{indent}- {first.strip()}", *rest]
        return lines
    for key, one in sorted(value.items()):
        name = f"{indent}'{key}'" if key[0] == "@" else f"{indent}{key}"
        if not isinstance(one, str):
            lines += [f"{name}:", *_yaml(one, indent if isinstance(one, list) else indent + "  ")]
            continue
        lines.append(f"{name}: {one}")
        while (at := lines[-1].find(" ", 81)) >= 0:  # it breaks a line at the first space after 80 columns
            lines[-1:] = [lines[-1][:at], f"{indent}  {lines[-1][at + 1 :]}"]
    return lines
