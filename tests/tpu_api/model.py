"""A small TPU API: nodes and queued resources that take time, operations, and errors.

All of it lies in one folder, which processes share:
    nodes.d, queued.d, operations.d   NAME.json: what GET answers, and keys of our own, which begin with "_"
    faults/*.json                     what is to go wrong (see `add_fault`)
    settings.json                     what differs from SETTINGS
Time is counted in looks: whoever gets a resource, or an operation on it, brings it nearer to its next state.
"""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator

from tests.tpu_api.errors import FAILED, REFUSED, ApiError, failure

SETTINGS = {
    "creating_describes": 1, "queue_describes": 1, "quota_chips": None, "retry_seconds": 0.05,
    "env": {},  # of commands on the hosts
    "addresses": [],  # of the hosts; default: those of the loopback
}  # fmt: skip
# Chips per unit of the number in the name (a v4-8 has 8 TensorCores on 4 chips), and the chips of the largest slice
# that is still one host; beyond it each host has 4 chips. Source: cloud.google.com/tpu/docs, pages of each version.
GENERATIONS = {"v2": (0.5, 4), "v3": (0.5, 4), "v4": (0.5, 4), "v5p": (0.5, 4), "v5litepod": (1, 8), "v6e": (1, 8)}
QUEUE = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
# What a queued request comes to when its creation meets a fault.
ENDS = {"suspended": "SUSPENDED", "failed": "FAILED", "stockout": "WAITING_FOR_RESOURCES"}
GROUPS = {"nodes": "tpu-vm", "queuedResources": "queued-resources"}  # gcloud's names
FOLDERS = {"nodes": "nodes", "queuedResources": "queued", "operations": "operations"}
VERBS = {"GET": "describe", "POST": "create", "DELETE": "delete", "PATCH": "update"}
PATH = re.compile(
    r"/(?P<version>v2|v2alpha1)/(?P<parent>projects/(?P<project>[^/]+)/locations/(?P<zone>[^/]+))"
    r"/(?P<kind>nodes|queuedResources|operations)(?:/(?P<name>[^/:]+))?(?::(?P<verb>\w+))?"
)
# Faults of the API; those of hosts and of gcloud itself are others' to play.
FAULTS = {*REFUSED, *FAILED, *ENDS, "error", "operation"}


def chips_and_hosts(accelerator_type: str) -> tuple[int, int] | None:
    """Returns the chips and hosts of a slice, None if there is no such type."""
    generation, _, number = accelerator_type.partition("-")
    if generation not in GENERATIONS or not number.isdigit():
        return None
    per_unit, one_host = GENERATIONS[generation]
    chips = int(int(number) * per_unit)
    if chips < 1 or (chips > one_host and chips % 4) or (per_unit == 0.5 and chips % 4):
        return None
    return chips, 1 if chips <= one_host else chips // 4


class Request:
    """One request of REST, taken apart."""

    def __init__(self, method: str, path: str, query: dict[str, str], body: dict | None) -> None:
        match = PATH.fullmatch(path)
        if not match:
            raise ApiError({"code": 404, "message": f"there is no {path}", "status": "NOT_FOUND"})
        self.version, self.parent, self.project, self.zone, self.kind, self.name, self.verb = match.groups()
        self.verb = self.verb or ("list" if method == "GET" and not self.name else VERBS[method])
        self.name = self.name or query.get("nodeId") or query.get("queuedResourceId") or ""
        self.query, self.body = query, body or {}
        self.resource = f"{self.parent}/{self.kind}/{self.name}"
        specs = self.body.get("tpu", {}).get("nodeSpec", [{}])
        self.node = specs[0].get("node", {}) if self.kind == "queuedResources" else self.body

    def refuse(self, error: str, limit: int = 32) -> ApiError:
        """Returns an error of REFUSED, filled in."""
        return ApiError.named(error, **self.texts(), limit=limit)

    def texts(self) -> dict[str, str]:
        """Returns what the texts of errors name."""
        kind, spot = self.node.get("acceleratorType", "v2-8"), "spot" in self.body
        spot = spot or self.node.get("schedulingConfig", {}).get("spot")
        metric = kind.partition("-")[0].upper() + ("Preemptible" if spot else "")
        return {
            "resource": self.resource, "name": self.name, "project": self.project, "zone": self.zone, "type": kind,
            "version": self.node.get("runtimeVersion", ""), "metric": f"TPU{metric}PerProjectPerZoneForTPUAPI",
            "network": self.node.get("networkConfig", {}).get("network", "default"),
        }  # fmt: skip


class Cloud:
    """The folder, and the answers to requests."""

    def __init__(self, state: str | os.PathLike) -> None:
        self.root = pathlib.Path(state).resolve()
        for folder in ("nodes.d", "queued.d", "operations.d", "faults"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def begin_hosts(self, name: str, addresses: list[str]) -> None:
        """Starts the hosts of a node; for who has some."""

    def end_hosts(self, name: str, keep_disks: bool) -> None:
        """Ends the hosts of a node at once."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the state: there are many of us at once."""
        with (self.root / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def settings(self, **values: object) -> dict:
        """Sets some settings, and returns all."""
        file = self.root / "settings.json"
        settings = SETTINGS | (json.loads(file.read_text()) if file.exists() else {})
        if unknown := values.keys() - SETTINGS.keys():
            raise ValueError(f"no such setting: {sorted(unknown)}")
        if values:
            file.write_text(json.dumps(settings | values))
        return settings | values

    def load(self, kind: str, name: str) -> dict | None:
        """Returns a resource ("nodes", "queued" or "operations"), or None."""
        file = self.root / f"{kind}.d" / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def save(self, kind: str, name: str, resource: dict | None) -> None:
        """Writes a resource; None removes it."""
        file = self.root / f"{kind}.d" / f"{name}.json"
        if resource is None:
            file.unlink(missing_ok=True)
            return
        new = file.with_suffix(".new")
        new.write_text(json.dumps(resource, indent=1))
        new.rename(file)

    def change(self, kind: str, name: str, **fields: object) -> None:
        """Changes fields of a resource: its health, its state, its metadata, whatever the API might do."""
        with self.lock():
            self.save(kind, name, self.load(kind, name) | fields)

    def names(self, kind: str) -> list[str]:
        """Returns the names of all resources of a kind."""
        return sorted(file.stem for file in (self.root / f"{kind}.d").glob("*.json"))

    def add_fault(self, command: str, fault: str, times: int = 1, **more: object) -> None:
        """Plants a fault: the next `times` uses of a command ("create", "queued-resources create", ...) meet it.

        more: match (a part of what the command names); for "error" (of the request) and "operation" also error, what
        the API says; for "failed" error, what it says of it.
        """
        number = len(list((self.root / "faults").iterdir()))
        file = self.root / "faults" / f"{number:03d}-{re.sub('[^a-z]', '-', command)}-{fault}.json"
        file.write_text(json.dumps({"command": command, "fault": fault, "times": times, **more}))

    def fault(self, command: str, kinds: set[str], text: str, worker: int | None = None) -> dict:
        """Returns the first fault that waits for such a command, and counts it down; {} if none does."""
        for file in sorted((self.root / "faults").glob("*.json")):
            fault = json.loads(file.read_text())
            if (
                fault["times"] > 0
                and fault["fault"] in kinds
                and fault["command"] in (command, command.partition(" ")[2])
                and fault.get("worker") in (None, worker)
                and fault.get("match", "") in text
            ):
                file.write_text(json.dumps(fault | {"times": fault["times"] - 1}))
                return fault
        return {}

    def preempt(self, name: str) -> None:
        """Takes a node away: its hosts are gone at once, its queued resource is SUSPENDED."""
        with self.lock():
            node = self.load("nodes", name)
            self.save("nodes", name, node | {"state": "PREEMPTED"})
            self._suspend(node, "SERVICE")
            self.end_hosts(name, keep_disks=True)

    def request(self, method: str, path: str, query: dict[str, str] | None = None, body: dict | None = None) -> dict:
        """Returns the answer to a request. Raises ApiError."""
        if match := re.fullmatch(r"/compute/v1/projects/([^/]+)", path):
            return {"kind": "compute#project", "name": match[1],
                    "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": "eA=="}}  # fmt: skip
        request = Request(method, path, query or {}, body)
        with self.lock():
            if request.kind == "operations":
                return self._operation_now(request)
            command = f"{GROUPS[request.kind]} {request.verb}"
            fault = self.fault(command, FAULTS, request.resource)
            if fault.get("fault") == "error":
                raise ApiError(fault["error"])
            if fault.get("fault") in REFUSED:
                raise request.refuse(fault["fault"])
            if request.verb == "list":
                names = self.names(FOLDERS[request.kind])
                resources = [self._advance(FOLDERS[request.kind], name) for name in names]
                shown = [_public(one) for one in resources if one["name"].startswith(request.resource)]
                return {request.kind: shown} if shown else {}
            return self._create(request, fault) if request.verb == "create" else self._change(request)

    def _create(self, request: Request, fault: dict) -> dict:
        self._check_new(request)
        kind, queued = fault.get("fault"), request.kind == "queuedResources"
        if kind == "operation" or (kind in FAILED and not queued):
            return self._operation(request, fault.get("error") or failure(kind, **request.texts()))
        node = {
            "name": request.resource, "state": "CREATING", "health": "HEALTHY", "id": str(time.time_ns()),
            "createTime": _now(), "apiVersion": request.version.upper().replace("ALPHA", "_ALPHA"),
            "_left": self.settings()["creating_describes"],
        }  # fmt: skip
        if not queued:
            self.save("nodes", request.name, request.body | node)
            return self._operation(request)
        spec = request.body["tpu"]["nodeSpec"][0]
        scheduling = {"schedulingConfig": {"spot": True}} if "spot" in request.body else {}
        node |= {"name": f"{request.parent}/nodes/{spec['nodeId']}", "queuedResource": request.resource} | scheduling
        resource = request.body | {
            "name": request.resource, "createTime": node["createTime"],
            "state": {"state": "ACCEPTED", "stateInitiator": "USER"},
            "_left": self.settings()["queue_describes"], "_end": ENDS.get(kind, "ACTIVE"), "_node": spec["node"] | node,
        }  # fmt: skip
        resource["_error"] = fault.get("error") or failure("failed")
        self.save("queued", request.name, resource)
        return self._operation(request)

    def _check_new(self, request: Request) -> None:
        """Refuses a name, a type or an amount that the service would refuse."""
        wanted = chips_and_hosts(request.node.get("acceleratorType", "v2-8"))
        if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", request.name) or request.name == "faults":
            raise request.refuse("name")
        if self.load(FOLDERS[request.kind], request.name):
            raise request.refuse("exists")
        if not wanted:
            raise request.refuse("accelerator")
        # A queued resource counts whatever its state: suspended and failed ones too, until they are deleted.
        queued = [self.load("queued", name)["_node"] for name in self.names("queued")]
        nodes = [self.load("nodes", name) for name in self.names("nodes")]
        nodes = [*queued, *(node for node in nodes if "queuedResource" not in node)]
        quota, used = self.settings()["quota_chips"], sum(chips_and_hosts(one["acceleratorType"])[0] for one in nodes)
        if quota is not None and used + wanted[0] > quota:
            raise request.refuse("quota", quota)

    def _change(self, request: Request) -> dict:
        """Answers whatever needs a resource that is there."""
        kind, name = FOLDERS[request.kind], request.name
        resource = self._advance(kind, name)
        if resource is None or resource["name"] != request.resource:
            raise request.refuse("absent")
        if request.verb == "describe":
            return _public(resource)
        if request.verb == "getGuestAttributes":
            ids = [worker for worker in request.body.get("workerIds", []) if worker]
            ids = ids or range(chips_and_hosts(resource["acceleratorType"])[1])
            return {"guestAttributes": [_guest(resource["id"], worker) for worker in ids]}
        if request.verb == "update":
            self.save(kind, name, resource | {field: request.body[field] for field in
                                              request.query["updateMask"].split(",")})  # fmt: skip
        elif request.verb == "start":
            self.save(kind, name, resource | {"state": "STARTING", "_left": self.settings()["creating_describes"]})
        elif request.verb == "stop":
            self.end_hosts(name, keep_disks=True)
            self.save(kind, name, resource | {"state": "STOPPED"})
        elif request.verb == "delete" and kind == "nodes":
            self._suspend(resource, "USER")
            self.remove_node(name)
        elif request.verb == "delete":
            node, waits = resource["_node"]["name"].rpartition("/")[2], resource["state"]["state"] in QUEUE
            if request.query.get("force", "").lower() != "true" and (waits or self.load("nodes", node)):
                raise request.refuse("in_use")
            self.remove_node(node)
            self.save("queued", name, None)
        return self._operation(request)

    def remove_node(self, name: str) -> None:
        """Removes a node with its hosts and their disks."""
        self.end_hosts(name, keep_disks=False)
        self.save("nodes", name, None)

    def _suspend(self, node: dict, initiator: str) -> None:
        name = node.get("queuedResource", "").rpartition("/")[2]
        if name and (queued := self.load("queued", name)):
            self.save("queued", name, queued | {"state": {"state": "SUSPENDED", "stateInitiator": initiator}})

    def _operation(self, request: Request, error: dict | None = None) -> dict:
        name = f"operation-{time.time_ns()}-{os.urandom(4).hex()}"
        metadata = {"createTime": _now(), "target": request.resource, "verb": request.verb}
        operation = {"name": f"{request.parent}/operations/{name}", "metadata": metadata, "done": False}
        self.save("operations", name, operation | {"_looks": 0, "_error": error})
        return operation

    def _operation_now(self, request: Request) -> dict:
        """Returns an operation: from the second look on it looks at its resource, and is done once that is."""
        operation = self.load("operations", request.name)
        self.save("operations", request.name, operation | {"_looks": operation["_looks"] + 1})
        if operation["_error"]:
            return _public(operation) | {"done": True, "error": operation["_error"]}
        *_, kind, name = operation["metadata"]["target"].split("/")
        look = self._advance if kind == "nodes" else self.load  # a request is there at once, whatever becomes of it
        resource = look(FOLDERS[kind], name) if operation["_looks"] else None
        if not operation["_looks"] or (resource and resource["state"] in ("CREATING", "STARTING")):
            return _public(operation)
        message = f"cloud.tpu.{request.version}.{'Node' if kind == 'nodes' else 'QueuedResource'}"
        kind = f"type.googleapis.com/google.{message if resource else 'protobuf.Empty'}"
        return _public(operation) | {"done": True, "response": {"@type": kind, **_public(resource or {})}}

    def _advance(self, kind: str, name: str) -> dict | None:
        """Lets time pass for a resource that somebody looks at, and returns it."""
        resource = self.load(kind, name)
        if resource is None:
            return None
        waits = resource["state"] in ("CREATING", "STARTING") if kind == "nodes" else True
        if kind == "queued":
            waits = resource["state"]["state"] in QUEUE[:3] and resource["state"]["state"] != resource["_end"]
        elif waits and "queuedResource" in resource:  # it becomes ready with its request
            self._advance("queued", resource["queuedResource"].rpartition("/")[2])
            return self.load(kind, name)
        if waits:
            resource["_left"] -= 1
            if resource["_left"] < 0:
                self._make_ready(resource) if kind == "nodes" else self._next_in_queue(resource)
            self.save(kind, name, resource)
        return resource

    def _make_ready(self, node: dict) -> None:
        configs = node.get("networkConfigs") or [node.get("networkConfig", {})]
        hosts = chips_and_hosts(node["acceleratorType"])[1]
        addresses = (self.settings()["addresses"] or [f"127.0.0.{i + 1}" for i in range(hosts)])[:hosts]
        access = {"externalIp": True} if configs[0].get("enableExternalIps", True) else {}
        node["networkEndpoints"] = [  # of the first host, one for each network, then of the second, ...
            {"accessConfig": dict.fromkeys(access, address) if network == 0 else {}, "port": 8470,
             "ipAddress": address if network == 0 else f"10.9.{network}.{host + 1}"}
            for host, address in enumerate(addresses) for network in range(len(configs))
        ]  # fmt: skip
        self.begin_hosts(node["name"].rpartition("/")[2], addresses)
        node["state"] = "READY"

    def _next_in_queue(self, resource: dict) -> None:
        state, node = QUEUE[QUEUE.index(resource["state"]["state"]) + 1], resource["_node"]
        name = node["name"].rpartition("/")[2]
        if state == "ACTIVE":
            state = resource["_end"]  # what comes to nothing does so instead of becoming active
        resource |= {
            "state": {"state": state, "stateInitiator": "SERVICE"},
            "_left": self.settings()["queue_describes"],
        }
        if state == "FAILED":
            resource["state"]["failedData"] = {"error": resource["_error"]}
        if state in ("SUSPENDED", "FAILED"):
            self.remove_node(name)
            return
        if state == "ACTIVE":
            self._make_ready(node)
        if state != "WAITING_FOR_RESOURCES":
            self.save("nodes", name, node)


def _public(resource: dict) -> dict:
    return {key: value for key, value in resource.items() if not key.startswith("_")}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _guest(node: str, worker: int | str) -> dict:
    names = {
        "hostkeys": ("ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAI0+Sf9A"),
        "guestInventory": ("hostname", f"t1v-n-{node}-w-{worker}"),
    }
    return {
        "queryValue": {
            "items": [{"namespace": space, "key": key, "value": text} for space, (key, text) in names.items()]
        }
    }
