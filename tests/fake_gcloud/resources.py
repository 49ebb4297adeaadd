"""TPUs and queued resources: create, describe, list, delete, with the states and refusals of the real service."""

import datetime
import json
import os
import re
import sys
import time

from cloud import Cloud
from synopsis import Call, RefusedError

# Chips per unit of the number in the name (a v4-8 has 8 TensorCores on 4 chips), and the chips of the largest slice
# that is still one host; beyond it each host has 4 chips. Source: cloud.google.com/tpu/docs, pages of each version.
GENERATIONS = {"v2": (0.5, 4), "v3": (0.5, 4), "v4": (0.5, 4), "v5p": (0.5, 4), "v5litepod": (1, 8), "v6e": (1, 8)}
QUEUE = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
# What a queued request comes to when it meets a fault.
ENDS = {"suspended": "SUSPENDED", "failed": "FAILED", "stockout": "WAITING_FOR_RESOURCES"}
EID = "[EID: 0x1bc8f9d790be9142]"
# The SDK adds this to answers 401, 403 and 404 (googlecloudsdk/api_lib/util/exceptions.py).
ACCOUNT = (
    "This command is authenticated as me@example.com which is the active account specified by the "
    "[core/account] property."
)


def chips_and_hosts(accelerator_type: str) -> tuple[int, int] | None:
    """Returns the chips and hosts of a slice, None if there is no such type."""
    match = re.fullmatch(r"(v2|v3|v4|v5p|v5litepod|v6e)-([0-9]+)", accelerator_type)
    if not match:
        return None
    per_unit, one_host = GENERATIONS[match[1]]
    chips = int(int(match[2]) * per_unit)
    if chips < 1 or (chips > one_host and chips % 4) or (per_unit == 0.5 and chips % 4):
        return None
    return chips, 1 if chips <= one_host else chips // 4


def addresses(count: int) -> list[str]:
    """Returns the addresses of the workers: those of real hosts in $FAKE_GCLOUD_SSH, or of the loopback."""
    if "FAKE_GCLOUD_SSH" in os.environ:
        with open(os.environ["FAKE_GCLOUD_SSH"]) as file:
            hosts = json.load(file)["hosts"]
        if len(hosts) < count:
            raise SystemExit(f"fake gcloud: {count} workers need as many hosts, {len(hosts)} given")
        return hosts[:count]
    return [f"127.0.0.{i + 1}" for i in range(count)]


def run(cloud: Cloud, call: Call) -> int:
    """Carries out one command and returns its exit code; raises RefusedError."""
    group, verb = call.name.split(" ")
    if call.flags.get("--format") not in (None, "json"):
        raise SystemExit("fake gcloud: --format=json is the only one that is written here")
    if verb in ("describe", "list") and "--format" not in call.flags:
        raise SystemExit("fake gcloud: a script that reads the answer needs --format=json")
    kind = {"tpu-vm": "nodes", "queued-resources": "queued"}[group]
    with cloud.lock():
        fault = cloud.fault(group, verb, None, " ".join(call.positionals))
        _refuse_by_fault(call, fault)
        if verb == "create":
            create = _create_node if kind == "nodes" else _create_queued
            return create(cloud, call, fault["fault"] if fault else None)
        if verb == "list":
            for name in cloud.names(kind):
                _advance(cloud, kind, name)
            shown = [cloud.load(kind, name) for name in cloud.names(kind)]
            print(json.dumps([_public(one) for one in shown if _prefix(call) in one["name"]], indent=2))
            return 0
        resource = _find(cloud, call, kind, fault["fault"] if fault else None)
        if verb == "describe":
            print(json.dumps(_public(resource), indent=2))
            return 0
        if verb == "start":
            return _start(cloud, call, resource)
        return _delete(cloud, call, kind, resource)


def _prefix(call: Call) -> str:
    return f"projects/{call.flags['--project']}/locations/{call.flags['--zone']}/"


def _public(resource: dict) -> dict:
    return {key: value for key, value in sorted(resource.items()) if not key.startswith("_")}


def _refuse_by_fault(call: Call, fault: dict | None) -> None:
    zone = call.flags["--zone"]
    kind = fault["fault"] if fault else None
    if kind == "permission":
        raise call.refuse(
            f"PERMISSION_DENIED: Permission denied on 'locations/{zone}' (or it may not exist). {ACCOUNT}\n"
            "- '@type': type.googleapis.com/google.rpc.ErrorInfo\n  domain: googleapis.com\n"
            "  reason: LOCATION_POLICY_VIOLATED"
        )
    if kind == "quota":
        raise _quota(call, 32)
    if kind == "unavailable":
        raise call.refuse("UNAVAILABLE: The service is currently unavailable.")
    if kind in ("stockout", "internal") and call.name == "tpu-vm create":
        print(f"Create request issued for: [{call.positionals[0]}]", file=sys.stderr)
        operation = f"{_prefix(call)}operations/operation-1756107470419-63d2ba1f634f4-1870ab42-710b6c51"
        print(f"Waiting for operation [{operation}] to complete...failed.", file=sys.stderr)
        message = (
            f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
            f"offered (see https://cloud.google.com/tpu/docs/regions) {EID}"
        )
        internal = {"code": 13, "message": "an internal error has occurred"}
        raise call.refuse(json.dumps({"code": 8, "message": message} if kind == "stockout" else internal, indent=2))


def _quota(call: Call, limit: int) -> RefusedError:
    spot = "Preemptible" if "--spot" in call.flags else ""
    generation = call.flags.get("--accelerator-type", "v2-8").partition("-")[0].upper()
    metric = f"TPU{generation}{spot}PerProjectPerZoneForTPUAPI"
    return call.refuse(
        f"RESOURCE_EXHAUSTED: Quota limit '{metric}' has been exceeded. Limit: {limit} in zone "
        f"{call.flags['--zone']}.\n- '@type': type.googleapis.com/google.rpc.QuotaFailure\n"
        f"  violations:\n  - description: Quota '{metric}' exhausted. Limit {limit} in zone {call.flags['--zone']}\n"
    )


def _check_new(cloud: Cloud, call: Call, kind: str, name: str, accelerator_type: str) -> None:
    """Refuses a name, a type or an amount that the service would refuse."""
    zone = call.flags["--zone"]
    if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) or name == "faults":
        raise call.refuse(f"INVALID_ARGUMENT: Cloud TPU received a bad request. Invalid id {name!r} {EID}")
    if cloud.load(kind, name):
        collection = "nodes" if kind == "nodes" else "queuedResources"
        raise call.refuse(f"ALREADY_EXISTS: Resource '{_prefix(call)}{collection}/{name}' already exists.")
    if not chips_and_hosts(accelerator_type):
        raise call.refuse(
            "INVALID_ARGUMENT: Cloud TPU received a bad request. The requested accelerator configuration for "
            f'accelerator type, "{accelerator_type}", could not be found in the zonal accelerator configurations for '
            f'"{zone}".; the accelerator {accelerator_type} was not found in zone {zone} {EID}'
        )
    quota = cloud.settings()["quota_chips"]
    # A queued resource counts whatever its state: suspended and failed ones too, until they are deleted.
    types = [cloud.load("queued", one)["_type"] for one in cloud.names("queued")]
    nodes = [cloud.load("nodes", one) for one in cloud.names("nodes")]
    types += [node["acceleratorType"] for node in nodes if "queuedResource" not in node]
    used = sum(chips_and_hosts(one)[0] for one in types)
    if quota is not None and used + chips_and_hosts(accelerator_type)[0] > quota:
        raise _quota(call, quota)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _new_node(cloud: Cloud, call: Call, name: str, version: str, queued: str | None = None) -> dict:
    accelerator_type = call.flags.get("--accelerator-type", "v2-8")
    scheduling = {flag: True for flag in ("preemptible", "spot") if f"--{flag}" in call.flags}
    node = {
        "acceleratorType": accelerator_type, "apiVersion": "V2", "createTime": _now(), "health": "HEALTHY",
        "id": str(time.time_ns()), "name": f"{_prefix(call)}nodes/{name}",
        "networkConfig": {"enableExternalIps": True, "network": call.flags.get("--network", "default")},
        "runtimeVersion": version, "schedulingConfig": scheduling, "state": "CREATING",
        "_left": cloud.settings()["creating_describes"],
    }  # fmt: skip
    if "--labels" in call.flags:
        node["labels"] = dict(label.split("=", 1) for label in call.flags["--labels"].split(","))
    return node | ({"queuedResource": queued} if queued else {})


def _create_node(cloud: Cloud, call: Call, fault: str | None) -> int:
    name = call.positionals[0]
    _check_new(cloud, call, "nodes", name, call.flags.get("--accelerator-type", "v2-8"))
    # The real command, without --async, returns when the TPU is READY. Here it is CREATING for some describes all the
    # same: a launcher that was interrupted in the wait meets this, and one that copes with it copes with the other.
    cloud.save("nodes", name, _new_node(cloud, call, name, call.flags["--version"]))
    print(f"Create request issued for: [{name}]\nCreated tpu [{name}].", file=sys.stderr)
    return 0


def _create_queued(cloud: Cloud, call: Call, fault: str | None) -> int:
    name, flags = call.positionals[0], call.flags
    if "--node-id" not in flags or "--accelerator-type" not in flags:
        raise SystemExit("fake gcloud: only --node-id and --accelerator-type are played here")
    _check_new(cloud, call, "queued", name, flags["--accelerator-type"])
    full = f"{_prefix(call)}queuedResources/{name}"
    node = _new_node(cloud, call, flags["--node-id"], flags["--runtime-version"], full)
    resource = {
        "createTime": _now(),
        "name": full,
        "state": {"state": "ACCEPTED"},
        "tpu": {"nodeSpec": [{"node": _public(node), "nodeId": flags["--node-id"], "parent": _prefix(call)[:-1]}]},
        "_type": flags["--accelerator-type"],
        "_left": cloud.settings()["queue_describes"],
        "_end": ENDS.get(fault, "ACTIVE"),
        "_node": node,
    } | ({"spot": {}} if "--spot" in flags else {})
    cloud.save("queued", name, resource)
    print(f"Create request issued for: [{name}]\nCreated queued resource [{name}].", file=sys.stderr)
    return 0


def _advance(cloud: Cloud, kind: str, name: str) -> dict | None:
    """Lets time pass for a resource that somebody looks at, and returns it."""
    resource = cloud.load(kind, name)
    if resource is None:
        return None
    if resource["state"] == "CREATING" and "queuedResource" in resource:  # it becomes ready with its request
        _advance(cloud, "queued", resource["queuedResource"].rpartition("/")[2])
        return cloud.load(kind, name)
    if kind == "nodes" and resource["state"] in ("CREATING", "STARTING"):
        resource["_left"] -= 1
        if resource["_left"] < 0:
            _make_ready(cloud, name, resource)
    elif kind == "queued" and resource["state"]["state"] in QUEUE[:3]:
        resource["_left"] -= 1
        if resource["_left"] < 0:
            _next_in_queue(cloud, resource)
    else:
        return resource
    cloud.save(kind, name, resource)
    return resource


def _make_ready(cloud: Cloud, name: str, node: dict) -> None:
    ips = addresses(chips_and_hosts(node["acceleratorType"])[1])
    for i in range(len(ips)):
        cloud.home(name, i).mkdir(parents=True, exist_ok=True)
    node["networkEndpoints"] = [{"accessConfig": {"externalIp": ip}, "ipAddress": ip, "port": 8470} for ip in ips]
    node["state"] = "READY"


def _next_in_queue(cloud: Cloud, resource: dict) -> None:
    now, end = resource["state"]["state"], resource["_end"]
    if now == end:
        return
    state = QUEUE[QUEUE.index(now) + 1]
    # A request that comes to nothing does so instead of becoming active.
    state = end if state == "ACTIVE" else state
    resource["state"]["state"] = state
    resource["_left"] = cloud.settings()["queue_describes"]
    node, name = resource["_node"], resource["_node"]["name"].rpartition("/")[2]
    if state == "PROVISIONING":
        cloud.save("nodes", name, node)
    elif state == "ACTIVE":
        _make_ready(cloud, name, node)
        cloud.save("nodes", name, node)
    elif state in ("SUSPENDED", "FAILED"):
        cloud.remove_node(name)


def _find(cloud: Cloud, call: Call, kind: str, fault: str | None) -> dict:
    name = call.positionals[0]
    resource = _advance(cloud, kind, name)
    collection = "nodes" if kind == "nodes" else "queuedResources"
    full = f"{_prefix(call)}{collection}/{name}"
    if resource is None or resource["name"] != full:
        raise call.refuse(
            f"NOT_FOUND: Resource '{full}' was not found. {ACCOUNT}\n"
            "- '@type': type.googleapis.com/google.rpc.ResourceInfo\n"
            f"  resourceName: {full}"
        )
    if fault in ("suspended", "failed") and kind == "queued":
        resource["state"]["state"] = fault.upper()
        cloud.save(kind, name, resource)
    return resource


def _start(cloud: Cloud, call: Call, node: dict) -> int:
    name = call.positionals[0]
    if node["state"] != "STOPPED":
        raise SystemExit("fake gcloud: start is played for a STOPPED TPU alone")
    cloud.save("nodes", name, node | {"state": "STARTING", "_left": cloud.settings()["creating_describes"]})
    print(f"Request issued for: [{name}]\nStarted tpu [{name}].", file=sys.stderr)
    return 0


def _delete(cloud: Cloud, call: Call, kind: str, resource: dict) -> int:
    name = call.positionals[0]
    if "--quiet" not in call.flags:
        raise SystemExit("fake gcloud: without --quiet the real one asks before it deletes")
    if kind == "nodes":
        queued = resource.get("queuedResource", "").rpartition("/")[2]
        if queued and (owner := cloud.load("queued", queued)):
            owner["state"]["state"] = "SUSPENDED"
            cloud.save("queued", queued, owner)
        cloud.remove_node(name)
    else:
        node = resource["_node"]["name"].rpartition("/")[2]
        state = resource["state"]["state"]
        if "--force" not in call.flags and (cloud.load("nodes", node) or state not in ("SUSPENDED", "FAILED")):
            raise call.refuse(
                f"FAILED_PRECONDITION: Queued resource '{resource['name']}' is in state {state} and has nodes or may "
                f"still get them; delete its nodes first, or force. {EID}"
            )
        cloud.remove_node(node)
        cloud.save("queued", name, None)
    print(f"Delete request issued for: [{name}]\nDeleted [{name}].", file=sys.stderr)
    return 0
